"""The whole engine in this process, on a real model, with all that a test may want to look at.

Everything is the real thing (tokenizer, cache, scheduler, runner, kernels); only the sizes are a test's choice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.cache.key import Hasher
from headwater.cache.prefix import PrefixCache
from headwater.config import CacheConfig, SchedulerConfig
from headwater.engine.core import EngineCore
from headwater.engine.messages import Delta, EngineInfo, ResetCache, ResetDone, Submit, Usage
from headwater.engine.verify import HitVerifier, n_scratch_blocks
from headwater.kernels import LayerKV, RaggedBatch, make_ops
from headwater.kernels.probe import probe_row_invariance
from headwater.model.decoder import Model
from headwater.model.load import load_model
from headwater.run.memory import plan_groups
from headwater.run.runner import Runner
from headwater.run.store import KVStore
from headwater.sched.scheduler import Scheduler
from headwater.sched.sequence import Sequence as Seq
from headwater.text.tokenizer import Tokenizer
from headwater.types import FinishReason, GroupSpec, Namespace, RequestId, SamplingParams

WHOLE = 8192
"""A token budget that no test's prompt reaches."""


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer, and what the start-up probe says of its products."""

    model: Model
    tokenizer: Tokenizer
    row_invariant: bool
    kv_dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.model.ops.dtype


def load(
    path: Path,
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    max_positions: int | None = None,
    kernels: str = "auto",
    *,
    quantization: str = "none",
    kv_dtype: torch.dtype | None = None,
    cache_dir: Path | None = None,
) -> Loaded:
    """As engine/build.py does: load, then let the probe choose how products are called."""
    ops = make_ops(dtype, kernels=kernels)
    model = load_model(path, ops, max_positions=max_positions, quantization=quantization, cache_dir=cache_dir)
    return Loaded(model, tokenizer, probe_row_invariance(model.linears).row_invariant, kv_dtype)


@dataclass(frozen=True)
class Call:
    """What the model was given in one forward pass, and the sequences of that moment."""

    tokens: list[int]
    positions: list[int]
    query_start: tuple[int, ...]
    context_len: tuple[int, ...]


class Watched:
    """The model, with a record of its inputs; ``during`` is called in the middle of a step."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.calls: list[Call] = []
        self.during: Callable[[], None] = lambda: None
        self.lie_about_positions = False
        """Break it: positions of every row start at 0."""

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        tokens, positions = batch.token_ids.tolist(), batch.positions.tolist()
        self.calls.append(Call(tokens, positions, tuple(batch.query_start), tuple(batch.context_len)))
        self.during()
        if self.lie_about_positions:
            for begin, end in itertools.pairwise(batch.query_start):
                batch.positions[begin:end] -= batch.positions[begin].clone()
        return self._model.forward(batch, kv)


class Seen:
    """Keeps all logits seen after each (request, position): several where a token was computed again. ``keep`` makes
    what is kept of them."""

    def __init__(self, every_position: bool, keep: Callable[[Tensor], Any] = Tensor.clone) -> None:
        self.every_position = every_position
        self._keep = keep
        self.logits: dict[RequestId, dict[int, list[Any]]] = {}

    def saw(self, request_ids: Sequence[RequestId], positions: Sequence[int], logits: Tensor) -> None:
        for request_id, position, row in zip(request_ids, positions, logits, strict=True):
            self.logits.setdefault(request_id, {}).setdefault(position, []).append(self._keep(row))


@dataclass
class Answer:
    """One request and all that came out of it."""

    request_id: RequestId
    prompt: list[int]
    seq: Seq
    deltas: list[Delta] = field(default_factory=list)
    logits: dict[int, list[Tensor]] = field(default_factory=dict)
    """Position -> the logits after the token there, each time they were computed."""
    aborted: bool = False

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def last(self) -> Delta:
        return self.deltas[-1]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.last.finish_reason if self.deltas else None

    @property
    def usage(self) -> Usage:
        assert self.last.usage is not None
        return self.last.usage

    @property
    def n_cached(self) -> int:
        return self.usage.n_cached

    @property
    def stop(self) -> str | None:
        """Why the hit ended where it did."""
        return self.deltas[0].prefix_stop


class Engine:
    """An engine core over ``loaded``. Greedy unless ``submit`` says otherwise; audited after every step."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        block_size: int = 16,
        n_blocks: int | None = None,
        budget: int = WHOLE,
        max_seqs: int = 16,
        caching: bool = True,
        max_model_len: int | None = None,
        every_position: bool = False,
        hasher: Hasher | None = None,
        audit: bool = True,
        of: Engine | None = None,
        partial: bool = False,
        wait_s: float = 30.0,
        verify_hits: float = 0.0,
        keep: Callable[[Tensor], Any] = Tensor.clone,
    ) -> None:
        """``partial``: off unless a test is about it, so that hits are whole blocks, as the mission counts them.
        ``of``: share that engine's blocks and all that is cached in them (it must be idle)."""
        spec = loaded.model.spec
        self.loaded = loaded
        self.audit = audit
        self.groups: tuple[GroupSpec, ...] = plan_groups(spec, block_size) if of is None else of.groups
        n_blocks = 512 * len(self.groups) if n_blocks is None else n_blocks
        config = CacheConfig(block_size=block_size, enable_prefix_caching=caching, partial_reuse=partial)
        self.cache: PrefixCache = (
            PrefixCache(self.groups, n_blocks, config=config, hasher=hasher) if of is None else of.cache
        )
        layout = loaded.model.ops.kv_layout(spec.n_kv_heads, spec.head_dim, block_size, loaded.kv_dtype)
        n_scratch = n_scratch_blocks(len(self.groups)) if verify_hits else 0
        self.store: KVStore = KVStore(self.groups, n_blocks + n_scratch, layout) if of is None else of.store
        self.model = Watched(loaded.model)
        self.seen = Seen(every_position, keep)
        self.runner = Runner(self.model, self.store, self.groups, observer=self.seen)
        self.verifier: HitVerifier | None = None
        if verify_hits:
            self.verifier = HitVerifier(
                verify_hits, cache=self.cache, runner=self.runner, store=self.store, rng=random.Random(0)
            )
        self.scheduler = Scheduler(
            self.cache,
            SchedulerConfig(max_seqs, budget, in_flight_wait_s=wait_s),
            max_model_len=spec.max_positions if max_model_len is None else max_model_len,
            parts=() if self.verifier is None else (self.verifier,),
        )
        info = EngineInfo(
            "model", spec.family, self.scheduler.max_model_len, spec.vocab_size, block_size, self.cache.n_blocks,
            len(self.groups), self.cache.min_reusable_tokens, str(loaded.dtype), self.store.n_bytes, 1, caching,
            "sha256", max_seqs, budget, loaded.row_invariant,
        )  # fmt: skip
        self.core = EngineCore(
            self.runner, self.scheduler, self.cache, loaded.tokenizer, info,
            namespace=Namespace(loaded.model.weights_digest), rng=random.Random(0), verifier=self.verifier,
        )  # fmt: skip
        self.answers: dict[RequestId, Answer] = {}
        self._ids = (f"r{i}" for i in itertools.count())

    # ---- requests -----------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        salt: str | None = None,
        priority: int = 0,
        skip_reading: bool = False,
        request_id: RequestId | None = None,
        **params: Any,
    ) -> Answer:
        request_id = next(self._ids) if request_id is None else request_id
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params})
        refusal = self.core.submit(Submit(request_id, list(prompt), sampling, salt, priority, skip_reading))
        assert not refusal, refusal[0].error
        seq = next(seq for seq in self.scheduler.waiting() if seq.request_id == request_id)
        answer = self.answers[request_id] = Answer(request_id, list(prompt), seq)
        answer.logits = self.seen.logits.setdefault(request_id, {})
        return answer

    def step(self) -> list[Delta]:
        deltas = self.core.step().deltas
        for delta in deltas:
            assert delta.error is None, delta.error
            self.answers[delta.request_id].deltas.append(delta)
        if self.audit:
            self.scheduler.audit()
        return deltas

    def run(self, limit: int = 20_000) -> None:
        """Step until nothing is left; then nothing may be in use."""
        for _ in range(limit):
            if not self.core.busy:
                self.check_idle()
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps")

    def generate(self, prompt: Sequence[int], max_tokens: int = 1, **kwargs: Any) -> Answer:
        answer = self.submit(prompt, max_tokens, **kwargs)
        self.run()
        return answer

    def abort(self, answer: Answer) -> None:
        answer.aborted = self.core.abort(answer.request_id)
        self.scheduler.audit()

    def reset(self, *, force: bool = False) -> ResetDone:
        return self.core.reset(ResetCache(0, force))

    # ---- looking in ---------------------------------------------------------------------------------

    def check_idle(self) -> None:
        stats = self.cache.stats()
        assert stats.in_use == stats.fenced == stats.logical_blocks == 0
        assert stats.free + stats.evictable == self.cache.n_blocks
        assert self.scheduler.n_running == self.scheduler.n_waiting == 0

    @property
    def counters(self) -> dict[str, float]:
        return self.core.stats().counters

    def table(self, answer: Answer, group: int = 0) -> list[int]:
        return list(answer.seq.held().tables[group].blocks)

    def hit(self, prompt: Sequence[int], salt: str | None = None) -> int:
        """What a request would be told now; nothing is changed."""
        namespace = Namespace(self.loaded.model.weights_digest, salt=salt)
        return self.cache.lookup(self.cache.chain(namespace, prompt)).n_hit

    def order_free(self, *first: int) -> None:
        """Let the pool hand out ``first`` next, in this order, before its other free blocks."""
        free = self.cache.pool.free
        assert set(first) <= set(free)
        free[:] = [block for block in free if block not in first] + list(reversed(first))

    def shuffle_free(self, seed: int = 5) -> None:
        """Let the pool hand out its free blocks in no order: what a long life does to it."""
        random.Random(seed).shuffle(self.cache.pool.free)

    def kv_of(self, answer: Answer) -> list[Tensor]:
        """Per layer [2, n, n_kv_heads, head_dim]: K and V of a running request's computed tokens that are held."""
        return [torch.stack(parts[:2]) for _, parts in self.held_kv(answer)]

    def held_kv(self, answer: Answer) -> list[tuple[int, list[Tensor]]]:
        """Per layer, of a running request's computed tokens that are held: the first one's position, and K and V
        [n, n_kv_heads, head_dim], then their scales if there are any."""
        out = []
        for layer in self.store.layers:
            table, size = answer.seq.held().tables[layer.group], self.groups[layer.group].block_size
            n = answer.seq.n_computed - table.first * size
            blocks = [layer.layout.read(layer.pages, block, size) for block in table.blocks]
            out.append((table.first * size, [torch.cat(part)[:n].clone() for part in zip(*blocks, strict=True)]))
        return out


def some_tokens(n: int, seed: int, vocab: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(n)]


def other_than(token: int, vocab: int) -> int:
    """Another token."""
    return (token + 1) % vocab
