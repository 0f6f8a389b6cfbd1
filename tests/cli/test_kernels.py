"""``headwater kernels``."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.cli import kernels as kernels_module
from headwater.cli import main
from headwater.cli.arguments import parse
from headwater.config import KERNELS
from headwater.errors import KernelError
from headwater.kernels.cpu import build as build_module
from headwater.kernels.cpu.variants import best_variant, is_x86_64


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variants that were "compiled", in no time."""
    names: list[str] = []

    def compile(variant: build_module.Variant, *rest: object) -> Path:
        names.append(variant.name)
        scratch = rest[3]
        assert isinstance(scratch, Path)
        (scratch / "kernels.so").write_bytes(b"x" * 2048)
        return scratch / "kernels.so"

    monkeypatch.setattr(build_module, "_compile", compile)
    return names


def test_build_makes_the_best_once(compiled: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["kernels", "build", "--model-cache-dir", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(best_variant()) and str(tmp_path / "kernels") in shown and "2 KiB" in shown
    assert compiled == [best_variant()]


def test_build_what_is_named(compiled: list[str], tmp_path: Path) -> None:
    assert main(["kernels", "build", "portable", "avx2", "--model-cache-dir", str(tmp_path)]) == 0
    assert compiled == ["portable", "avx2"]
    assert main(["kernels", "build", "all", "--model-cache-dir", str(tmp_path)]) == 0
    assert set(compiled) == (set(KERNELS) - {"auto", "torch"} if is_x86_64() else {"portable", "avx2"})


def test_build_of_an_unknown_variant(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["kernels", "build", "sse9", "--model-cache-dir", str(tmp_path)]) == 1
    assert "no kernels are called 'sse9': there are amx" in capsys.readouterr().err


def test_a_failed_build_shows_all_that_the_compiler_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*given: object, **options: object) -> Path:
        raise KernelError("c++ could not compile x.cpp: first line", output="first line\nsecond line")

    monkeypatch.setattr(kernels_module, "build", fail)
    assert main(["kernels", "build", "--model-cache-dir", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "second line" in shown.out
    assert shown.err == "headwater: error: c++ could not compile x.cpp: first line\n"


def test_info_says_what_is_chosen_and_what_is_there(
    compiled: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--model-cache-dir", str(tmp_path)]
    assert main(["kernels", "info", *options]) == 0
    before = capsys.readouterr().out
    (chosen,) = (line for line in before.splitlines() if "chosen:" in line)
    assert best_variant() in chosen and "no" in chosen
    assert f"{tmp_path / 'kernels'} (0 compiled" in before
    assert main(["kernels", "build", *options]) == 0
    assert main(["kernels", "info", *options]) == 0
    (chosen,) = (line for line in capsys.readouterr().out.splitlines() if "chosen:" in line)
    assert "2 KiB" in chosen


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["kernels", "info", "--model-cache-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "no C++ compiler is found" in shown and "install" in shown
    assert main(["kernels", "build", "--model-cache-dir", str(tmp_path)]) == 1
    assert "no C++ compiler is found" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["kernels", "--help"], ["kernels", "build", "--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "headwater kernels build avx2 portable" in shown or "avx512bf16" in shown


def test_the_variable_cxx_names_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++-13 -O1")
    for argv in (["serve"], ["kernels", "info"]):
        assert parse(argv).compiler == "g++-13 -O1"
    assert parse(["serve", "--compiler", "clang++"]).compiler == "clang++"
    monkeypatch.delenv("CXX")
    assert parse(["serve"]).compiler is None
