"""The matrix: logits of every position, and the KV store itself, whatever was cached, cut, shared or interrupted.

What each request must be is computed once: alone, without a cache, the whole prompt in one step, by one thread. Then it
is answered in every *cell* of

    {chunk} x {strangers} x {threads} x {preempted and resumed, or not} x {blocks in order, or scattered}

and in each cell there are requests with hits of several lengths, down to single slots and up to the whole prompt but
one token. Models of all families and kinds of numbers are for the caller to bring.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import xxhash
from torch import Tensor

from headwater.cache.block import Node
from headwater.run.difference import bits
from headwater.run.memory import plan_groups
from headwater.types import Namespace
from tests.e2e.compare import same_logits
from tests.e2e.engine import WHOLE, Answer, Engine, Loaded, other_than, some_tokens

CHUNKS = (1, 7, 64, 512, WHOLE)
STRANGERS = (0, 1, 3, 8)
THREADS = (1, 2, 4)
N_NEW = 3
"""Tokens generated and compared."""
PREEMPT_AT = (2, 5, 11)
"""Steps after which everybody is sent back to the queue."""


@dataclass(frozen=True)
class Cell:
    chunk: int
    n_strangers: int
    threads: int
    preempted: bool
    scattered: bool
    """Physical blocks in no order, which hold a prefix that was computed in chunks of 7 by two threads."""

    def __str__(self) -> str:
        chunk = "whole" if self.chunk == WHOLE else str(self.chunk)
        more = ", preempted" * self.preempted + ", scattered" * self.scattered
        return f"chunk {chunk}, {self.n_strangers} strangers, {self.threads} threads{more}"


FACTORS = (CHUNKS, STRANGERS, THREADS, (False, True), (False, True))
CELLS = [Cell(*case) for case in itertools.product(*FACTORS)]


@dataclass(frozen=True)
class Workload:
    """``prompts[i]`` begins with the first ``hits[i]`` tokens of ``shared``, which is cached, and then differs (or is
    ``shared`` itself). ``strangers`` share nothing."""

    block_size: int
    shared: list[int]
    prompts: list[list[int]]
    hits: list[int]
    strangers: list[list[int]]

    @classmethod
    def make(cls, *, block_size: int, hits: list[int], n_shared: int, n_own: int, n_cold: int, vocab: int) -> Workload:
        """A prompt for each of ``hits`` (``n_shared - 1``: all but the last token), with ``n_own`` tokens after it; and
        one of ``n_cold`` tokens that hits nothing."""
        shared = some_tokens(n_shared, seed=1, vocab=vocab)
        prompts = []
        for i, hit in enumerate(hits):
            own = some_tokens(n_own, seed=10 + i, vocab=vocab)
            if hit < n_shared:
                own[0] = other_than(shared[hit], vocab)
            prompts.append(shared[:hit] + own if hit < n_shared - 1 else list(shared))
        prompts.append(some_tokens(n_cold, seed=99, vocab=vocab))
        strangers = [some_tokens(n, seed=200 + n, vocab=vocab) for n in (1, 2, 9, 5, 3, 17, 4, 1)]
        firsts = iter(range(vocab))
        for tokens in (prompts[-1], *strangers, *(p for p, hit in zip(prompts, hits, strict=False) if not hit)):
            tokens[0] = next(first for first in firsts if first != shared[0])  # nobody hits what another one computed
        return cls(block_size, shared, prompts, [*hits, 0], strangers)


@dataclass
class Tally:
    """What was compared, and what really happened."""

    cells: int = 0
    requests: int = 0
    logits: int = 0
    """Vectors of logits, bit for bit."""
    kv_bytes: int = 0
    hit_tokens: int = 0
    copied_tokens: int = 0
    resumed_hit_tokens: int = 0
    preemptions: int = 0

    def __iadd__(self, other: Tally) -> Tally:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))
        return self


def digest(logits: Tensor) -> bytes:
    """All that equality of bits needs, where a vocabulary is too large to keep every vector."""
    return xxhash.xxh3_128_digest(memoryview(logits.contiguous().numpy()))


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class Wanted:
    """One request as it must be."""

    tokens: list[int]
    logits: dict[int, Any]
    kv: list[tuple[int, list[Tensor]]] = field(repr=False)


class Matrix:
    """One model and one workload; ``run`` one cell after another. AssertionError names the cell and the place."""

    def __init__(
        self, loaded: Loaded, work: Workload, *, partial: bool = True, keep: Callable[[Tensor], Any] = Tensor.clone
    ) -> None:
        """Where the start-up probe says that bits are not kept, they are compared nearly (``exact``)."""
        self.loaded = loaded
        self.work = work
        self.exact = loaded.row_invariant
        if not self.exact and keep is not Tensor.clone:
            raise AssertionError("digests tell nothing about how near numbers are")
        self._partial = partial
        self._keep = keep
        alone = self._engine(caching=False, n_blocks=max(map(self._n_blocks, [*work.prompts, *work.strangers])))
        self.wanted = [wanted(alone, prompt) for prompt in [*work.prompts, *work.strangers]]
        self._homes = {scattered: self._home(scattered) for scattered in (False, True)}

    def run(self, cell: Cell) -> Tally:
        with threads(cell.threads):
            try:
                return self._run(cell)
            except AssertionError as error:
                raise AssertionError(f"[{cell}] {error}") from error

    # ---- as it must be ------------------------------------------------------------------------------

    def _engine(self, **options: Any) -> Engine:
        return Engine(
            self.loaded, block_size=self.work.block_size, every_position=True, audit=False, keep=self._keep,
            partial=self._partial, **options,
        )  # fmt: skip

    def _n_blocks(self, *prompts: list[int]) -> int:
        n_groups = len(plan_groups(self.loaded.model.spec, self.work.block_size))
        return n_groups * sum(2 + (len(prompt) + N_NEW) // self.work.block_size for prompt in prompts)

    def _home(self, scattered: bool) -> Engine:
        """An engine that has answered ``shared``."""
        work = self.work
        n_blocks = self._n_blocks(work.shared, *work.prompts, *work.strangers)
        home = self._engine(n_blocks=n_blocks, budget=7 if scattered else WHOLE)
        if scattered:
            home.shuffle_free()
        with threads(2 if scattered else 1):
            assert home.generate(work.shared, 1).n_cached == 0
        return home

    # ---- a cell -------------------------------------------------------------------------------------

    def _run(self, cell: Cell) -> Tally:
        home, work = self._homes[cell.scattered], self.work
        before = home.counters
        engine = self._engine(of=home, budget=cell.chunk, max_seqs=cell.n_strangers + 1)
        queue = [*range(len(work.prompts)), *range(len(work.prompts), len(work.prompts) + cell.n_strangers)]
        random.Random(str(cell)).shuffle(queue)
        prompts = [*work.prompts, *work.strangers]
        answers = {i: engine.submit(prompts[i], N_NEW + 1) for i in queue}
        kv = finish(engine, list(answers.values()), PREEMPT_AT if cell.preempted else ())
        engine.check_idle()
        tally = Tally(cells=1)
        for i, answer in sorted(answers.items()):
            hit = work.hits[i] if i < len(work.hits) else 0
            if not self._partial:
                hit = hit // work.block_size * work.block_size
            assert answer.n_cached == hit, f"a hit of {answer.n_cached} tokens, {hit} are cached (prompt {i})"
            tally += self._compare(answer, self.wanted[i], kv[answer.request_id])
        after = engine.counters
        tally.resumed_hit_tokens = int(after["resumed_hits"] - before["resumed_hits"])
        self._forget(engine, list(answers.values()))
        assert tally.hit_tokens > 0
        assert (tally.preemptions > 0) == cell.preempted
        sizes = [len(call.tokens) for call in engine.model.calls]
        assert max(sizes) <= cell.chunk
        return tally

    def _compare(self, got: Answer, want: Wanted, kv: list[tuple[int, list[Tensor]]]) -> Tally:
        tally = Tally(requests=1, preemptions=got.seq.n_preemptions)
        copied = got.n_cached % self.work.block_size
        tally.hit_tokens, tally.copied_tokens = got.n_cached - copied, copied
        where = f"prompt of {len(got.prompt)}, hit {got.n_cached}"
        assert got.tokens == want.tokens, f"tokens {got.tokens}, alone {want.tokens} ({where})"
        assert set(range(got.n_cached, len(got.prompt) + N_NEW - 1)) <= got.logits.keys() <= want.logits.keys()
        for at, many in got.logits.items():
            for logits in many:
                assert self._same(logits, want.logits[at]), f"logits at {at} differ ({where})"
                tally.logits += 1
        for layer, ((first, parts), (wanted_first, wanted_parts)) in enumerate(zip(kv, want.kv, strict=True)):
            start = max(first, wanted_first)  # of a window, one of the two may hold a block more
            for name, part, wanted in zip(("K", "V", "scale of K", "scale of V"), parts, wanted_parts, strict=False):
                a, b = part[start - first :], wanted[start - wanted_first :]
                assert len(a) == len(b) > 0
                assert self._same(a, b), f"{name} of layer {layer} differs {self._places(a, b, start)} ({where})"
                tally.kv_bytes += a.numel() * a.element_size()
        return tally

    def _same(self, a: Any, b: Any) -> bool:
        if isinstance(a, bytes):
            return bool(a == b)
        return torch.equal(bits(a), bits(b)) if self.exact else same_logits(a.float(), b.float(), self.loaded)

    @staticmethod
    def _places(a: Tensor, b: Tensor, start: int) -> str:
        different = (bits(a) != bits(b)).flatten(1).any(1).nonzero().flatten() + start
        return f"at positions {different.tolist()}"

    def _forget(self, engine: Engine, answers: list[Answer]) -> None:
        """Withdraw what these requests added to the cache, so that the next cell finds ``shared`` and no more."""
        cache, namespace = engine.cache, Namespace(self.loaded.model.weights_digest)

        def path(tokens: list[int]) -> list[Node]:
            return cache.index.walk(cache.chain(namespace, tokens), len(tokens) // cache.unit)

        shared = path(self.work.shared)
        for answer in answers:
            own = [node for node in path([*answer.prompt, *answer.tokens]) if node not in shared]
            if own:
                cache.withdraw(own[0])
        assert len(path(self.work.shared)) == len(shared) == len(self.work.shared) // cache.unit
        cache.audit()


def wanted(alone: Engine, prompt: list[int]) -> Wanted:
    """The request alone, its prompt in one step, by one thread, in an engine that caches nothing."""
    alone.model.calls.clear()
    with threads(1):
        answer = alone.submit(prompt, N_NEW + 1)
        kv = finish(alone, [answer])[answer.request_id]
    assert alone.model.calls[0].tokens == prompt and answer.n_cached == 0
    return Wanted(answer.tokens, {at: many[0] for at, many in answer.logits.items()}, kv)


def finish(engine: Engine, answers: list[Answer], preempt_at: tuple[int, ...] = ()) -> dict[str, Any]:
    """Run all to the end. Each request's KV is read when it has N_NEW tokens, and then it is aborted."""
    kv: dict[str, Any] = {}
    n_steps = 0
    while engine.core.busy:
        engine.step()
        n_steps += 1
        for answer in answers:
            if len(answer.tokens) == N_NEW and answer.request_id not in kv:
                kv[answer.request_id] = engine.held_kv(answer)
                engine.core.abort(answer.request_id)
        if n_steps in preempt_at:
            engine.scheduler.preempt_all()
    return kv
