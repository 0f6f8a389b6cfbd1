"""The bytes of KV events. The golden ones were compared with vLLM 0.32's encoder and decoder when they were made:
`map_without_our_keys` is what it writes for these events, `legacy` what its array classes did, the same fields without
names."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from headwater.errors import EventsError
from headwater.events import wire
from headwater.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, decode, encode

GOLDEN = {
    name: bytes.fromhex(text)
    for name, text in json.loads((Path(__file__).parent / "golden_events.json").read_text()).items()
}
TIME = 1_700_000_000.5
KEYS = [bytes([i]) * 32 for i in range(1, 5)]


def events(*, ours: bool) -> list[wire.Event]:
    root, publisher = (b"N" * 32, b"P" * 8) if ours else (None, None)
    first = BlockStored(
        KEYS[:2], None, [1, 2, 3, 4, 70_000, 6, 7, 8], 4, None, "GPU", None, [["ab"], None], 0, "full_attention",
        None, root,
    )  # fmt: skip
    second = BlockStored(
        KEYS[2:3], KEYS[1], [9, 10, 11, 12], 4, None, "GPU", None, [None], 1, "sliding_window", 6, root
    )  # fmt: skip
    return [AllBlocksCleared(publisher), first, second, BlockRemoved(KEYS[:1], "GPU", 0)]


def test_golden_bytes() -> None:
    assert encode(TIME, events(ours=True), legacy=False) == GOLDEN["map"]
    assert encode(TIME, events(ours=False), legacy=False) == GOLDEN["map_without_our_keys"]
    for ours in (True, False):
        assert encode(TIME, events(ours=ours), legacy=True) == GOLDEN["legacy"]


def test_the_layouts_as_plain_msgpack() -> None:
    time_s, (cleared, first, second, removed), rank = msgspec.msgpack.decode(GOLDEN["map"])
    assert (time_s, rank) == (TIME, 0)
    assert cleared == {"type": "AllBlocksCleared", "publisher": b"P" * 8}
    assert first == {
        "type": "BlockStored",
        "block_hashes": KEYS[:2],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4, 70_000, 6, 7, 8],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["ab"], None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "namespace": b"N" * 32,
    }
    assert (second["parent_block_hash"], second["kv_cache_spec_sliding_window"]) == (KEYS[1], 6)
    assert removed == {"type": "BlockRemoved", "block_hashes": KEYS[:1], "medium": "GPU", "group_idx": 0}
    _, (cleared, first, second, removed), _ = msgspec.msgpack.decode(GOLDEN["legacy"])
    assert cleared == ["AllBlocksCleared"]
    tokens = [1, 2, 3, 4, 70_000, 6, 7, 8]
    assert first == [
        "BlockStored", KEYS[:2], None, tokens, 4, None, "GPU", None, [["ab"], None], 0, "full_attention", None,
    ]  # fmt: skip
    assert second[-2:] == ["sliding_window", 6]
    assert removed == ["BlockRemoved", KEYS[:1], "GPU", 0]


@pytest.mark.parametrize(("name", "ours"), [("map", True), ("map_without_our_keys", False), ("legacy", False)])
def test_both_layouts_are_read(name: str, ours: bool) -> None:
    message = decode(7, GOLDEN[name])
    assert (message.sequence, message.time_s, list(message.events)) == (7, TIME, events(ours=ours))
    assert message.publisher == (b"P" * 8 if ours else None)


def test_keys_that_later_versions_add_are_skipped() -> None:
    stored = {"type": "BlockRemoved", "block_hashes": KEYS[:1], "medium": "GPU", "group_idx": 2, "new": {"a": [1]}}
    message = decode(0, msgspec.msgpack.encode([TIME, [stored], 0, "more"]))
    assert list(message.events) == [BlockRemoved(KEYS[:1], "GPU", 2)]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"text",
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode([TIME]),
        msgspec.msgpack.encode([TIME, [7], 0]),
        msgspec.msgpack.encode([TIME, [{"type": "Unknown"}], 0]),
        msgspec.msgpack.encode([TIME, [["BlockStored", 1]], 0]),
        GOLDEN["map"][:-3],
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(EventsError, match="batch 3 is not one of KV events"):
        decode(3, payload)
