"""How native kernels are compiled, kept, chosen and loaded; most of it on a source of a few lines."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headwater.config import KERNELS, default_cache_dir
from headwater.errors import ConfigError, KernelError
from headwater.kernels.choose import make_ops
from headwater.kernels.cpu import build as build_module
from headwater.kernels.cpu import variants
from headwater.kernels.cpu.build import SOURCES, build
from headwater.kernels.cpu.compiler import find_compiler
from headwater.kernels.cpu.library import Library, load_library
from headwater.kernels.cpu.variants import VARIANTS, best_variant, cpu_features, obstacle

ROOT = Path(__file__).parent.parent.parent
TINY = """
#include <omp.h>
extern "C" __attribute__((visibility("default"))) int answer() { return 42; }
extern "C" __attribute__((visibility("default"))) int most_threads() { return omp_get_max_threads(); }
extern "C" __attribute__((visibility("default"))) int threads_used() {
  int n = 0;
#pragma omp parallel reduction(+ : n)
  n += 1;
  return n;
}
"""


@pytest.fixture(autouse=True)
def needs_a_compiler(request: pytest.FixtureRequest) -> None:
    try:
        find_compiler()
    except KernelError as error:
        pytest.skip(str(error))


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(TINY)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing here"))


# ---- compiling --------------------------------------------------------------------------------------


def test_compiled_once_and_loaded(sources: Path, folder: Path) -> None:
    told: list[tuple[str, float]] = []
    path = build("portable", folder, lambda what, done: told.append((what, done)), sources=sources)
    assert told[0] == ("compiling the kernels for this CPU, once", 0.0) and told[-1][1] == 1.0
    library = Library("portable", path)
    assert library.variant == "portable"
    assert library.bind("answer", ctypes.c_int, [])() == 42
    with pytest.raises(KernelError, match="no function question"):
        library.bind("question", None, [])
    again: list[object] = []
    assert build("portable", folder, lambda *what: again.append(what), sources=sources) == path
    assert again == []
    kept = sorted(file.name for file in folder.iterdir() if not file.name.startswith(".lock"))
    assert kept == [path.name, f"{path.name}.sha256"]


def test_whatever_goes_in_makes_another_library(sources: Path, folder: Path) -> None:
    paths = {build("portable", folder, sources=sources)}
    paths.add(build("portable", folder, sources=sources, compiler="c++ -DOTHER"))
    (sources / "more.h").write_text("// a header counts\n")
    paths.add(build("portable", folder, sources=sources))
    (sources / "tiny.cpp").write_text(TINY.replace("42", "43"))
    paths.add(build("portable", folder, sources=sources))
    assert len(paths) == 4


def test_the_compilers_message_comes_with_the_error(sources: Path, folder: Path) -> None:
    (sources / "broken.cpp").write_text("int f() { return nonsense; }\n")
    with pytest.raises(KernelError, match=r"could not compile broken\.cpp \(portable\): .*nonsense") as failed:
        build("portable", folder, sources=sources)
    assert "broken.cpp:1" in failed.value.output
    assert [file.name for file in folder.iterdir() if not file.name.startswith(".lock")] == []


def test_an_undefined_function_is_found_at_once(sources: Path, folder: Path) -> None:
    (sources / "user.cpp").write_text('extern "C" int gone(); extern "C" int use() { return gone(); }\n')
    with pytest.raises(KernelError, match=r"could not link the kernels.*gone"):
        build("portable", folder, sources=sources)


def test_several_processes_at_once(sources: Path, folder: Path) -> None:
    code = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from headwater.kernels.cpu import build as module
        compile = module._compile
        module._compile = lambda *given: (print("compiled"), compile(*given))[1]
        while time.time() < {time.time() + 6}: pass
        print(module.build("portable", Path({str(folder)!r}), sources=Path({str(sources)!r})))
        """
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sorted(map(len, said)) == [1, 1, 2]  # one compiled, all got it
    assert len({words[-1] for words in said}) == 1
    assert [str(file) for file in folder.glob("*.so")] == [said[0][-1]]
    assert list(folder.glob(".build-*")) == []


def test_a_folder_that_cannot_be_written(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelError, match="cannot keep the compiled kernels there"):
        build("portable", tmp_path / "file" / "kernels", sources=sources)


def test_a_damaged_library_is_an_error_of_its_own(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "damaged.so").write_bytes(b"nothing")
    with pytest.raises(KernelError, match=r"damaged\.so: the kernels cannot be loaded"):
        Library("portable", folder / "damaged.so")


def test_libraries_that_nobody_loads_any_more_go(sources: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("old.so", "new.so"):
        (folder / name).write_bytes(b"")
    os.utime(folder / "old.so", (0, 0))
    made = build("portable", folder, sources=sources)
    assert sorted(file.name for file in folder.glob("*.so")) == sorted(["new.so", made.name])


def cut_in_half(library: Path) -> None:
    library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])


def make_empty(library: Path) -> None:
    library.write_bytes(b"")


def flip_a_bit(library: Path) -> None:
    code = bytearray(library.read_bytes())
    code[len(code) // 2] ^= 1
    library.write_bytes(code)


def lose_the_digest(library: Path) -> None:
    library.with_name(library.name + ".sha256").unlink()


@pytest.mark.parametrize("damage", [cut_in_half, make_empty, flip_a_bit, lose_the_digest])
def test_a_library_that_is_not_as_it_was_kept_is_compiled_again(
    damage: Callable[[Path], None], sources: Path, folder: Path
) -> None:
    path = build("portable", folder, sources=sources)
    good = path.read_bytes()
    damage(path)
    assert build("portable", folder, sources=sources) == path
    assert Library("portable", path).bind("answer", ctypes.c_int, [])() == 42
    assert len(path.read_bytes()) == len(good)


def test_a_damaged_library_is_not_used_where_none_can_be_compiled(
    sources: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_bit(build("portable", folder, sources=sources))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelError, match="no C\\+\\+ compiler"):
        build("portable", folder, sources=sources)


def test_what_a_killed_compilation_left_goes(sources: Path, folder: Path) -> None:
    for name in (".build-old", ".build-new"):
        (folder / name).mkdir(parents=True)
        (folder / name / "half.o").write_bytes(b"")
    os.utime(folder / ".build-old", (0, 0))
    build("portable", folder, sources=sources)
    assert [file.name for file in folder.glob(".build-*")] == [".build-new"]


# ---- compilers --------------------------------------------------------------------------------------


def fake_compiler(folder: Path, name: str, says: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / name).chmod(0o755)


def test_gcc_goes_before_clang_where_pytorch_brings_gccs_openmp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_compiler(tmp_path / "bin", "c++", "Debian clang version 19")
    fake_compiler(tmp_path / "bin", "g++", "g++ 12")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_compiler(None, Path("libgomp.so.1")).command == (str(tmp_path / "bin" / "g++"),)
    assert find_compiler(None, Path("libomp.dylib")).command == (str(tmp_path / "bin" / "c++"),)


def test_a_broken_compiler_does_not_hide_a_good_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_compiler(tmp_path / "bin", "c++", "broken")
    (tmp_path / "bin" / "c++").write_text("#!/bin/sh\necho broken wrapper >&2\nexit 1\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(KernelError, match="broken wrapper"):
        find_compiler()
    fake_compiler(tmp_path / "bin", "g++", "g++ 12")
    assert find_compiler().command == (str(tmp_path / "bin" / "g++"),)


def test_a_compiler_may_bring_arguments() -> None:
    assert find_compiler("c++ -O1").command == ("c++", "-O1")
    with pytest.raises(KernelError, match="'no-such-compiler' is not found; install"):
        find_compiler("no-such-compiler")


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_pytorch_serves_and_a_line_says_so(folder: Path) -> None:
    ops = make_ops(torch.float32, kernels="auto", folder=folder)
    assert type(ops).__name__ == "TorchOps"
    (note,) = ops.notes
    assert "no C++ compiler is found" in note and "install" in note and "several times as long" in note


@pytest.mark.usefixtures("without_compiler")
def test_kernels_asked_for_by_name_are_not_replaced(folder: Path) -> None:
    with pytest.raises(ConfigError, match="kernels=portable: no C\\+\\+ compiler is found"):
        make_ops(torch.float32, kernels="portable", folder=folder)
    assert make_ops(torch.float32, kernels="torch", folder=folder).notes == []


def test_what_was_compiled_before_needs_no_compiler(
    sources: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build("portable", folder, sources=sources)
    monkeypatch.setenv("PATH", "")
    assert build("portable", folder, sources=sources) == path
    (sources / "tiny.cpp").write_text(TINY.replace("42", "43"))
    with pytest.raises(KernelError, match="no C\\+\\+ compiler"):
        build("portable", folder, sources=sources)


def test_a_failed_compilation_falls_back_with_its_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> Path:
        raise KernelError("c++ could not compile x.cpp: error: y", output="all")

    monkeypatch.setattr(build_module, "_compile", fail)
    (note,) = make_ops(torch.float32, kernels="auto", folder=folder).notes
    assert "could not compile x.cpp: error: y" in note


# ---- choosing ---------------------------------------------------------------------------------------


def test_options_name_every_variant() -> None:
    assert set(KERNELS) == {"auto", "torch", *VARIANTS}


@pytest.mark.skipif(not variants.is_x86_64(), reason="names features of x86-64")
@pytest.mark.parametrize(
    ("features", "best"),
    [
        (variants.BF16, "avx512bf16"),
        (variants.V4, "avx512"),
        (variants.V3, "avx2"),
        ([f for f in variants.V4 if f != "avx512vl"], "avx2"),
        ([f for f in variants.V3 if f != "fma"], "portable"),
        ((), "portable"),
    ],
)
def test_the_best_that_the_cpu_runs(features: list[str], best: str) -> None:
    assert next(name for name in VARIANTS if obstacle(name, features) is None) == best


@pytest.mark.skipif(not variants.is_x86_64(), reason="names features of x86-64")
def test_amx_needs_the_operating_systems_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    features = VARIANTS["amx"].needs
    for allowed, best in ((True, "amx"), (False, "avx512bf16")):
        monkeypatch.setattr(variants, "allow_amx", lambda allowed=allowed: allowed)
        assert next(name for name in VARIANTS if obstacle(name, features) is None) == best


def test_on_another_processor_the_portable_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert best_variant() == "portable"
    assert obstacle("avx2") == "this CPU is aarch64"


def test_features_are_the_kernels_own_words(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nflags\t\t: fpu avx avx2\nbugs : x\nflags : other\n")
    assert cpu_features(file) == {"fpu", "avx", "avx2"}
    assert cpu_features(tmp_path / "none") == frozenset()


def test_an_unknown_or_impossible_variant_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match="no kernels are called 'sse9'"):
        build("sse9", folder)
    monkeypatch.setattr(variants, "cpu_features", lambda: frozenset({"avx"}))
    with pytest.raises(KernelError, match="'avx2' do not run here: this CPU "):
        load_library(folder, "avx2")


# ---- OpenMP -----------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_openmp_runtime_and_one_pool_of_threads(sources: Path, folder: Path) -> None:
    path = build("portable", folder, sources=sources)
    code = textwrap.dedent(
        f"""
        import ctypes, os, re
        from pathlib import Path
        import torch
        from headwater.kernels.cpu.library import Library

        def threads():
            return len(os.listdir("/proc/self/task"))

        torch.set_num_threads(4)
        library = Library("portable", Path({str(path)!r}))
        used = library.bind("threads_used", ctypes.c_int, [])
        most = library.bind("most_threads", ctypes.c_int, [])
        before = threads()
        x = torch.ones(1 << 22)
        x + x                       # PyTorch's own parallel loop
        with_torch = threads()
        counts = [most(), used()]   # then ours
        with_both = threads()
        torch.set_num_threads(2)
        counts += [most(), used()]
        maps = Path("/proc/self/maps").read_text()
        runtimes = set(re.findall(r"\\S*(?:libgomp|libomp|libiomp)\\S*", maps))
        print(with_torch - before, with_both - with_torch, counts, len(runtimes))
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.stdout.strip()) == ("", "3 0 [4, 4, 2, 2] 1")


# ---- the package ------------------------------------------------------------------------------------


def test_the_package_ships_the_sources() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["headwater"]
    package = SOURCES.parent.parent
    files = {file for pattern in shipped for file in package.glob(pattern)}
    assert {file for file in SOURCES.iterdir() if file.suffix not in (".py", "") and file.is_file()} <= files
    assert any(file.suffix == ".cpp" for file in files) and any(file.suffix == ".h" for file in files)


def test_a_user_without_a_home_folder_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", staticmethod(no_home))
    with pytest.raises(ConfigError, match="--model-cache-dir"):
        default_cache_dir()
