"""``headwater pull``, ``models`` and ``version``"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headwater.cli.loading import LoadingBar
from headwater.config import ModelConfig, default_cache_dir
from headwater.model.catalog import CATALOG
from headwater.model.pull import pull as pull_model


def pull(arguments: argparse.Namespace) -> int:
    """Fetch one model, and show where it is and its licence."""
    with LoadingBar() as bar:
        path = pull_model(arguments.name, _cache_dir(arguments), bar.report)
    entry = CATALOG[arguments.name]
    print(f"{entry.name}: {entry.description}\n{path}\nLicence: {entry.licence}. {entry.licence_notice}")
    return 0


def list_models(arguments: argparse.Namespace) -> int:
    """List the catalogue, and which of it is here."""
    folder = (_cache_dir(arguments) or default_cache_dir()) / "models"
    table = Table("name", "what", "size", "licence", "here")
    for entry in CATALOG.values():
        here = "yes" if (folder / entry.file_name).is_file() else "no"
        table.add_row(entry.name, entry.description, f"{entry.n_bytes / 2**20:.0f} MiB", entry.licence, here)
    out = Console(highlight=False, soft_wrap=True)
    out.print(table)
    out.print(f"kept in {folder}", markup=False)
    return 0


def show_version(arguments: argparse.Namespace) -> int:
    print(f"headwater {version('headwater')}")
    return 0


def _cache_dir(arguments: argparse.Namespace) -> Path | None:
    return ModelConfig(cache_dir=arguments.model_cache_dir).cache_path
