"""Frozen configuration, composed of small parts and resolved once, by the command line or by ``LLM``.

Option names follow vLLM's where the meaning is the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from headwater.errors import ConfigError

HASH_ALGORITHMS = ("sha256", "xxh3_128", "blake3")
DTYPES = ("auto", "bfloat16", "float32")
KERNELS = ("auto", "torch", "portable", "avx2", "avx512", "avx512bf16", "amx")
NUMERICS = ("exact", "fast")
QUANTIZATIONS = ("none", "w8a8", "w8a16")
KV_DTYPES = ("auto", "int8")
EVENT_LAYOUTS = ("map", "legacy")


def default_cache_dir() -> Path:
    """The platform's folder for things that can be fetched or made again."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "headwater"
    except RuntimeError as error:  # no HOME, and a user whom the system does not know
        raise ConfigError(
            "this user has no home folder to keep models and kernels in: give a folder with --model-cache-dir, or set "
            "HOME or XDG_CACHE_HOME"
        ) from error


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """``block_size`` in tokens (the smallest group block); ``n_blocks`` None lets memory decide."""

    block_size: int = 16
    enable_prefix_caching: bool = True
    partial_reuse: bool = True
    """Where whole blocks end, copy the slots of a block that begins with the same tokens."""
    hash_algo: str = "sha256"
    n_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    verify_hits: float = 0.0
    """The share of hit blocks that are computed again in idle time and compared bit for bit; 0: none."""
    kv_dtype: str = "auto"
    """Of KV_DTYPES: K and V in the compute dtype, or in int8 with a scale per token and head."""
    max_ghosts: int = 65_536
    """How many content nodes without a resident copy are remembered, to explain evictions."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the whole."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    """Token budget of a step; longer prompts are computed in chunks."""
    max_model_len: int | None = None
    """None: the model's own limit, or what the pool can hold if that is less."""
    max_waiting: int = 4096
    """Requests that may queue; one more is refused with 503."""
    in_flight_wait_s: float = 30.0
    """How long a request may wait for a beginning that another one is computing now; 0: not at all."""
    explain: bool = True
    """Keep an account of what each request reused and why no more."""
    max_num_mixed_tokens: int = 512
    """Token budget of a step while requests generate: the longest gap between their tokens is such a step."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """``model`` is a catalogue name, a .gguf file or a Hugging Face folder."""

    model: str = "smollm2-135m"
    dtype: str = "auto"
    quantization: str = "none"
    """Of QUANTIZATIONS: weights in the compute dtype, or in int8, with activations in int8 or in the compute dtype."""
    served_model_name: str | None = None
    seed: int = 0
    threads: int | None = None
    kernels: str = "auto"
    """One of KERNELS: native ones for one kind of CPU, the best that this one runs, or PyTorch's."""
    compiler: str | None = None
    """The command that compiles the native kernels, as in $CXX; None finds one."""
    numerics: str = "exact"
    """Of NUMERICS: the same bits whatever shares a batch, or whichever product is quicker."""
    cache_dir: str | None = None
    """Where pulled models, weight digests and compiled kernels are kept; None: the platform's cache folder."""

    @property
    def cache_path(self) -> Path | None:
        """``cache_dir`` as a path, a leading ~ being the home folder."""
        return None if self.cache_dir is None else Path(self.cache_dir).expanduser()

    @property
    def kernels_path(self) -> Path:
        """The folder of compiled kernels."""
        return (self.cache_path or default_cache_dir()) / "kernels"


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """The cache's events as a stream. Endpoints are ZeroMQ addresses, bound by the engine."""

    enabled: bool = False
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str = "tcp://127.0.0.1:5558"
    topic: str = ""
    """The first frame of every message."""
    layout: str = "map"
    """Of EVENT_LAYOUTS: events as maps, as vLLM sends them since June 2026, or as the arrays of before."""
    buffer_batches: int = 10_000
    """Most batches that wait to be sent, that are kept for replays, and that wait for one reader."""


@dataclass(frozen=True, slots=True)
class UiConfig:
    """The live page."""

    enabled: bool = True
    redact: bool | None = None
    """Whether text and token ids of prompts are kept from it and its JSON; None: if there are API keys."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where the server listens, and the keys that it knows. Keys and secret appear in no ``repr``."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Each one is a tenant. None, and no admin key: whoever reaches the port is the operator."""
    admin_key: str | None = field(default=None, repr=False)
    derive_salts: bool | None = None
    """Whether each key has cached prefixes of its own; None: with two or more keys, the admin key being one."""
    salt_secret: bytes | None = field(default=None, repr=False)
    """What derived salts are made of, besides the key: equal ones bring equal block keys after a restart."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that the engine process needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
