"""The machine's C++ compiler: finding it, knowing what it is, and running it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import KernelError

CANDIDATES = ("c++", "g++", "clang++")
TIMEOUT_S = 600.0
FAILURES = ("error:", "undefined reference", "Undefined symbols")
"""Words in the line that says what is wrong."""

COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden")


@dataclass(frozen=True, slots=True)
class Compiler:
    """``command`` starts it; ``version`` is all that tells it from another one."""

    command: tuple[str, ...]
    version: str
    is_clang: bool

    @property
    def name(self) -> str:
        """The first line of the version, for people."""
        return f"{shlex.join(self.command)}: {self.version.splitlines()[0]}"

    def compile_flags(self, openmp: Path | None) -> tuple[str, ...]:
        """Flags for each file, OpenMP's among them if there is a runtime to link with."""
        if openmp is None:
            return COMMON_FLAGS
        if sys.platform == "darwin" and self.is_clang:  # Apple's driver does not know -fopenmp, its front end does
            return (*COMMON_FLAGS, "-Xclang", "-fopenmp")
        return (*COMMON_FLAGS, "-fopenmp")

    def link_flags(self, openmp: Path | None) -> tuple[str, ...]:
        """Flags for the library. The runtime is named by its file: ``-fopenmp`` would take the compiler's own."""
        shared = ("-shared",) if sys.platform == "darwin" else ("-shared", "-Wl,--no-undefined")
        return shared if openmp is None else (*shared, str(openmp), f"-Wl,-rpath,{openmp.parent}")


def find_compiler(command: str | None = None, openmp: Path | None = None) -> Compiler:
    """``command`` (as in $CXX, arguments and all), or the first compiler found that can use the OpenMP runtime.

    Raises KernelError, saying how to install one, if there is none.
    """
    if command is not None:
        words = tuple(shlex.split(command))
        if not words or shutil.which(words[0]) is None:
            raise KernelError(f"the C++ compiler {command!r} is not found; {install_hint()}")
        return _describe(words)
    found: list[Compiler] = []
    broken: list[KernelError] = []
    for path in filter(None, map(shutil.which, CANDIDATES)):
        try:
            found.append(_describe((path,)))
        except KernelError as error:
            broken.append(error)
    if not found and broken:
        raise broken[0]
    if not found:
        raise KernelError(f"no C++ compiler is found ({', '.join(CANDIDATES)}); {install_hint()}")
    # Clang's OpenMP code calls functions that GCC's runtime, which PyTorch brings on Linux, does not have.
    if openmp is not None and "gomp" in openmp.name:
        found.sort(key=lambda compiler: compiler.is_clang)
    return found[0]


def _describe(words: tuple[str, ...]) -> Compiler:
    said = run_compiler((*words, "--version"), "tell its version")
    return Compiler(words, said.strip() or "no version", "clang" in said.lower())


def run_compiler(command: tuple[str, ...], what: str) -> str:
    """Standard output of a compiler call. Raises KernelError with what the compiler said."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        raise KernelError(f"{command[0]} cannot be started: {error}; {install_hint()}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelError(f"{command[0]} did not {what} within {TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise KernelError(
            f"{command[0]} could not {what}: {_first_error(done.stderr) or f'exit status {done.returncode}'}",
            output=done.stderr,
        )
    return done.stdout


def _first_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = (line for line in lines if any(word in line for word in FAILURES))
    return next(telling, lines[0] if lines else "")[:300]


def install_hint() -> str:
    """How to get a compiler on this kind of system, in a few words."""
    if sys.platform == "darwin":
        return "install one with: xcode-select --install"
    for tool, advice in (
        ("apt-get", "apt-get install g++"),
        ("dnf", "dnf install gcc-c++"),
        ("apk", "apk add g++"),
        ("pacman", "pacman -S gcc"),
        ("zypper", "zypper install gcc-c++"),
    ):
        if shutil.which(tool) is not None:
            return f"install one with: {advice}"
    return "install g++ (on Debian and Ubuntu: apt-get install g++)"
