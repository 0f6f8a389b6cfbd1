"""Perplexity of a text under an engine, and how far its predictions are from another engine's.

Both engines run the same chunks of the same windows side by side, so that only one chunk's logits exist at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from headwater.config import EngineConfig
from headwater.engine.build import build_engine
from headwater.engine.messages import EngineInfo, Submit
from headwater.errors import BadRequest, ConfigError, EngineError
from headwater.text.tokenizer import Tokenizer
from headwater.types import Progress, RequestId, SamplingParams

CHUNK_TOKENS = 256
"""Tokens of a step: their logits over the whole vocabulary are held at once, by each engine."""
ROWS = 64
"""Rows of logits that are compared at a time."""
PACKAGED_TEXT = "alice.txt"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Against another engine's predictions, token by token. ``mean_kl`` in nats, of this engine from that."""

    info: EngineInfo
    perplexity: float
    ratio: float
    """This engine's perplexity divided by that."""
    argmax_agreement: float
    mean_kl: float


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood of ``n_tokens`` tokens, each given those before it in its window."""

    info: EngineInfo
    n_tokens: int
    perplexity: float
    against: Comparison | None


def packaged_text() -> str:
    """Half of a book in English, about 18,000 tokens."""
    return (resources.files("headwater") / "texts" / PACKAGED_TEXT).read_text(encoding="utf-8")


def read_text(path: Path) -> str:
    """A UTF-8 file. ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: not a readable UTF-8 text: {error}") from error


def measure_perplexity(
    config: EngineConfig,
    text: str,
    *,
    n_tokens: int,
    window: int,
    report: Progress,
    against: EngineConfig | None = None,
) -> Perplexity:
    """Predict ``n_tokens`` tokens of ``text`` (all, if it has fewer) in windows of ``window`` tokens.

    Each window begins anew, with BOS where the model wants one, and its first token is not predicted where it does
    not. In the calling thread. ConfigError for a text of fewer than two tokens or options that do not fit.
    """
    engine = _Engine(_for_windows(config, window), report)
    other = None if against is None else _Engine(_for_windows(against, window), report)
    windows = cut(engine.tokenizer, text, n_tokens, window)
    total, other_total, agreed, kl, n = 0.0, 0.0, 0, 0.0, 0
    for i, tokens in enumerate(windows):
        report("predicting", i / len(windows))
        engine.begin(tokens)
        if other is not None:
            other.begin(tokens)
        while (chunk := engine.chunk()) is not None:
            reference = None if other is None else other.chunk()
            score = _score(chunk, reference, tokens)
            total, other_total = total + score.nll, other_total + score.other_nll
            agreed, kl, n = agreed + score.agreed, kl + score.kl, n + score.n
        if other is not None:
            other.end()
    report("predicting", 1.0)
    compared = None
    if other is not None:
        ratio = math.exp((total - other_total) / n)
        compared = Comparison(other.info, math.exp(other_total / n), ratio, agreed / n, kl / n)
    return Perplexity(engine.info, n, math.exp(total / n), compared)


def cut(tokenizer: Tokenizer, text: str, n_tokens: int, window: int) -> list[list[int]]:
    """Windows of at most ``window`` tokens, the last one shorter, in which together ``n_tokens`` are predicted."""
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    prefix = list(tokenizer.prefix_ids)
    windows = []
    while n_tokens > 0 and len(prefix) + len(ids) > 1:
        # of prefix and content, every token but the first is predicted
        length = min(window, n_tokens + 1) - len(prefix)
        windows.append(prefix + ids[:length])
        n_tokens -= len(windows[-1]) - 1
        ids = ids[length:]
    if not windows:
        raise ConfigError("the text has no token that could be predicted from another one")
    return windows


def _for_windows(config: EngineConfig, window: int) -> EngineConfig:
    """``config`` for one request at a time, of a window and the token after it, every token of which is computed."""
    return replace(
        config,
        cache=replace(config.cache, enable_prefix_caching=False),
        scheduler=replace(
            config.scheduler, max_num_seqs=1, max_num_batched_tokens=CHUNK_TOKENS, max_model_len=window + 1
        ),
    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Logits float32 [n, vocab_size] after the tokens at positions first .. first + n - 1."""

    first: int
    logits: Tensor


class _Engine:
    """An engine that answers one window at a time, step by step; it keeps the last step's logits."""

    every_position = True

    def __init__(self, config: EngineConfig, report: Progress) -> None:
        built = build_engine(config, report, observer=self)
        self._core = built.core
        self.tokenizer = built.tokenizer
        self._seen: _Chunk | None = None
        self._n_windows = 0

    @property
    def info(self) -> EngineInfo:
        return self._core.info

    def saw(self, request_ids: Sequence[RequestId], positions: Sequence[int], logits: Tensor) -> None:
        self._seen = _Chunk(positions[0], logits)

    def begin(self, tokens: list[int]) -> None:
        """Queue a window; ``chunk`` then gives its logits piece by piece. BadRequest if it cannot be run."""
        self._n_windows += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        for delta in self._core.submit(Submit(str(self._n_windows), tokens, sampling)):
            raise BadRequest(f"the text cannot be run: {delta.error}")

    def chunk(self) -> _Chunk | None:
        """Run one step; None when the window is done. EngineError if the step failed."""
        if not self._core.busy:
            return None
        self._seen = None
        for delta in self._core.step().deltas:
            if delta.error is not None:
                raise EngineError(f"a window could not be computed: {delta.error}")
        if self._seen is None:
            raise EngineError("a step computed nothing although a window is running")
        return self._seen

    def end(self) -> None:
        """EngineError if the window is not done."""
        if self._core.busy:
            raise EngineError("the two engines took different steps")


@dataclass(frozen=True, slots=True)
class _Score:
    """Sums over ``n`` predicted tokens."""

    n: int
    nll: float
    other_nll: float = 0.0
    agreed: int = 0
    kl: float = 0.0


@torch.inference_mode()
def _score(chunk: _Chunk, reference: _Chunk | None, tokens: Sequence[int]) -> _Score:
    """What is after position p is compared with token p + 1; nothing is known to come after the last one."""
    if reference is not None and (reference.first != chunk.first or len(reference.logits) != len(chunk.logits)):
        raise EngineError("the two engines took different steps")
    first = chunk.first
    n = min(len(chunk.logits), len(tokens) - 1 - first)
    nll = other_nll = kl = 0.0
    agreed = 0
    for at in range(0, n, ROWS):
        rows = slice(at, min(at + ROWS, n))
        targets = torch.tensor(tokens[first + rows.start + 1 : first + rows.stop + 1])[:, None]
        log_p = torch.log_softmax(chunk.logits[rows], -1)
        nll -= float(log_p.gather(1, targets).double().sum())
        if reference is not None:
            log_q = torch.log_softmax(reference.logits[rows], -1)
            other_nll -= float(log_q.gather(1, targets).double().sum())
            agreed += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
            kl += float((log_q.exp() * (log_q - log_p)).sum(-1).double().sum())
    return _Score(max(0, n), nll, other_nll, agreed, kl)
