"""The options of ``headwater explain``."""

from __future__ import annotations

import argparse
from pathlib import Path

from headwater.cli.numbers import whole
from headwater.cli.status import OVER_THE_LIMIT
from headwater.config import ModelConfig

EXAMPLES = """examples:
  headwater explain requests.jsonl                             the default model's tokenizer and chat template
  headwater explain monday.jsonl tuesday.jsonl --model ./my-model --top 3
  headwater explain requests.jsonl --fail-over 1000            in CI: status 3 if more than 1000 tokens are lost
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``headwater explain``, but for the cache folder."""
    about = "requests, one JSON object a line: the body of a chat request, or an object that has it as `body`"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=about)
    source = parser.add_mutually_exclusive_group()
    about = f"catalogue name, .gguf file, Hugging Face folder or org/name ({ModelConfig().model})"
    source.add_argument("--model", metavar="MODEL", help=about)
    source.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="a folder with tokenizer files, or a .gguf file, instead"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--top", type=whole(1, 1_000_000), metavar="N", help="only the N most costly findings")
    parser.add_argument(
        "--fail-over",
        type=whole(0, 2**63 - 1),
        metavar="TOKENS",
        help=f"exit with status {OVER_THE_LIMIT} if more tokens are lost in all",
    )


def run(arguments: argparse.Namespace) -> int:
    from headwater.cli import explain  # here: the other commands need no tokenizer

    return explain.run(arguments)
