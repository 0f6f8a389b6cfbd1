"""What may stand on the command line."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib.metadata import version
from typing import Any, NoReturn

from headwater.cli import (
    bench,
    bench_arguments,
    demo,
    events,
    explain_arguments,
    key_arguments,
    models,
    top,
    ui_arguments,
)
from headwater.cli.numbers import number as _number
from headwater.cli.numbers import whole as _whole
from headwater.config import KERNELS, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from headwater.engine.options import OPTIONS, Option
from headwater.engine.threads import settle_threads

CACHE_VARIABLE = "HEADWATER_CACHE"
COMPILER_VARIABLE = "CXX"

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}

MAX_BYTES = 2**63 - 1

SERVE_EXAMPLES = """examples:
  headwater serve                                        the default model on http://127.0.0.1:8000
  headwater serve gemma3-270m --max-model-len 4096       another model of the catalogue
  headwater serve ./model.gguf --port 8080               a file; or a Hugging Face folder
  headwater serve --kv-cache-memory-bytes 512MiB --block-size 32
  HEADWATER_ADMIN_KEY=... headwater serve --host 0.0.0.0 --api-key-file keys.txt
"""

BENCH_EXAMPLES = """examples:
  headwater bench step                                   the default model, all cases
  headwater bench step --only decode --repeats 9
  headwater bench step gemma3-270m --threads 1 --json
"""

EVAL_EXAMPLES = """examples:
  headwater eval perplexity                                   the default model over the text of the package
  headwater eval perplexity --quantization w8a8               against the same model without
  headwater eval perplexity gemma3-270m --kv-dtype int8 --against bf16 --tokens 2000
"""

KERNELS_EXAMPLES = """examples:
  headwater kernels info                 which kernels run on this CPU, which would be chosen, and what is compiled
  headwater kernels build                compile the best ones now rather than at the first start
  headwater kernels build avx2 portable
  CXX=g++-13 headwater kernels build
"""

EXAMPLES = """examples:
  headwater serve        fetch the default model if need be, and serve it on http://127.0.0.1:8000
  headwater demo         watch prompts hit the prefix cache
  headwater pull gemma3-270m
"""


class Parser(argparse.ArgumentParser):
    """argparse with short errors, and a hint at the nearest option for one that it does not know."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nSee {self.prog} --help.\n")

    def refuse(self, argument: str) -> NoReturn:
        """Exit with an error for an argument that is not known here."""
        name = argument.partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.5)
        hint = f": did you mean {near[0]}?" if near and name.startswith("-") else ""
        self.error(f"unknown {'option' if name.startswith('-') else 'argument'} {name}{hint}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of one command; ``run`` is the function that carries it out. Exits on an error."""
    parser = make_parser()
    parsed, unknown = parser.parse_known_args(argv)
    if "run" not in parsed and not unknown:
        parser.print_help()
        parser.exit(2)
    if unknown:
        command: Parser = getattr(parsed, "parser", parser)
        command.refuse(unknown[0])
    return parsed


def make_parser() -> Parser:
    parser = Parser(
        prog="headwater",
        description="An LLM server that reuses the KV of equal prompt beginnings, with every hit proven.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"headwater {version('headwater')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_serve(_command(commands, "serve", "serve a model over the OpenAI API", _serve, SERVE_EXAMPLES))
    _add_demo(_command(commands, "demo", "start a server, send chats that share a beginning, show the hits", demo.run))
    pull = _command(commands, "pull", "fetch a model of the catalogue, verify and keep it", models.pull)
    pull.add_argument("name", help="a name that `headwater models` lists")
    _add_cache_dir(pull)
    _add_kernels(commands)
    _add_bench(commands)
    _add_eval(commands)
    about = "print a server's KV events: what its cache stores and removes"
    events.add_arguments(_command(commands, "events", about, events.run, events.EXAMPLES))
    about = "say what breaks the common beginning of the requests in a log, without a server"
    linting = _command(commands, "explain", about, explain_arguments.run, explain_arguments.EXAMPLES)
    explain_arguments.add_arguments(linting)
    _add_cache_dir(linting)
    about = "watch a server's cache: what it holds, what hits, and why not more"
    ui_arguments.add_top_options(_command(commands, "top", about, top.run, ui_arguments.TOP_EXAMPLES))
    _add_cache_dir(_command(commands, "models", "list the models of the catalogue", models.list_models))
    _command(commands, "version", "show the version", models.show_version)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    from headwater.cli import serve  # here: the other commands need no web server

    return serve.run(arguments)


def _command(
    commands: Any, name: str, about: str, run: Callable[[argparse.Namespace], int], epilog: str = ""
) -> Parser:
    parser: Parser = commands.add_parser(
        name,
        help=about,
        description=about[0].upper() + about[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def _add_serve(parser: Parser) -> None:
    _add_model(parser)
    parser.add_argument("--host", default=ServerConfig().host, help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port", type=_whole(0, 65535), default=ServerConfig().port, help="port; 0: any free one (%(default)s)"
    )
    key_arguments.add_arguments(parser)
    ui_arguments.add_serve_options(parser)
    about = "put the account of what was reused, and why no more, into the usage of every answer (when a request asks)"
    parser.add_argument("--explain-usage", action="store_true", help=about)
    _add_engine_options(parser)


def _add_demo(parser: Parser) -> None:
    _add_model(parser)
    parser.add_argument("--requests", type=_whole(2, 1000), default=6, help="chat requests to send (%(default)s)")
    _add_engine_options(parser)


def _add_bench(commands: Any) -> None:
    about = "measure this engine, or what prefix caching buys on any server"
    parser: Parser = commands.add_parser("bench", help=about, allow_abbrev=False)
    parser.set_defaults(parser=parser)
    kinds = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    about = (
        "show where the time of an engine step goes: schedule, prepare, model by operation, sample, detokenise, publish"
    )
    step = _command(kinds, "step", about, bench.step, BENCH_EXAMPLES)
    _add_model(step)
    step.add_argument("--repeats", type=_whole(1, 1000), default=5, help="runs of each case (%(default)s)")
    step.add_argument("--only", metavar="TEXT", help="the cases that have this in their name")
    step.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_engine_options(step)
    bench_arguments.add_commands(kinds, _command)


def _add_eval(commands: Any) -> None:
    parser: Parser = commands.add_parser("eval", help="measure how good a model's predictions are", allow_abbrev=False)
    parser.set_defaults(parser=parser)
    kinds = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    about = "predict a text token by token, and compare the predictions with those of the model without int8"
    command = _command(kinds, "perplexity", about, _eval_perplexity, EVAL_EXAMPLES)
    _add_model(command)
    command.add_argument("--tokens", type=_whole(1, 2**31 - 1), default=10_000, help="tokens to predict (%(default)s)")
    command.add_argument("--window", type=_whole(2, 2**20), default=1024, help="tokens of a window (%(default)s)")
    command.add_argument("--text", metavar="FILE", help="a UTF-8 text; default: half of Alice in Wonderland")
    command.add_argument(
        "--against",
        choices=("bfloat16", "bf16", "float32", "f32"),
        help="compare with the plain model in this dtype; default: its own, if something is in int8",
    )
    _add_engine_options(command)


def _eval_perplexity(arguments: argparse.Namespace) -> int:
    settle_threads(os.environ)
    from headwater.cli import eval as evaluate  # here: it needs torch

    return evaluate.perplexity(arguments)


def _add_kernels(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "kernels",
        help="compile the native kernels, show which run here",
        description="The native CPU kernels: compiled once for this machine, at the first start or by `build`.",
        epilog=KERNELS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    kinds = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    build = _command(kinds, "build", "compile the kernels for this CPU, or those named", _kernels_build)
    native = [name for name in KERNELS if name not in ("auto", "torch")]
    build.add_argument("variants", nargs="*", metavar="VARIANT", help=f"all, {', '.join(native)}; default: the best")
    info = _command(kinds, "info", "show which kernels this CPU runs, and what is compiled", _kernels_info)
    for command in (build, info):
        _add_compiler(command)
        _add_cache_dir(command)


def _kernels_build(arguments: argparse.Namespace) -> int:
    from headwater.cli import kernels  # here: it needs torch

    return kernels.build_kernels(arguments)


def _kernels_info(arguments: argparse.Namespace) -> int:
    from headwater.cli import kernels

    return kernels.info(arguments)


def _add_model(parser: Parser) -> None:
    about = f"catalogue name, .gguf file or Hugging Face folder ({ModelConfig().model})"
    parser.add_argument("model_given", nargs="?", metavar="MODEL", help=about)
    parser.add_argument("--model", metavar="MODEL", help="the same, as an option")


def _add_engine_options(parser: Parser) -> None:
    group = parser.add_argument_group("engine options")
    for option in OPTIONS:
        if option.name == "model_cache_dir":
            _add_cache_dir(group)
        elif option.name == "compiler":
            _add_compiler(group)
        elif option.kind is bool:
            _add_switch(group, option)
        else:
            _add_option(group, option)


def _add_switch(group: argparse._ArgumentGroup, option: Option) -> None:
    default = _default(option)
    group.add_argument(
        option.flag, action=argparse.BooleanOptionalAction, help=f"{option.about} ({'on' if default else 'off'})"
    )


def _add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    default = _default(option)
    shown = "" if default is None else f" ({default})"
    kind: Callable[[str], object] = str
    if option.kind is not str:
        number = _whole if option.kind is int else _number
        kind = amount if option.is_bytes else number(option.minimum, option.maximum)
    group.add_argument(
        option.flag,
        type=kind,
        choices=option.choices or None,
        metavar=None if option.choices else "NAME" if option.kind is str else "N",
        help=option.about + shown,
    )


def _add_cache_dir(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--model-cache-dir",
        default=os.environ.get(CACHE_VARIABLE) or None,
        metavar="DIR",
        help=f"where fetched models and compiled kernels are kept; the variable {CACHE_VARIABLE} sets it too",
    )


def _add_compiler(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--compiler",
        default=os.environ.get(COMPILER_VARIABLE) or None,
        metavar="COMMAND",
        help=f"C++ compiler for the native kernels (the first found); the variable {COMPILER_VARIABLE} sets it too",
    )


def _default(option: Option) -> object:
    parts = EngineConfig(ModelConfig(), CacheConfig(), SchedulerConfig())
    return getattr(getattr(parts, option.part), option.field)


def amount(text: str) -> int:
    """Bytes: a whole number, or one with a unit such as 500MB or 2GiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory: write 2GiB, 500MB or a number of bytes")
    n_bytes = int(Fraction(found[1]) * UNITS[found[2] or ""])
    if n_bytes < 1:
        raise argparse.ArgumentTypeError("at least one byte is needed")
    if n_bytes > MAX_BYTES:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_BYTES} bytes")
    return n_bytes
