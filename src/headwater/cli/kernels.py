"""``headwater kernels``: compile the native kernels, show which run here."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headwater.cli.loading import LoadingBar
from headwater.config import ModelConfig
from headwater.errors import KernelError
from headwater.kernels.choose import PRICE
from headwater.kernels.cpu.build import build, compiled_before, library_path
from headwater.kernels.cpu.compiler import Compiler, find_compiler
from headwater.kernels.cpu.kept import is_sound
from headwater.kernels.cpu.openmp import torch_openmp
from headwater.kernels.cpu.variants import VARIANTS, best_variant, cpu_features, is_x86_64, obstacle


def build_kernels(arguments: argparse.Namespace) -> int:
    """Compile the variants named, those for other CPUs too; the best one if none is."""
    out = Console(highlight=False, soft_wrap=True, markup=False)
    for variant in _named(arguments.variants):
        began = time.perf_counter()
        try:
            with LoadingBar() as bar:
                path = build(variant, _folder(arguments), bar.report, compiler=arguments.compiler)
        except KernelError as error:
            if error.output:
                out.print(error.output)  # all of it: the error itself has but the first line
            raise
        out.print(f"{variant:<12} {path}  ({path.stat().st_size / 1024:.0f} KiB, {time.perf_counter() - began:.1f} s)")
    return 0


def _named(variants: list[str]) -> list[str]:
    if not variants:
        return [best_variant()]
    if variants == ["all"]:
        return [name for name, variant in VARIANTS.items() if is_x86_64() or not variant.needs]
    return variants


def info(arguments: argparse.Namespace) -> int:
    """Show what would be chosen and why, and what is compiled."""
    out = Console(highlight=False, soft_wrap=True, markup=False)
    folder, openmp, best = _folder(arguments), torch_openmp(), best_variant()
    compiler: Compiler | None = None
    try:
        compiler = find_compiler(arguments.compiler, openmp)
        told = compiler.name
    except KernelError as error:
        told = str(error)
    table = Table("kernels", "on this machine", "compiled")
    for name, variant in VARIANTS.items():
        why_not = obstacle(name)
        runs = ("chosen: the first that runs here" if name == best else "runs here") if why_not is None else why_not
        path = None if compiler is None else library_path(variant, folder, compiler, openmp)
        if path is None or not is_sound(path):
            path = compiled_before(variant, folder, openmp)
        table.add_row(name, runs, "no" if path is None else f"{path.stat().st_size / 1024:.0f} KiB")
    out.print(table)
    known = sorted({feature for variant in VARIANTS.values() for feature in variant.needs} & cpu_features())
    kept = [path.stat().st_size for path in folder.glob("*.so")]
    for name, value in (
        ("CPU", ", ".join(known) or "no features that the kernels ask for"),
        ("compiler", told),
        ("OpenMP", "PyTorch has none: the kernels use one thread" if openmp is None else str(openmp)),
        ("folder", f"{folder} ({len(kept)} compiled, {sum(kept) / 1024:.0f} KiB)"),
    ):
        out.print(f"{name:<9} {value}")
    if compiler is None:
        out.print(f"Where nothing is compiled and there is no compiler, {PRICE}.")
    return 0


def _folder(arguments: argparse.Namespace) -> Path:
    return ModelConfig(cache_dir=arguments.model_cache_dir).kernels_path
