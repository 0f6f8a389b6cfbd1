"""Who sent what content: remembered so that the text of one caller's prompts is not shown to another.

Only when callers are told apart (API keys): without senders nothing here runs, and all nodes share one empty set.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.cache.block import Node

MAX_SENDERS = 16
"""Senders that one node remembers; a further one may not see its text as the other side of a difference."""

MAX_KNOWN_SETS = 4096
"""Sets that are kept to be shared by the nodes to come."""


class Senders:
    """Writes senders to nodes. Equal sets are one object, as far as ``MAX_KNOWN_SETS`` goes: a node then costs no more
    than the eight bytes of a reference."""

    def __init__(self) -> None:
        self._sets: dict[frozenset[str], frozenset[str]] = {}

    def note(self, path: Sequence[Node], sender: str) -> None:
        """``sender`` sent the content of ``path``, which begins at the first unit or after one that was noted.

        Whoever sent a node has sent all that leads to it, so the walk ends at the first that knows the sender.
        """
        for node in reversed(path):
            if sender in node.senders:
                return
            if len(node.senders) < MAX_SENDERS:
                node.senders = self._shared(node.senders | {sender})

    def _shared(self, senders: frozenset[str]) -> frozenset[str]:
        if len(self._sets) >= MAX_KNOWN_SETS:
            self._sets.clear()
        return self._sets.setdefault(senders, senders)
