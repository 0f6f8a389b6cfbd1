"""``headwater serve``"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from importlib.metadata import version

from rich.console import Console

from headwater.cli import keys
from headwater.cli.loading import LoadingBar
from headwater.cli.ui_arguments import ui_config
from headwater.config import EngineConfig, ModelConfig
from headwater.engine.messages import EngineInfo, Loading
from headwater.engine.options import OPTIONS, engine_config
from headwater.errors import ConfigError
from headwater.model.resolve import resolve
from headwater.serve.access import Access
from headwater.serve.front import Front
from headwater.serve.run import Announce, bind
from headwater.serve.run import serve as serve_until_stopped
from headwater.text.tokenizer import load_tokenizer


def config_of(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's configuration. Raises ConfigError."""
    if arguments.model is not None and arguments.model_given is not None:
        raise ConfigError(f"two models: {arguments.model_given} and --model {arguments.model}")
    given = [name for name in (arguments.model, arguments.model_given) if name is not None]
    options = {option.name: getattr(arguments, option.name) for option in OPTIONS}
    return engine_config(given[0] if given else ModelConfig().model, options)


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    config = config_of(arguments)
    if arguments.explain_usage and not config.scheduler.explain:
        raise ConfigError("--explain-usage tells the accounts that --no-explain leaves out: give one of the two")
    server = keys.take_server_config(arguments, os.environ, config.model.cache_path)
    access = Access(server)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one thread tokenises; the cores are the engine's
    served_name = config.model.served_model_name or config.model.model
    listening = bind(server.host, server.port)
    for warning in keys.warnings(arguments, access, listening.getsockname()[0]):
        print(f"warning: {warning}", file=sys.stderr)
    with LoadingBar() as bar:

        def load(loading: Loading) -> None:
            bar.report(loading.what, loading.fraction)

        def ready(front: Front, url: str) -> None:
            bar.done()
            announce(front, url)

        path = resolve(config.model.model, config.model.cache_path, bar.report)
        serve_until_stopped(
            config,
            listening,
            lambda: load_tokenizer(path),
            served_name=served_name,
            access=access,
            announce=Announce(load, ready),
            ui=ui_config(arguments),
            explain_usage=arguments.explain_usage,
        )
    return 0


def announce(front: Front, url: str) -> None:
    """Tell what was decided, and how to call the server."""
    info = front.info
    caching = f"{info.hash_algo}, from {info.min_reusable_tokens} tokens on" if info.enable_prefix_caching else "off"
    groups, threads = _count(info.n_groups, "group"), _count(info.threads, "thread")
    quantized = "" if info.quantization == "none" else f", {info.quantization}"
    kv_mib, kv_kind = info.kv_cache_bytes / 2**20, "" if info.kv_dtype == "auto" else f" in {info.kv_dtype}"
    rows = [
        ("model", f"{front.served_name} ({info.family}, {info.dtype}{quantized})"),
        ("context", f"{info.max_model_len} tokens, prompt and output together"),
        (
            "KV cache",
            f"{info.n_blocks} blocks of {info.block_size} tokens in {groups}, {kv_mib:.0f} MiB{kv_kind}",
        ),
        ("reuse", caching),
        ("steps", f"up to {_count(info.max_num_seqs, 'request')}, {_step_tokens(info)}, {threads}"),
        ("keys", _keys(front.access)),
        *(("note", note) for note in info.notes),
    ]
    out = Console(highlight=False, soft_wrap=True, emoji=False, markup=False)
    out.print(f"Headwater {version('headwater')}")
    for name, value in rows:
        out.print(f"  {name:<9} {value}")
    out.print(f"\nServing on {url} (Ctrl-C stops).")
    if front.ui.enabled:
        out.print(f"Watch the cache on {url}/ui.")
    out.print(f"Try:\n\n{_example(front, url)}\n")
    out.file.flush()


def _example(front: Front, url: str) -> str:
    """A command that asks the server something it can answer."""
    path = "completions"
    body: dict[str, object] = {"model": front.served_name, "prompt": "A headwater is", "max_tokens": 32}
    if front.can_chat:
        path = "chat/completions"
        body = {"model": front.served_name, "messages": [{"role": "user", "content": "What is a headwater?"}]}
    key = ' -H "Authorization: Bearer $KEY"' if front.access.guarded else ""
    sent = f"-H 'Content-Type: application/json'{key}"
    return f"  curl {url}/v1/{path} {sent} \\\n    -d {shlex.quote(json.dumps(body))}"


def _keys(access: Access) -> str:
    """Who may ask."""
    if not access.guarded:
        return "none: whoever reaches the port is the operator (--api-key-file FILE, --admin-key KEY)"
    operator = "an admin key" if access.has_admin_key else "no admin key: metrics, reset and the page are closed"
    apart = "cached prefixes of each key apart" if access.derives_salts else "cached prefixes shared by all keys"
    return f"{_count(access.n_api_keys, 'API key')}, {operator}; {apart}"


def _step_tokens(info: EngineInfo) -> str:
    most, mixed = info.max_num_batched_tokens, info.max_num_mixed_tokens
    shorter = "" if mixed is None or mixed == most else f" ({mixed} while requests generate)"
    return _count(most, "token") + shorter


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
