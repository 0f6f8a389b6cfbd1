"""Compiling the native kernels for one variant, once per machine, into a cache folder.

The library's name holds digests of all that goes into it, so that whatever changes makes another file, and a
file that is there, whole (kept.py), is never written again:

    avx2-<sources, flags, OpenMP runtime>-<compiler>.so

Where there is no compiler (any more), what another one made of the same sources serves.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from headwater.errors import KernelError
from headwater.kernels.cpu.compiler import COMMON_FLAGS, Compiler, find_compiler, run_compiler
from headwater.kernels.cpu.kept import SCRATCH, is_sound, keep, remove_unused
from headwater.kernels.cpu.openmp import torch_openmp
from headwater.kernels.cpu.variants import VARIANTS, Variant
from headwater.types import Progress, silent

SOURCES = Path(__file__).parent
WHAT = "compiling the kernels for this CPU, once"


def build(
    variant: str,
    folder: Path,
    progress: Progress = silent,
    *,
    compiler: str | None = None,
    sources: Path = SOURCES,
) -> Path:
    """The shared library of ``variant`` in ``folder``, compiled unless it is there.

    ``compiler`` is a command as in $CXX; None finds one. Several processes may build at once. Raises KernelError
    if there is no compiler and nothing compiled, if it fails, or if the folder cannot be written.
    """
    if sys.platform == "win32":
        raise KernelError("the native kernels are not built on Windows")
    if variant not in VARIANTS:
        raise KernelError(f"no kernels are called {variant!r}: there are {', '.join(VARIANTS)}")
    openmp = torch_openmp()
    try:
        chosen = find_compiler(compiler, openmp)
    except KernelError:
        built = compiled_before(VARIANTS[variant], folder, openmp, sources)
        if built is None or compiler is not None:
            raise
        return built
    target = library_path(VARIANTS[variant], folder, chosen, openmp, sources)
    if is_sound(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f".lock-{variant}"):
            if not is_sound(target):  # else another process has just made it
                remove_unused(folder)
                with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
                    made = _compile(VARIANTS[variant], chosen, openmp, sources, Path(scratch), progress)
                    keep(made, target)
    except OSError as error:
        raise KernelError(f"{folder}: cannot keep the compiled kernels there: {error}") from error
    return target


def library_path(
    variant: Variant, folder: Path, compiler: Compiler, openmp: Path | None, sources: Path = SOURCES
) -> Path:
    """Where the library of exactly these sources, flags, OpenMP runtime and compiler is or will be."""
    flags = (*compiler.compile_flags(openmp), *compiler.link_flags(openmp))
    made_by = _digest([*compiler.command, compiler.version, *flags])
    return folder / f"{variant.name}-{_content(variant, openmp, sources)}-{made_by}.so"


def compiled_before(variant: Variant, folder: Path, openmp: Path | None, sources: Path = SOURCES) -> Path | None:
    """The newest sound library of these sources, whichever compiler made it; None if there is none."""
    libraries = folder.glob(f"{variant.name}-{_content(variant, openmp, sources)}-*.so")
    return max(filter(is_sound, libraries), key=lambda path: path.stat().st_mtime, default=None)


def _content(variant: Variant, openmp: Path | None, sources: Path) -> str:
    """A digest of what is compiled, how, and for which OpenMP runtime."""
    files = sorted([*sources.glob("*.cpp"), *sources.glob("*.h")])
    digests = [f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
    return _digest([*COMMON_FLAGS, *variant.flags, str(openmp), platform.machine(), *digests])


def _digest(parts: list[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()[:16]


def _compile(
    variant: Variant, compiler: Compiler, openmp: Path | None, sources: Path, scratch: Path, progress: Progress
) -> Path:
    """Each source to an object, side by side; then the library, in ``scratch``."""
    files = sorted(sources.glob("*.cpp"))
    objects = [scratch / f"{file.stem}.o" for file in files]
    flags = (*compiler.compile_flags(openmp), *variant.flags)
    progress(WHAT, 0.0)
    with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
        running = [
            pool.submit(
                run_compiler,
                (*compiler.command, *flags, "-c", str(file), "-o", str(made)),
                f"compile {file.name} ({variant.name})",
            )
            for file, made in zip(files, objects, strict=True)
        ]
        for n_done, job in enumerate(as_completed(running), 1):
            try:
                job.result()
            except KernelError:
                for other in running:
                    other.cancel()
                raise
            progress(WHAT, n_done / (len(files) + 1))
    made = scratch / "kernels.so"
    command = (*compiler.command, *map(str, objects), "-o", str(made), *compiler.link_flags(openmp))
    run_compiler(command, f"link the kernels ({variant.name})")
    progress(WHAT, 1.0)
    return made


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time; where a file system has no locks, several do the same work and the last one wins."""
    import fcntl  # here: not on Windows, where nothing is built

    with open(lock, "w") as handle:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
