"""Frozen configuration, composed of small parts and resolved once, by the command line or by ``LLM``.

Option names follow vLLM's where the meaning is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

HASH_ALGORITHMS = ("sha256", "xxh3_128", "blake3")
DTYPES = ("auto", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """``block_size`` in tokens (the smallest group block); ``n_blocks`` None lets memory decide."""

    block_size: int = 16
    enable_prefix_caching: bool = True
    hash_algo: str = "sha256"
    n_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    max_ghosts: int = 65_536
    """How many content nodes without a resident copy are remembered, to explain evictions."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the whole."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    """Token budget of a step; longer prompts are computed in chunks."""
    max_model_len: int | None = None
    """None: the model's own limit, or what the pool can hold if that is less."""
    max_waiting: int = 4096
    """Requests that may queue; one more is refused with 503."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """``model`` is a catalogue name, a .gguf file or a Hugging Face folder."""

    model: str = "smollm2-135m"
    dtype: str = "auto"
    served_model_name: str | None = None
    seed: int = 0
    threads: int | None = None
    cache_dir: str | None = None
    """Where pulled models and weight digests are kept; None: the platform's cache folder."""

    @property
    def cache_path(self) -> Path | None:
        """``cache_dir`` as a path, a leading ~ being the home folder."""
        return None if self.cache_dir is None else Path(self.cache_dir).expanduser()


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that the engine process needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
