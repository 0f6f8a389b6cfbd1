"""``headwater bench prefix``"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwater.bench.plan import CACHING, INTERFERENCE, OUTPUTS, PREFIXES, QUICK_OUTPUTS, QUICK_REPEATS, REPEATS
from headwater.cli.bench_report import draw
from headwater.cli.extra import missing_extra
from headwater.cli.numbers import choices, each, number, whole
from headwater.config import ModelConfig
from headwater.errors import ConfigError

EXAMPLES = """examples:
  headwater bench prefix --quick                  the default model on a server of its own, in three minutes
  headwater bench prefix                          the full sweep; it says how long it will take before it begins
  headwater bench prefix --resume bench-prefix-20260101-120000-42
  headwater bench prefix --url http://127.0.0.1:8000 --quick    one that runs: what is off cannot be measured
  headwater bench prefix --label vllm --start-command \\
    'vllm serve MODEL --port {port} {caching_flags} {pool_flags}' \\
    --pool-flags '--num-gpu-blocks-override {num_blocks} --max-model-len {pool_tokens}'
"""

MOST_TOKENS = 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `headwater bench prefix`."""
    own = parser.add_argument_group("Headwater's own server")
    own.add_argument("model_given", nargs="?", metavar="MODEL", help=f"what it serves ({ModelConfig().model})")
    own.add_argument("--serve-args", metavar="TEXT", help="more options of headwater serve, in one text")
    whom = parser.add_argument_group("another server")
    whom.add_argument("--url", help="one that runs already, such as http://127.0.0.1:8000")
    whom.add_argument(
        "--start-command",
        metavar="COMMAND",
        help="starts one; {port}, {caching_flags}, {pool_flags}, {num_blocks}, {pool_tokens}, {caching} (on, off) and "
        "{interference} (none, evicting) in it are filled in",
    )
    whom.add_argument("--caching-on-flags", metavar="TEXT", help="{caching_flags} with it on (--enable-prefix-caching)")
    whom.add_argument("--caching-off-flags", metavar="TEXT", help="and off (--no-enable-prefix-caching)")
    whom.add_argument(
        "--pool-flags", metavar="TEXT", help="{pool_flags} of a small pool (--num-blocks {num_blocks}); else none"
    )
    whom.add_argument("--served-model", metavar="NAME", help="the model's name in the API; default: the first listed")
    whom.add_argument("--api-path", metavar="PATH", help="where a started server has its API (/v1)")
    whom.add_argument("--api-key", metavar="KEY", help="sent as a bearer token; never written down")
    whom.add_argument("--start-limit", type=number(1, 86_400), metavar="S", help="seconds that a start may take (600)")
    _add_sweep(parser.add_argument_group("the sweep"))
    out = parser.add_argument_group("results")
    out.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; default: bench-prefix-<time>")
    out.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on with a sweep that was stopped; with nothing else"
    )
    out.add_argument("--label", metavar="NAME", help="what the report calls this server")


def _add_sweep(sweep: Any) -> None:
    token_counts = each(whole(1, MOST_TOKENS))
    sweep.add_argument("--quick", action="store_true", help="outputs 1 and 32, as many repeats as three minutes allow")
    sweep.add_argument("--prefixes", type=token_counts, metavar="N,N", help=f"shared tokens ({_shown(PREFIXES)})")
    sweep.add_argument("--outputs", type=token_counts, metavar="N,N", help=f"generated tokens ({_shown(OUTPUTS)})")
    sweep.add_argument("--caching", type=choices(CACHING), metavar="on,off", help="which to measure (both)")
    sweep.add_argument(
        "--interference", type=choices(INTERFERENCE), metavar="none,evicting", help="which to measure (both)"
    )
    sweep.add_argument(
        "--repeats",
        type=whole(1, 100_000),
        metavar="N",
        help=f"of each cell ({REPEATS}; --quick: at most {QUICK_REPEATS})",
    )
    sweep.add_argument(
        "--seed", type=whole(0, 2**31 - 1), metavar="N", help="of the order (0); prefixes are always fresh"
    )
    sweep.add_argument(
        "--evicting-blocks", type=whole(1, 2**31 - 1), metavar="N", help="{num_blocks}; default: 1.5 longest requests"
    )
    sweep.add_argument("--block-size", type=whole(1, 65_536), metavar="N", help="tokens in a block of the server (16)")
    sweep.add_argument(
        "--stall", type=number(0.1, 86_400), metavar="S", help="seconds of silence after which a request failed (300)"
    )


def _shown(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


GIVEN: dict[str, str] = {
    "url": "url",
    "start_command": "start_command",
    "model": "model_given",
    "serve_args": "serve_args",
    "caching_on_flags": "caching_on_flags",
    "caching_off_flags": "caching_off_flags",
    "pool_flags": "pool_flags",
    "served_model": "served_model",
    "api_path": "api_path",
    "prefixes": "prefixes",
    "outputs": "outputs",
    "caching": "caching",
    "interference": "interference",
    "repeats": "repeats",
    "seed": "seed",
    "evicting_blocks": "evicting_blocks",
    "block_size": "block_size",
    "label": "label",
    "stall_s": "stall",
    "start_limit_s": "start_limit",
}
"""Field of the settings -> argument. What was not given has its default there."""


def prefix(arguments: argparse.Namespace) -> int:
    """Measure, then write the report."""
    run_prefix, resume_prefix, settings_of = _load()
    headers = {"authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    given = {ours: value for ours, theirs in GIVEN.items() if (value := getattr(arguments, theirs)) is not None}
    if arguments.resume is not None:
        if given or arguments.out is not None or arguments.quick:
            raise ConfigError("--resume goes on with what was asked for then: give nothing beside it (but --api-key)")
        folder = arguments.resume
        resume_prefix(folder, headers)
    else:
        if arguments.quick:
            given = {"outputs": QUICK_OUTPUTS, "repeats": QUICK_REPEATS, **given, "quick": True}
        folder = arguments.out or Path(f"bench-prefix-{datetime.datetime.now():%Y%m%d-%H%M%S}")
        run_prefix(settings_of(**given), folder, headers, command_of(sys.argv))
    draw([folder], folder)
    return 0


def _load() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """What needs the extra, the report's part too; raises ConfigError where that is not installed."""
    try:
        import headwater.bench.report  # noqa: F401 (used after the sweep; what is missing is told before)
        from headwater.bench.prefix import resume_prefix, run_prefix
        from headwater.bench.settings import Settings
    except ModuleNotFoundError as error:
        raise missing_extra(error) from None
    return run_prefix, resume_prefix, Settings


def command_of(argv: list[str]) -> list[str]:
    """What was typed, without keys."""
    words, secret = [], False
    for word in ["headwater", *argv[1:]]:
        words.append("KEY" if secret else "--api-key=KEY" if word.startswith("--api-key=") else word)
        secret = word == "--api-key"
    return [shlex.quote(word) for word in words]
