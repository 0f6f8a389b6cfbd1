"""A server in this process: the real application, engine core, scheduler and cache over a runner without a model.

Bytes are tokens and blocks have 4 slots. A test may step the engine by hand, so that "being computed now" is a state
and no race.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import httpx

from headwater.cache.prefix import PrefixCache
from headwater.config import CacheConfig, SchedulerConfig, ServerConfig
from headwater.engine.core import EngineCore
from headwater.engine.messages import Call, Delta, EngineInfo, EngineStats, Refused, Reply, Submit
from headwater.errors import BadRequest
from headwater.sched.scheduler import Scheduler
from headwater.serve.access import Access
from headwater.serve.app import create_app
from headwater.serve.front import Front
from headwater.types import GroupKind, GroupSpec, Namespace, SamplingParams
from tests.sched.fake_runner import FakeRunner
from tests.serve.fake_core import ByteTokenizer

BLOCK = 4
VOCAB = 260
EOS, MARK = 256, 257

FULL = (GroupSpec(GroupKind.FULL, BLOCK),)
HYBRID = (*FULL, GroupSpec(GroupKind.SLIDING, BLOCK, window=BLOCK + 1))

T = TypeVar("T")


class MarkTokenizer(ByteTokenizer):
    """As its parent, but chats are framed by a special token, and "<mark>" in a text is that token."""

    eos_ids = frozenset({EOS})
    special_ids = frozenset({EOS, MARK})
    prefix_ids = ()
    n_suffix_ids = 0

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        first, *others = text.encode().split(b"<mark>")
        return [*first, *(token for piece in others for token in (MARK, *piece))]

    def render_chat(self, messages: Any, *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        text = "".join(f"<mark>{message['role']}\n{message['content']}<mark>\n" for message in messages)
        return text + ("<mark>assistant\n" if add_generation_prompt else "")

    def token_bytes(self, token_id: int) -> bytes:
        return b"<mark>" if token_id == MARK else super().token_bytes(token_id)


class StageClient:
    """As EngineClient, with the core in this process: whoever waits for a delta steps it."""

    alive, death = True, ""

    def __init__(self, core: EngineCore) -> None:
        self.info = core.info
        self.stats: EngineStats = core.stats()
        self.core = core
        self._queues: dict[str, deque[Delta]] = {}

    def add_stats_listener(self, listener: Callable[[EngineStats], None]) -> None: ...

    async def stream(self, submits: Sequence[Submit]) -> AsyncGenerator[Delta, None]:
        queue: deque[Delta] = deque()
        running = {submit.request_id for submit in submits}
        self._queues.update(dict.fromkeys(running, queue))
        try:
            for submit in submits:
                queue.extend(self.core.submit(submit))
            while running:
                await asyncio.sleep(0)
                if not queue:
                    self.step()
                    continue
                delta = queue.popleft()
                if delta.finish_reason is not None:
                    running.remove(delta.request_id)
                yield delta
        finally:
            for request_id in running:
                self.core.abort(request_id)

    def step(self) -> None:
        outputs = self.core.step()
        self.stats = outputs.stats
        for delta in outputs.deltas:
            if delta.request_id in self._queues:
                self._queues[delta.request_id].append(delta)

    async def call(self, make: Callable[[int], Call], expected: type[Reply]) -> Any:
        reply = self.core.call(make(1))
        self.stats = self.core.stats()
        if isinstance(reply, Refused):
            raise BadRequest(reply.error)
        assert isinstance(reply, expected)
        return reply


class Stage:
    """``keys``: API keys, the last one being the admin key."""

    def __init__(
        self,
        *keys: str,
        groups: Sequence[GroupSpec] = FULL,
        n_blocks: int = 256,
        budget: int = 64,
        wait_s: float = 0.0,
        partial: bool = False,
        caching: bool = True,
        derive_salts: bool = True,
        explain_usage: bool = False,
        explain: bool = True,
    ) -> None:
        config = CacheConfig(block_size=BLOCK, partial_reuse=partial, enable_prefix_caching=caching)
        self.cache = PrefixCache(groups, n_blocks, config=config)
        limits = SchedulerConfig(8, budget, 512, in_flight_wait_s=wait_s, explain=explain)
        self.sched = Scheduler(self.cache, limits, max_model_len=512)
        info = EngineInfo(
            "fake", "fake", self.sched.max_model_len, VOCAB, BLOCK, n_blocks, len(groups),
            self.cache.min_reusable_tokens, "float32", 0, 1, caching, "sha256", 8, budget, True,
            explain=explain,
        )  # fmt: skip
        tokenizer: Any = MarkTokenizer()
        runner = FakeRunner(tuple(groups), n_blocks, vocab_size=256)
        self.core = EngineCore(
            runner, self.sched, self.cache, tokenizer, info, namespace=Namespace(b"weights"), rng=random.Random(1)
        )
        self.client = StageClient(self.core)
        server = ServerConfig()
        if keys:
            secret = b"a secret for tests, of 32 bytes." if derive_salts else None
            server = ServerConfig(api_keys=keys[:-1], admin_key=keys[-1], derive_salts=derive_salts, salt_secret=secret)
        client: Any = self.client
        self.front = Front(client, tokenizer, "fake", access=Access(server), explain_usage=explain_usage)
        self.app = create_app(self.front)

    # ---- HTTP -----------------------------------------------------------------------------------

    def http(self, key: str | None = None) -> httpx.AsyncClient:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://stage", headers=headers)

    def run(self, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, T]], key: str | None = None) -> T:
        async def with_client() -> T:
            async with self.http(key) as client:
                return await work(client)

        return asyncio.run(with_client())

    def post(self, path: str, body: Any, key: str | None = None) -> httpx.Response:
        return self.run(lambda client: client.post(path, json=body), key)

    def get(self, path: str, key: str | None = None) -> httpx.Response:
        return self.run(lambda client: client.get(path), key)

    def complete(self, prompt: Any, key: str | None = None, **fields: Any) -> httpx.Response:
        answer = self.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, **fields}, key)
        assert answer.status_code == 200, answer.text
        return answer

    def chat(self, messages: list[dict[str, str]], **fields: Any) -> httpx.Response:
        answer = self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **fields})
        assert answer.status_code == 200, answer.text
        return answer

    # ---- the engine -----------------------------------------------------------------------------

    def begin(self, request_id: str, prompt: str, sender: str = "") -> None:
        """Start a request of somebody else and run one step of it; the steps after that are those of other requests."""
        self.core.submit(Submit(request_id, list(prompt.encode()), SamplingParams(0.0, max_tokens=9), sender=sender))
        self.client.step()

    def compute_under_adapter(self, prompt: str) -> None:
        """Run one request as if its model had an adapter: no request can ask for one yet."""
        plain = self.core._namespace
        self.core._namespace = replace(plain, adapters=((b"adapter", 1.0),))
        self.core.submit(Submit("adapted", list(prompt.encode()), SamplingParams(0.0, max_tokens=1)))
        while self.core.busy:
            self.client.step()
        self.core._namespace = plain
