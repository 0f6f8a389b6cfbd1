"""``LLM``: the engine in this process, for scripts and batch jobs.

with LLM("smollm2-135m") as llm:
    for output in llm.generate(["A headwater is", "A headwater is not"], SamplingParams(temperature=0.0)):
        print(output.outputs[0].text, output.num_cached_tokens)
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headwater.engine.checks import check_prompt, check_sampling, check_template_arguments
from headwater.engine.messages import Delta, EngineInfo, EngineStats, ResetCache, ResetDone, Submit, Usage
from headwater.engine.options import engine_config
from headwater.engine.process import Core
from headwater.errors import BadRequest, CacheBusy, EngineError, NeverFits
from headwater.text.tokenizer import Tokenizer
from headwater.types import FinishReason, RequestId, SamplingParams

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Message = Mapping[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """What was generated. ``stop_reason``: the stop string or stop id that matched."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """One request, finished. ``prompt`` is None where token ids were given."""

    request_id: RequestId
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    prefix_stop: str | None = None
    """Why no more came from it: one of the cache's reasons, such as "differs", "partial_block" or "evicted"."""
    finished: bool = False


class LLM:
    """A model and its engine, in this process. Not for several threads at once.

    ``model`` is a catalogue name, a .gguf file or a Hugging Face folder; ``options`` are those of
    `headwater serve` with underscores, such as ``max_model_len=2048`` or ``enable_prefix_caching=False``.
    Raises ConfigError for a wrong option, ModelError for a model that cannot be loaded.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        from headwater.engine.build import build_engine  # here: it imports torch

        built = build_engine(engine_config(os.fspath(model), options), lambda what, fraction: None)
        self._core: Core | None = built.core
        self._tokenizer = built.tokenizer
        self._request_ids = (str(i) for i in itertools.count())

    @classmethod
    def over(cls, core: Core, tokenizer: Tokenizer) -> LLM:
        """An LLM over parts that are already built."""
        llm = cls.__new__(cls)
        llm._core = core
        llm._tokenizer = tokenizer
        llm._request_ids = (str(i) for i in itertools.count())
        return llm

    # ---- use ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer all ``prompts`` (a text, token ids, or a list of either), batched; the outputs in their order.

        ``sampling_params`` is one for all or one for each. Raises BadRequest, before anything runs, when one
        of them cannot be answered; EngineError when a request fails.
        """
        many = _as_list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in many]
        encoded = [self._encode(prompt, i) for i, prompt in enumerate(many)]
        return self._run(encoded, texts, sampling_params, cache_salt, priority, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, under the model's chat template. Raises NoChatTemplate without one."""
        check_template_arguments(chat_template_kwargs or {})
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [
            self._tokenizer.render_chat(
                conversation,  # type: ignore[arg-type]  # one level of nesting was just told apart
                add_generation_prompt=add_generation_prompt,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        encoded = [self._tokenizer.encode(text, add_special_tokens=False, parse_special=True) for text in texts]
        return self._run(encoded, list(texts), sampling_params, cache_salt, priority, progress)

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns how many blocks were cleared. Raises CacheBusy while requests run."""
        done = self._live_core().call(ResetCache(call_id=0))
        if not isinstance(done, ResetDone):
            raise EngineError(f"the engine could not forget its prefixes: {done}")
        if not done.done:
            raise CacheBusy(done.n_busy)
        return done.n_cleared

    def verify_hits(self, limit: int | None = None) -> dict[str, int]:
        """Compute hit blocks that the option ``verify_hits`` has chosen again, at most ``limit``, and compare their
        bits: here no time is idle unless the caller says so. How many were "verified", of these "differing" (withdrawn,
        and logged as errors), "skipped" (no longer held) and "failed"."""
        core = self._live_core()
        before, n_done = core.stats().counters, 0
        while core.hits_to_verify and (limit is None or n_done < limit):
            core.work_idle()
            n_done += 1
        after = core.stats().counters
        names = {"verified": "hits_verified", "differing": "hits_differing"}
        names |= {name: f"hits_verify_{name}" for name in ("skipped", "failed")}
        return {name: int(after.get(key, 0) - before.get(key, 0)) for name, key in names.items()}

    @property
    def info(self) -> EngineInfo:
        """The engine's facts: true limits, blocks, dtype, and remarks."""
        return self._live_core().info

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters and gauges."""
        return self._live_core().stats()

    # ---- life -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the engine's memory back; a closed LLM answers nothing."""
        if self._core is not None:
            self._core.close()
        self._core = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _live_core(self) -> Core:
        if self._core is None:
            raise EngineError("this LLM was closed")
        return self._core

    def _encode(self, prompt: Prompt, i: int) -> list[int]:
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise BadRequest(f"prompts[{i}] must be a text or a list of token ids, got {prompt!r:.40}")
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, add_special_tokens=True, parse_special=True)
        return list(prompt)

    def _run(
        self,
        encoded: list[list[int]],
        texts: list[str | None] | list[str],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str | None,
        priority: int,
        progress: bool,
    ) -> list[RequestOutput]:
        core = self._live_core()
        if not isinstance(cache_salt, str | None):
            raise BadRequest("cache_salt must be a text or None", field="cache_salt")
        if type(priority) is not int:
            raise BadRequest(f"priority must be a whole number, got {priority!r:.40}", field="priority")
        sampling = _one_for_each(sampling_params, len(encoded))
        for i, (ids, params) in enumerate(zip(encoded, sampling, strict=True)):
            where = "prompt" if len(encoded) == 1 else f"prompts[{i}]"
            check_prompt(ids, vocab_size=core.info.vocab_size, max_model_len=core.info.max_model_len, field=where)
            check_sampling(params, vocab_size=core.info.vocab_size)
        outputs: dict[RequestId, RequestOutput] = {}
        running: set[RequestId] = set()
        with _interrupted_between_steps() as stop_here:
            try:
                for ids, text, params in zip(encoded, texts, sampling, strict=True):
                    request_id = next(self._request_ids)
                    outputs[request_id] = RequestOutput(request_id, text, ids, [CompletionOutput()])
                    running.add(request_id)
                    for delta in core.submit(Submit(request_id, ids, params, cache_salt, priority)):
                        _add(outputs[request_id], delta)
                with _bar(len(encoded), shown=progress) as advance:
                    while running:
                        stop_here()
                        for delta in core.step().deltas:
                            _add(outputs[delta.request_id], delta)
                            if delta.finish_reason is not None:
                                running.remove(delta.request_id)
                                advance()
            finally:
                for request_id in running:
                    core.abort(request_id)
        return list(outputs.values())


def _as_list(prompts: Prompts) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise BadRequest(
            f"prompts must be a text, token ids, or a list of either, got {prompts!r:.40}", field="prompts"
        )
    many: list[Any] = list(prompts)
    if many and not isinstance(many[0], (str, Sequence)):
        return [many]
    return many


def _one_for_each(given: SamplingParams | Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
    if given is None:
        given = SamplingParams()
    params = [given] * n if isinstance(given, SamplingParams) else list(given)
    if len(params) != n:
        raise BadRequest(f"{len(params)} sampling_params for {n} prompts: give one, or one for each")
    if not all(isinstance(one, SamplingParams) for one in params):
        raise BadRequest("sampling_params must be SamplingParams, or a list of them", field="sampling_params")
    # A lone stop string, or lists, are what callers write; the engine's messages carry tuples.
    return [
        replace(
            one,
            stop=(one.stop,) if isinstance(one.stop, str) else tuple(one.stop),
            stop_token_ids=tuple(one.stop_token_ids),
        )
        for one in params
    ]


def _add(output: RequestOutput, delta: Delta) -> None:
    if delta.finish_reason is FinishReason.ERROR:
        message = delta.error or "the request failed"
        if delta.error_kind == "never_fits":
            raise NeverFits(message)
        raise BadRequest(message) if delta.error_kind == "bad_request" else EngineError(message)
    if delta.prefix_stop is not None:
        output.prefix_stop = delta.prefix_stop
    completion = output.outputs[0]
    completion.text += delta.text
    completion.token_ids += delta.token_ids
    usage: Usage | None = delta.usage
    if usage is not None:
        output.num_cached_tokens = usage.n_cached
    if delta.finish_reason is not None:
        completion.finish_reason = delta.finish_reason.value
        completion.stop_reason = delta.stop_reason
        output.finished = True


@contextlib.contextmanager
def _bar(n_requests: int, *, shown: bool) -> Iterator[Any]:
    """Yields what is called once per finished request. Only a terminal gets to see it, on stderr."""
    console = Console(stderr=True)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bars:
        task = bars.add_task("requests", total=n_requests)
        yield lambda: bars.advance(task)


@contextlib.contextmanager
def _interrupted_between_steps() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until what is yielded is called, or the block ends.

    Raised in the midst of a step it would leave the scheduler waiting for that step's result for ever, and a
    notebook goes on with the same LLM. Python runs signal handlers in its main thread only.
    """
    pending: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    def stop_here() -> None:
        if pending:
            pending.clear()
            raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield stop_here
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield stop_here
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    stop_here()
