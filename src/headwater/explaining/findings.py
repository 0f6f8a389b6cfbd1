"""What the lint can find, how it is told, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from headwater.explaining.log import BadLine


class Kind(str, Enum):
    """What breaks a common beginning."""

    TIME = "time"
    ID = "id"
    COUNTER = "counter"
    TOOL_ORDER = "tool_order"
    TOOL_KEYS = "tool_keys"
    JSON = "json"
    TEMPLATE_HISTORY = "template_history"
    CLIENT_HISTORY = "client_history"
    HISTORY_CUT = "history_cut"
    SYSTEM_CHANGES = "system_changes"
    TOOLS_CHANGE = "tools_change"
    JOINED = "joined"


TITLES = {
    Kind.TIME: "a time or date that changes",
    Kind.ID: "an id or hash that changes",
    Kind.COUNTER: "a counter or number that changes",
    Kind.TOOL_ORDER: "the same tools in changing order",
    Kind.TOOL_KEYS: "the same tools with JSON keys in changing order",
    Kind.JSON: "the same JSON with changing key order or spaces",
    Kind.TEMPLATE_HISTORY: "the chat template rewrites the history",
    Kind.CLIENT_HISTORY: "the client sends the history changed",
    Kind.HISTORY_CUT: "the client cuts the beginning of the history off",
    Kind.SYSTEM_CHANGES: "the system prompt changes between turns of a conversation",
    Kind.TOOLS_CHANGE: "the list of tools changes between turns of a conversation",
    Kind.JOINED: "text is tokenised differently once more follows",
}

ADVICE = {
    Kind.TIME: "Move it behind what stays the same, best into the last user message; or round it to the day.",
    Kind.ID: "Leave it out of the prompt (send it as metadata), or move it into the last user message.",
    Kind.COUNTER: "Move it behind what stays the same, best into the last user message.",
    Kind.TOOL_ORDER: "Sort the list of tools by name before every request.",
    Kind.TOOL_KEYS: "Write the tools with sorted keys, or keep one serialised list and send it unchanged.",
    Kind.JSON: "Serialise it in one way: sorted keys, fixed separators, no changing indentation.",
    Kind.TEMPLATE_HISTORY: "Send messages as the template keeps them (without reasoning, without spaces at the "
    "ends), or use a template that leaves the history as it was.",
    Kind.CLIENT_HISTORY: "Send earlier messages back exactly as they were sent and received; only append.",
    Kind.HISTORY_CUT: "Cut seldom and much, such as half of the history at once: the turns until the next cut then "
    "share what is left.",
    Kind.SYSTEM_CHANGES: "Keep the system prompt as it was in the first turn; put what is new into a later message.",
    Kind.TOOLS_CHANGE: "Send all tools from the first turn on, in one order.",
    Kind.JOINED: "Let no message begin or end with spaces or line breaks: strip answers before they are sent back.",
}


@dataclass(frozen=True, slots=True)
class Example:
    """One request that lost tokens, ``where``, beside an earlier one that it could have shared them with, ``other``.

    ``message`` and ``role`` are None, and ``character`` counts in the whole rendered text, where the place is in the
    template's own text (tools are), else it counts in the message. ``before`` is the same in both; ``ours`` and
    ``theirs`` follow it.
    """

    where: str
    other: str
    message: int | None
    role: str | None
    character: int
    before: str
    ours: str
    theirs: str


@dataclass(slots=True)
class Finding:
    """One breaker. ``n_lost_tokens`` is summed over the requests: what each could have reused had the breaker not
    been there (of several breakers in one request, had those before it been repaired)."""

    kind: Kind
    detail: str
    example: Example
    largest_loss: int
    losses: dict[int, int] = field(default_factory=dict)
    context: str | None = None
    """The masked text right before it; None where its place is not in the text."""

    @property
    def n_requests(self) -> int:
        return len(self.losses)

    @property
    def n_lost_tokens(self) -> int:
        return sum(self.losses.values())

    @property
    def n_lost_per_request(self) -> float:
        return self.n_lost_tokens / len(self.losses)

    @property
    def title(self) -> str:
        return TITLES[self.kind]

    @property
    def advice(self) -> str:
        return ADVICE[self.kind]


@dataclass(frozen=True, slots=True)
class Report:
    """Findings with the most costly first. Of ``n_tokens`` prompt tokens, ``n_shared`` began an earlier prompt."""

    n_requests: int
    n_tokens: int
    n_shared: int
    findings: list[Finding]
    bad: list[BadLine]

    @property
    def n_lost_tokens(self) -> int:
        """Each request's largest loss, summed: breakers of one request do not add up."""
        losses: dict[int, int] = {}
        for finding in self.findings:
            for request, lost in finding.losses.items():
                losses[request] = max(lost, losses.get(request, 0))
        return sum(losses.values())
