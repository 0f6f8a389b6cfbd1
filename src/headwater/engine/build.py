"""From a configuration to a running engine core: the one place where all parts meet."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from headwater.cache.events import EventLog
from headwater.cache.prefix import PrefixCache
from headwater.config import EngineConfig
from headwater.engine.ahead import MemoryAhead
from headwater.engine.core import EngineCore
from headwater.engine.event_sender import publish_events
from headwater.engine.messages import EngineInfo
from headwater.engine.sample_text import sample_sequences
from headwater.engine.verify import HitVerifier, n_scratch_blocks
from headwater.errors import ConfigError
from headwater.kernels import make_ops
from headwater.kernels.layout import KVLayout
from headwater.kernels.probe import probe_row_invariance
from headwater.model.decoder import Model
from headwater.model.load import load_model, resolve_dtype
from headwater.model.resolve import resolve
from headwater.run.memory import MemoryPlan, available_memory, fit_blocks, plan_groups
from headwater.run.runner import LogitsObserver, Runner
from headwater.run.store import KVStore
from headwater.sched.scheduler import Scheduler
from headwater.text.tokenizer import Tokenizer, load_tokenizer
from headwater.types import GroupSpec, Namespace, Progress


@dataclass(frozen=True)
class BuiltEngine:
    """An engine core, and the parts of it that others may want to look at."""

    core: EngineCore
    tokenizer: Tokenizer
    cache: PrefixCache
    scheduler: Scheduler
    runner: Runner
    model: Model


def build_core(config: EngineConfig, report: Progress) -> EngineCore:
    """The core alone, as the engine process wants it."""
    return build_engine(config, report).core


def build_engine(config: EngineConfig, report: Progress, *, observer: LogitsObserver | None = None) -> BuiltEngine:
    """Find and load the model, size the KV pool to this machine, and put the engine together.

    All in the calling thread; ``report`` is called with what is being done and how far it is, 0 to 1. Raises
    ModelError for a model that cannot be used, ConfigError for options that do not fit it or the machine. ``observer``
    sees the logits of every step.
    """
    if config.model.threads is not None:
        torch.set_num_threads(config.model.threads)
    cache_dir = config.model.cache_path
    check_verify_options(config)
    path = resolve(config.model.model, cache_dir, report)
    tokenizer = load_tokenizer(path)
    ops = make_ops(
        resolve_dtype(config.model.dtype),
        kernels=config.model.kernels,
        numerics=config.model.numerics,
        folder=config.model.kernels_path,
        compiler=config.model.compiler,
        progress=report,
    )
    model = load_model(
        path,
        ops,
        report,
        cache_dir=cache_dir,
        max_positions=config.scheduler.max_model_len,
        quantization=config.model.quantization,
        sample=lambda vocab_size: sample_sequences(tokenizer, vocab_size),
    )
    row_invariant, probed = _probe(config, model, report)
    check_verifiable(config, row_invariant=row_invariant)

    groups = plan_groups(model.spec, config.cache.block_size)
    kv_dtype = torch.int8 if config.cache.kv_dtype == "int8" else None
    layout = ops.kv_layout(model.spec.n_kv_heads, model.spec.head_dim, config.cache.block_size, kv_dtype)
    memory = fit_blocks(model.spec, groups, layout, config.cache, config.scheduler, available_memory())
    events = EventLog(enabled=config.events.enabled)
    cache = PrefixCache(groups, memory.n_blocks, config=config.cache, events=events)
    n_scratch = n_scratch_blocks(len(groups)) if config.cache.verify_hits else 0
    store = _store(layout, groups, memory, n_scratch)
    runner = Runner(model, store, groups, observer=observer)
    ahead = MemoryAhead(cache, store)
    ahead.work_all()
    verifier = _verifier(config, cache, runner, store)
    parts = () if verifier is None else (verifier,)
    scheduler = Scheduler(cache, config.scheduler, max_model_len=memory.max_model_len, parts=parts)
    publisher, told = publish_events(config.events, cache)
    core = EngineCore(
        runner,
        scheduler,
        cache,
        tokenizer,
        _info(
            config,
            model,
            tokenizer,
            cache,
            scheduler,
            memory,
            row_invariant=row_invariant,
            notes=[*ops.notes, *probed, *told],
        ),
        namespace=Namespace(model.weights_digest),
        rng=random.Random(config.model.seed),
        verifier=verifier,
        idle=(ahead,),
        events=publisher,
    )
    return BuiltEngine(core, tokenizer, cache, scheduler, runner, model)


def _probe(config: EngineConfig, model: Model, report: Progress) -> tuple[bool, list[str]]:
    """Whether equal bits may be expected of the products, and what to say of it at start."""
    if config.model.numerics == "fast":
        return False, []  # the operations themselves say so
    report("checking the matrix products", 0.0)
    probe = probe_row_invariance(model.linears)
    return probe.row_invariant, [probe.line()]


def check_verify_options(config: EngineConfig) -> None:
    """ConfigError if hits are to be verified where other options leave none, or promise no equal bits."""
    if not config.cache.verify_hits:
        return
    if not config.cache.enable_prefix_caching:
        raise ConfigError(
            "verify_hits checks hits, and without prefix caching there are none: leave one of the two out"
        )
    if config.model.numerics == "fast":
        raise ConfigError(
            "verify_hits compares bits, which numerics 'fast' does not keep: leave one of the two options out"
        )


def check_verifiable(config: EngineConfig, *, row_invariant: bool) -> None:
    """ConfigError if hits are to be verified where equal bits are not to be expected: every check would be an alarm."""
    if config.cache.verify_hits and not row_invariant:
        raise ConfigError(
            "verify_hits compares bits, and the matrix products that this machine would use do not keep them (a row's "
            "result depends on the rows beside it): leave it out, or try another dtype or other kernels"
        )


def _verifier(config: EngineConfig, cache: PrefixCache, runner: Runner, store: KVStore) -> HitVerifier | None:
    share = config.cache.verify_hits
    if not share:
        return None
    return HitVerifier(share, cache=cache, runner=runner, store=store, rng=random.Random(f"hits {config.model.seed}"))


def _store(layout: KVLayout, groups: tuple[GroupSpec, ...], memory: MemoryPlan, n_scratch: int) -> KVStore:
    try:
        return KVStore(groups, memory.n_blocks + n_scratch, layout)
    except RuntimeError as error:  # how PyTorch reports that the allocator refused
        raise ConfigError(
            f"no memory for {memory.n_blocks} KV blocks ({memory.kv_cache_bytes} bytes): set kv_cache_memory_bytes "
            f"to less ({error})"
        ) from error


def _info(
    config: EngineConfig,
    model: Model,
    tokenizer: Tokenizer,
    cache: PrefixCache,
    scheduler: Scheduler,
    memory: MemoryPlan,
    *,
    row_invariant: bool,
    notes: list[str],
) -> EngineInfo:
    limit = scheduler.max_model_len
    n_rowless = tokenizer.vocab_size - model.spec.vocab_size
    if n_rowless > 0:  # Gemma 3's text models, for one: their tokenizer knows an image token
        notes = [*notes, f"{n_rowless} tokens of the tokenizer have no embedding; a prompt with one is refused"]
    if limit < model.spec.max_positions and config.scheduler.max_model_len is None:
        notes = [*notes, f"the model could take {model.spec.max_positions} tokens; the KV pool holds {limit}"]
    if cache.min_reusable_tokens >= limit:
        notes = [
            *notes,
            f"no prefix can be reused: the shortest is {cache.min_reusable_tokens} tokens, the limit {limit}",
        ]
    return EngineInfo(
        model=config.model.model,
        family=model.spec.family,
        max_model_len=limit,
        vocab_size=model.spec.vocab_size,
        block_size=config.cache.block_size,
        n_blocks=memory.n_blocks,
        n_groups=len(cache.groups),
        min_reusable_tokens=cache.min_reusable_tokens,
        dtype=str(model.ops.dtype).removeprefix("torch."),
        kv_cache_bytes=memory.kv_cache_bytes,
        quantization=config.model.quantization,
        kv_dtype=config.cache.kv_dtype,
        threads=torch.get_num_threads(),
        enable_prefix_caching=config.cache.enable_prefix_caching,
        hash_algo=config.cache.hash_algo,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_mixed_tokens=min(config.scheduler.max_num_mixed_tokens, config.scheduler.max_num_batched_tokens),
        row_invariant=row_invariant,
        explain=config.scheduler.explain,
        notes=notes,
    )
