"""What is told of prompts: their text, or nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.cache.key import token_ids
from headwater.engine.messages import BlockView

Json = dict[str, Any]


@dataclass(frozen=True)
class Wording:
    """``text`` decodes token ids. With ``redact`` neither text nor token ids of prompts leave the server."""

    text: Callable[[Sequence[int]], str]
    redact: bool

    def preview(self, packed: bytes) -> str | None:
        """The text of tokens in little-endian uint32; None if it is not told."""
        if self.redact:
            return None
        return self.text(token_ids(packed))

    def block(self, view: BlockView) -> Json:
        """One block, for the page and for tools."""
        told: Json = {
            "block": view.block,
            "state": view.state,
            "group": view.group,
            "refs": view.refs,
            "requests": view.holders,
            "key": None if view.key is None else view.key.hex(),
            "namespace": None if view.namespace is None else view.namespace.hex(),
            "first_token": view.first_token,
            "n_tokens": len(view.tokens),
            "n_children": view.n_children,
            "n_copies": view.n_copies,
            "hits": view.hits,
            "idle_s": None if view.idle_s is None else round(view.idle_s, 1),
            "queue_place": view.queue_place,
            "path": view.path,
            "redacted": self.redact,
        }
        if not self.redact:
            told["token_ids"] = view.tokens
            told["token_texts"] = [self.text([token]) for token in view.tokens]
            told["text"] = self.text(view.tokens)
        return told

    def account(self, account: Json) -> Json:
        """An account without the tokens around the difference, if they are not told."""
        difference = account.get("difference")
        if not self.redact or difference is None:
            return account
        kept = {name: difference[name] for name in ("at_token", "message") if name in difference}
        return account | {"difference": kept | {"redacted": True}}
