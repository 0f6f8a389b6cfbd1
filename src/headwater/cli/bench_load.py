"""``headwater bench load``"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

from headwater.bench.load_settings import ARRIVALS, DEFAULT_URL, WORKLOADS, LoadSettings
from headwater.cli.bench_prefix import command_of
from headwater.cli.bench_report import draw
from headwater.cli.extra import missing_extra
from headwater.cli.numbers import number, whole

EXAMPLES = """examples:
  headwater bench load chat                              conversations whose turns grow, 4 at a time
  headwater bench load mix --rate 2 --conversations 40   users over a few system prompts, arriving at random
  headwater bench load herd --clients 16                 16 clients at once with one fresh prefix
  headwater bench load jsonl requests.jsonl --users 8    chat requests of your own
  headwater bench load trace mooncake.jsonl --length-scale 0.05 --time-scale 2 --requests 200 \\
    --ttft-limit 1 --itl-limit 0.1
"""

MOST = 2**31 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `headwater bench load`."""
    parser.add_argument("workload", choices=WORKLOADS, help="what to send")
    parser.add_argument("file", nargs="?", metavar="FILE", help="for jsonl: the requests; for trace: a Mooncake trace")
    whom = parser.add_argument_group("whom")
    whom.add_argument("--url", help=f"a server that runs ({DEFAULT_URL})")
    whom.add_argument("--served-model", metavar="NAME", help="the model's name in the API; default: the first listed")
    whom.add_argument("--api-key", metavar="KEY", help="sent as a bearer token; never written down")
    when = parser.add_argument_group("when")
    when.add_argument(
        "--arrival", choices=ARRIVALS, help="default: poisson with --rate; the trace's own times; else closed"
    )
    when.add_argument("--rate", type=number(1e-6, 1e6), metavar="R", help="requests per second, poisson or fixed")
    when.add_argument("--users", type=whole(1, MOST), metavar="K", help="closed: so many requests at a time (4)")
    when.add_argument("--duration", type=number(0.1, 1e9), metavar="S", help="seconds after which no more are sent")
    _add_sizes(parser.add_argument_group("how much"))
    out = parser.add_argument_group("results")
    out.add_argument("--ttft-limit", type=number(0, 1e6), metavar="S", help="goodput: most seconds to the first token")
    out.add_argument("--itl-limit", type=number(0, 1e6), metavar="S", help="goodput: most seconds between tokens")
    out.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; default: bench-load-<time>")
    out.add_argument("--label", metavar="NAME", help="what the report calls this server; default: its address")
    out.add_argument(
        "--stall", type=number(0.1, 86_400), metavar="S", help="seconds of silence that are a failure (300)"
    )
    out.add_argument("--seed", type=whole(0, MOST), metavar="N", help="of prompts and arrivals; default: fresh ones")


def _add_sizes(sizes: Any) -> None:
    plain = LoadSettings(workload="mix")

    def add(flag: str, about: str, shown: object = None) -> None:
        default = "" if shown is None else f" ({shown})"
        sizes.add_argument(flag, type=whole(1, MOST), metavar="N", help=about + default)

    add("--requests", "jsonl, trace: only the first so many")
    add("--conversations", "mix, chat: how many users", plain.conversations)
    add("--systems", "mix: how many system prompts they share", plain.systems)
    add("--turns", "mix, chat: turns of each", plain.turns)
    add("--system-tokens", "mix, chat: tokens of a system prompt", plain.system_tokens)
    add("--turn-tokens", "mix, chat, herd: tokens of a question", plain.turn_tokens)
    add("--output", "tokens of an answer; in jsonl where a request does not say", plain.output)
    add("--clients", "herd: how many at once", plain.clients)
    add("--herds", "herd: how many, one after the other", plain.herds)
    add("--prefix-tokens", "herd: tokens of the prefix", plain.prefix_tokens)
    scale = number(1e-6, 1e6)
    sizes.add_argument("--length-scale", type=scale, metavar="X", help="trace: inputs and outputs so much longer (1)")
    sizes.add_argument("--time-scale", type=scale, metavar="X", help="trace: times so much longer; 0.5: twice as fast")
    sizes.add_argument("--skip-too-long", action="store_const", const=True, help="trace: leave out what does not fit")


RENAMED = {"duration": "duration_s", "ttft_limit": "ttft_limit_s", "itl_limit": "itl_limit_s", "stall": "stall_s"}
"""Argument -> field of the settings, where the names differ."""


def load(arguments: argparse.Namespace) -> int:
    """Measure, then write the report."""
    try:
        import headwater.bench.report  # noqa: F401 (used after the load; what is missing is told before)
        from headwater.bench.load import default_folder, run_load
    except ModuleNotFoundError as error:
        raise missing_extra(error) from None
    headers = {"authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    named = {RENAMED.get(name, name): value for name, value in vars(arguments).items() if value is not None}
    given = {name: value for name, value in named.items() if name in LoadSettings.__struct_fields__}
    folder = arguments.out or default_folder(datetime.datetime.now())
    run_load(LoadSettings(**given), folder, headers, command_of(sys.argv), frozenset(given))
    draw([folder], folder)
    return 0
