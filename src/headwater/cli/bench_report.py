"""``headwater bench report``"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from headwater.cli.extra import missing_extra
from headwater.errors import ConfigError

EXAMPLES = """examples:
  headwater bench report bench-prefix-20260101-120000             draw its report again
  headwater bench report ours theirs --out compared               two engines, or versions, beside each other
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `headwater bench report`."""
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders of results")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where the report goes; default: the folder, if there is one only"
    )


def report(arguments: argparse.Namespace) -> int:
    """Read the folders, write the report, print the verdict."""
    folders: list[Path] = arguments.folders
    if len({folder.resolve() for folder in folders}) != len(folders):
        raise ConfigError("a folder is given twice: it would be compared with itself")
    if arguments.out is None and len(folders) > 1:
        raise ConfigError("a report about several folders needs a place of its own: give --out DIR")
    draw(folders, arguments.out or folders[0])
    return 0


def draw(folders: Sequence[Path], out: Path) -> None:
    """Write the report of ``folders`` into ``out`` and print its verdict. Raises ConfigError without the extra."""
    try:
        from headwater.bench.report import make_report, write_report
    except ModuleNotFoundError as error:
        raise missing_extra(error) from None
    made = make_report(folders)
    written = write_report(made, out)
    console = Console(highlight=False, soft_wrap=True)
    for flag in made.flags:
        console.print(_on_one_line(f"note: {flag.name}: {flag.text}"), markup=False)
    for text in (made.verdict.headline, *made.verdict.sentences):
        console.print(_on_one_line(text), markup=False)
    console.print("report: " + ", ".join(str(path) for path in written if path.suffix != ".png"), markup=False)


def _on_one_line(text: str) -> str:
    """Names and errors are the server's: nothing in them that a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text)
