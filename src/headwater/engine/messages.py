"""The message protocol between a front (HTTP server, ``LLM``) and the engine. msgpack over any pipe."""

from __future__ import annotations

import msgspec

from headwater.cache.account import Account, Viewer
from headwater.types import BlockId, FinishReason, RequestId, SamplingParams

# ---- to the engine ------------------------------------------------------------------------------


def _without_salt(message: msgspec.Struct) -> str:
    """How a message is shown: a salt appears in no log and no traceback."""
    names = [name for name in message.__struct_fields__ if name != "cache_salt"]
    return f"{type(message).__name__}({', '.join(f'{name}={getattr(message, name)!r}' for name in names)})"


class Submit(msgspec.Struct, tag=True, frozen=True):
    """A new request. The front has checked its fields; the engine checks lengths again."""

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str | None = None
    priority: int = 0
    """Lower runs first; equal ones by arrival."""
    skip_reading_prefix_cache: bool = False
    """Do not look the prompt up (its blocks are still published)."""
    sender: str = ""
    """Tells whose request it is, where there are API keys: a digest, never a key."""

    __repr__ = _without_salt


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_id: RequestId


class Call(msgspec.Struct, frozen=True):
    """A question that the engine answers once, between two steps, with the Reply of the same ``call_id``."""

    call_id: int


class ResetCache(Call, tag=True, frozen=True):
    """Forget all cached prefixes. With running requests: refused, or with ``force`` they are preempted."""

    force: bool = False


class ViewPool(Call, tag=True, frozen=True):
    """A picture of all blocks, with the ``n_queue`` that would be evicted next."""

    n_queue: int


class ViewBlock(Call, tag=True, frozen=True):
    """All that is known of one block."""

    block: BlockId


class ViewTree(Call, tag=True, frozen=True):
    """A picture of the content tree. A large one is made in pieces, a call each: ask until it is ``done``."""


class Explain(Call, tag=True, frozen=True):
    """What a request of this prompt would reuse now, and why no more; nothing is run or changed."""

    prompt_token_ids: list[int]
    viewer: Viewer
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False

    __repr__ = _without_salt


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Stop now; running requests are aborted."""


ToEngine = Submit | Abort | ResetCache | ViewPool | ViewBlock | ViewTree | Explain | Shutdown

# ---- from the engine ----------------------------------------------------------------------------


class EngineInfo(msgspec.Struct, frozen=True):
    """What the front shows of the engine; true limits, after fitting to memory."""

    model: str
    family: str
    max_model_len: int
    vocab_size: int
    block_size: int
    n_blocks: int
    n_groups: int
    min_reusable_tokens: int
    dtype: str
    kv_cache_bytes: int
    threads: int
    enable_prefix_caching: bool
    hash_algo: str
    max_num_seqs: int
    max_num_batched_tokens: int
    row_invariant: bool
    """What the start-up probe found of the products that will be used."""
    notes: list[str] = []
    """One-line remarks to print at start."""
    quantization: str = "none"
    """Of the weights. With ``kv_dtype``, ``dtype`` and ``block_size`` it says what the bytes of a KV block mean."""
    kv_dtype: str = "auto"
    """Of the KV store; auto is ``dtype``."""
    explain: bool = True
    """Does every request keep the account of what it reused?"""
    max_num_mixed_tokens: int | None = None
    """Most tokens of a step while requests generate; None: as many as of any step."""


class Timing(msgspec.Struct, frozen=True):
    """Seconds of one finished request, by the engine's clock."""

    queue_s: float
    """Arrival to first admission."""
    prefill_s: float
    """First admission to first token."""
    decode_s: float
    """First to last token."""
    e2e_s: float


class Usage(msgspec.Struct, frozen=True):
    """prompt = computed + cached, for a request that consulted the cache."""

    n_prompt: int
    n_cached: int
    n_computed: int
    n_generated: int


class PrefixAccount(msgspec.Struct, frozen=True):
    """What one prompt reuses, and what the rest costs."""

    account: Account
    estimate_s: float | None = None
    """Seconds to compute the rest, alone, by recent steps; None before there were any."""


class Delta(msgspec.Struct, frozen=True):
    """What one step added to one request: an event for every token, ``text`` empty while a character or
    a possible stop string is held back; before those one without a token, if the prompt takes several steps,
    when the first was run. ``usage`` is set from the first one on; ``finish_reason``,
    ``stop_reason``, ``timing`` on the last delta only; ``error`` when the reason is ERROR."""

    request_id: RequestId
    token_ids: list[int]
    text: str
    usage: Usage | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_kind: str | None = None
    """"bad_request", "never_fits", "overloaded" or "internal": decides the HTTP status."""
    timing: Timing | None = None
    prefix_stop: str | None = None
    """The reason, one of the cache's enumeration, why the hit stopped where it did; on the first delta."""
    prefix: PrefixAccount | None = None
    """With it, the whole account, as the operator may see it: ``Account.seen_by`` before it is told to others."""


class EngineStats(msgspec.Struct, frozen=True):
    """Cumulative counters and current gauges, a snapshot after a step."""

    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    steps: list[tuple[float, float, float]] = []
    """Since the last snapshot, per step: (whole step seconds, model seconds, tokens computed)."""


class Outputs(msgspec.Struct, tag=True, frozen=True):
    """After a step (or a refusal): what each request got, with a snapshot taken after it was counted."""

    deltas: list[Delta]
    stats: EngineStats


class Loading(msgspec.Struct, tag=True, frozen=True):
    """Before Ready: what is being loaded, and how far that is (0 to 1)."""

    what: str
    fraction: float


class Ready(msgspec.Struct, tag=True, frozen=True):
    info: EngineInfo


class Reply(msgspec.Struct, frozen=True):
    """The answer to a Call."""

    call_id: int


class Refused(Reply, tag=True, frozen=True):
    """The call cannot be answered; ``error`` says why, ``error_kind`` as in Delta."""

    error: str
    error_kind: str


class ResetDone(Reply, tag=True, frozen=True):
    """Answer to ResetCache: done, or refused with the number of busy blocks."""

    done: bool
    n_busy: int
    n_cleared: int = 0
    n_preempted: int = 0


class Explained(Reply, tag=True, frozen=True):
    prefix: PrefixAccount


class PoolView(Reply, tag=True, frozen=True):
    """As cache/picture.py's PoolPicture."""

    cells: bytes
    groups: bytes
    queue: tuple[BlockId, ...]


class BlockView(Reply, tag=True, frozen=True):
    """As cache/picture.py's BlockPicture, which says what each field means."""

    block: BlockId
    state: str
    group: int
    refs: int
    holders: tuple[RequestId, ...]
    key: bytes | None
    namespace: bytes | None
    first_token: int | None
    tokens: tuple[int, ...]
    n_children: int
    n_copies: int
    hits: int
    idle_s: float | None
    queue_place: int | None
    path: tuple[BlockId, ...]


class TreeView(Reply, tag=True, frozen=True):
    """As cache/picture.py's Branches; the numbers as packed native int32. Empty until ``done``."""

    done: bool
    unit: int
    """Tokens of a node."""
    parents: bytes = b""
    starts: bytes = b""
    units: bytes = b""
    held: bytes = b""
    blocks: bytes = b""
    hits: bytes = b""
    keys: list[bytes] = []
    previews: list[bytes] = []
    salted: dict[int, bool] = {}
    adapters: dict[int, int] = {}
    n_left_out: int = 0


class Fatal(msgspec.Struct, tag=True, frozen=True):
    """The engine stops; nothing more will come."""

    message: str


FromEngine = Outputs | Loading | Ready | Refused | ResetDone | PoolView | BlockView | TreeView | Explained | Fatal
