"""The command ``headwater``: serve, demo, pull, models, kernels, bench. Only this part reads the environment."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from headwater.cli.arguments import parse
from headwater.errors import HeadwaterError

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended, by the shells' convention."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. A known error is one line on stderr and status 1."""
    arguments = parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        status: int = arguments.run(arguments)
    except HeadwaterError as error:
        print(f"headwater: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return status
