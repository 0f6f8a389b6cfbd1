"""The engine's options by their flat names (vLLM's where the meaning is the same), for the command line and ``LLM``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headwater.config import (
    DTYPES,
    EVENT_LAYOUTS,
    HASH_ALGORITHMS,
    KERNELS,
    KV_DTYPES,
    NUMERICS,
    QUANTIZATIONS,
    CacheConfig,
    EngineConfig,
    EventsConfig,
    ModelConfig,
    SchedulerConfig,
)
from headwater.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Option:
    """One option: ``name`` as users write it, and the ``part`` and ``field`` of EngineConfig that it sets.

    ``kind`` is int, float, str or bool; ``minimum`` and ``maximum`` hold for numbers, ``choices`` for str. A float
    may be given as a whole number.
    """

    name: str
    part: str
    field: str
    kind: type
    about: str
    minimum: float = 1
    maximum: float = 2**31 - 1
    choices: tuple[str, ...] = ()
    is_bytes: bool = False
    """An amount of memory: the command line also takes 512MiB, 2GiB and the like."""

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return "--" + self.name.replace("_", "-")


OPTIONS: tuple[Option, ...] = (
    Option("dtype", "model", "dtype", str, "compute dtype; auto is bfloat16 where the CPU has it", choices=DTYPES),
    Option(
        "quantization",
        "model",
        "quantization",
        str,
        "weights in int8, made at load and kept: w8a8 computes in int8 too, w8a16 in the compute dtype",
        choices=QUANTIZATIONS,
    ),
    Option("served_model_name", "model", "served_model_name", str, "the model's name in the API; default: as given"),
    Option("max_model_len", "scheduler", "max_model_len", int, "most tokens of prompt and output together", 2),
    Option("max_num_seqs", "scheduler", "max_num_seqs", int, "most requests in one step"),
    Option("max_num_batched_tokens", "scheduler", "max_num_batched_tokens", int, "token budget of one step"),
    Option(
        "max_num_mixed_tokens",
        "scheduler",
        "max_num_mixed_tokens",
        int,
        "token budget of one step while requests generate: they wait for a step between two tokens",
    ),
    Option("max_waiting", "scheduler", "max_waiting", int, "most requests in the queue; more are refused with 503"),
    Option(
        "in_flight_wait",
        "scheduler",
        "in_flight_wait_s",
        float,
        "seconds that a request may wait for a beginning which another one is computing now; 0: it computes it too",
        minimum=0,
        maximum=86_400,
    ),
    Option("explain", "scheduler", "explain", bool, "keep an account of what each request reused, and why no more"),
    Option("block_size", "cache", "block_size", int, "tokens in a KV block"),
    Option("enable_prefix_caching", "cache", "enable_prefix_caching", bool, "reuse the KV of equal beginnings"),
    Option("partial_reuse", "cache", "partial_reuse", bool, "copy the equal beginning of a block that is not equal"),
    Option(
        "prefix_caching_hash_algo",
        "cache",
        "hash_algo",
        str,
        "what finds a block; hits are proven whichever it is",
        choices=HASH_ALGORITHMS,
    ),
    Option(
        "kv_cache_memory_bytes",
        "cache",
        "kv_cache_memory_bytes",
        int,
        "memory for KV blocks, such as 2GiB; default: a share of what is free",
        maximum=2**63 - 1,
        is_bytes=True,
    ),
    Option(
        "kv_dtype",
        "cache",
        "kv_dtype",
        str,
        "auto: KV in the compute dtype; int8: about half of the memory",
        choices=KV_DTYPES,
    ),
    Option("num_blocks", "cache", "n_blocks", int, "number of KV blocks, instead of an amount of memory"),
    Option(
        "verify_hits",
        "cache",
        "verify_hits",
        float,
        "share of hit blocks, such as 0.01, to compute again in idle time and compare bit for bit",
        minimum=0,
        maximum=1,
    ),
    Option("kv_events", "events", "enabled", bool, "tell readers outside, such as routers, what the cache holds"),
    Option("kv_events_endpoint", "events", "endpoint", str, "where the stream of events is to be had"),
    Option(
        "kv_events_replay_endpoint", "events", "replay_endpoint", str, "where lost events and snapshots are to be had"
    ),
    Option("kv_events_topic", "events", "topic", str, "topic of all messages of the stream; default: empty"),
    Option(
        "kv_events_layout",
        "events",
        "layout",
        str,
        "map: the layout of vLLM 0.32; legacy: the arrays of its older versions",
        choices=EVENT_LAYOUTS,
    ),
    Option(
        "kv_events_buffer",
        "events",
        "buffer_batches",
        int,
        "most batches of events to keep for replays, and to hold back for a reader or the sender that is slow",
        maximum=10_000_000,
    ),
    Option("threads", "model", "threads", int, "threads of the compute kernels; default: the machine's cores"),
    Option(
        "kernels",
        "model",
        "kernels",
        str,
        "auto: the best native kernels that this CPU runs; torch: PyTorch's",
        choices=KERNELS,
    ),
    Option(
        "numerics",
        "model",
        "numerics",
        str,
        "exact: equal bits with and without the cache; fast: whichever product is quicker",
        choices=NUMERICS,
    ),
    Option("compiler", "model", "compiler", str, "C++ compiler for the native kernels; default: the first found"),
    Option("seed", "model", "seed", int, "seed for requests that bring none", 0, 2**63 - 1),
    Option("model_cache_dir", "model", "cache_dir", str, "where fetched models are kept"),
)


def engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration for ``model`` with ``options``; None leaves a default. Raises ConfigError by name."""
    known = {option.name: option for option in OPTIONS}
    _check_text("model", model)
    parts: dict[str, dict[str, Any]] = {"model": {"model": model}, "cache": {}, "scheduler": {}, "events": {}}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(unknown_option(name, list(known)))
        if value is not None:
            _check(known[name], value)
            parts[known[name].part][known[name].field] = value
    return EngineConfig(
        model=replace(ModelConfig(), **parts["model"]),
        cache=replace(CacheConfig(), **parts["cache"]),
        scheduler=replace(SchedulerConfig(), **parts["scheduler"]),
        events=replace(EventsConfig(), **parts["events"]),
    )


def unknown_option(name: str, known: list[str]) -> str:
    """The message for an option nobody knows, with the nearest known one."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown option {name!r}" + (f": did you mean {near[0]!r}?" if near else "")


def _check(option: Option, value: object) -> None:
    if type(value) is not option.kind and not (option.kind is float and type(value) is int):
        raise ConfigError(f"{option.name} must be {_A[option.kind]}, got {value!r}")
    if isinstance(value, int | float) and option.kind in (int, float):
        if not value >= option.minimum:  # NaN is no number
            raise ConfigError(f"{option.name} must be at least {option.minimum}, got {value}")
        if value > option.maximum:
            raise ConfigError(f"{option.name} must be at most {option.maximum}, got {value!r:.40}")
    if option.kind is str:
        _check_text(option.name, value)
    if option.choices and value not in option.choices:
        raise ConfigError(f"{option.name} must be one of {', '.join(option.choices)}, got {value!r}")


def _check_text(name: str, value: object) -> None:
    """Refuse what a terminal passed on although it is no UTF-8: neither the engine's messages nor JSON can carry it."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a text, got {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} must be valid UTF-8, got {value!r:.80}") from None


_A: Mapping[type, str] = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}
