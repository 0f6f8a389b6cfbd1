"""What may stand on the command line about the live page: options of `serve`, and the command `top`."""

from __future__ import annotations

import argparse
import os

from headwater.cli.numbers import number
from headwater.config import ServerConfig, UiConfig

KEY_VARIABLE = "HEADWATER_ADMIN_KEY"

TOP_EXAMPLES = """examples:
  headwater top                                  the server on this machine, until q or Ctrl-C
  headwater top --url http://10.0.0.7:8000       another one
  headwater top --once                           one picture, as text; the same when it is piped
"""


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ui", action=argparse.BooleanOptionalAction, default=True, help="the live page at /ui (on)")
    parser.add_argument(
        "--ui-redact",
        action=argparse.BooleanOptionalAction,
        help="send the page no text of prompts (on when there are API keys)",
    )


def ui_config(arguments: argparse.Namespace) -> UiConfig:
    return UiConfig(arguments.ui, arguments.ui_redact)


def add_top_options(parser: argparse.ArgumentParser) -> None:
    here = ServerConfig()
    parser.add_argument(
        "--url", default=f"http://{here.host}:{here.port}", help="where the server answers (%(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="print one picture and leave")
    parser.add_argument(
        "--interval",
        type=number(0.5, 3600),
        default=1.0,
        metavar="S",
        help="seconds between two pictures (%(default)s)",
    )
    parser.add_argument(
        "--admin-key",
        default=os.environ.get(KEY_VARIABLE) or None,
        metavar="KEY",
        help=f"for a server with API keys; the variable {KEY_VARIABLE} sets it too, and other users cannot see that",
    )
