"""What a load was asked for; kept in run.json."""

from __future__ import annotations

import msgspec

from headwater.errors import ConfigError

WORKLOADS = ("mix", "chat", "herd", "jsonl", "trace")
ARRIVALS = ("poisson", "fixed", "closed", "trace")
"""At random, at a fixed rate, whenever one of K users has an answer, or when a trace says."""

DEFAULT_URL = "http://127.0.0.1:8000"
CLOSED_USERS = 4

USED_BY = {
    "file": ("jsonl", "trace"),
    "clients": ("herd",),
    "herds": ("herd",),
    "conversations": ("mix", "chat"),
    "systems": ("mix",),
    "turns": ("mix", "chat"),
    "system_tokens": ("mix", "chat"),
    "prefix_tokens": ("herd",),
    "turn_tokens": ("mix", "chat", "herd"),
    "output": ("mix", "chat", "herd", "jsonl"),
    "length_scale": ("trace",),
    "time_scale": ("trace",),
    "skip_too_long": ("trace",),
    "requests": ("jsonl", "trace"),
}
"""Option -> the workloads that it changes. In another one it would be silently without effect, and is refused."""


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, sizes in tokens. ``seed`` None: prompts that no earlier run has sent."""

    workload: str
    file: str | None = None
    url: str = DEFAULT_URL
    served_model: str | None = None
    label: str | None = None
    arrival: str | None = None
    rate: float | None = None
    users: int | None = None
    requests: int | None = None
    duration_s: float | None = None
    conversations: int = 16
    systems: int = 4
    turns: int = 3
    system_tokens: int = 512
    turn_tokens: int = 64
    output: int = 64
    clients: int = 8
    herds: int = 5
    prefix_tokens: int = 2048
    length_scale: float = 1.0
    time_scale: float = 1.0
    skip_too_long: bool = False
    ttft_limit_s: float | None = None
    itl_limit_s: float | None = None
    stall_s: float = 300.0
    seed: int | None = None

    @property
    def how(self) -> str:
        """The kind of arrival: as asked, as a rate implies, or what suits the workload."""
        if self.arrival is not None:
            return self.arrival
        if self.rate is not None:
            return "poisson"
        return "trace" if self.workload == "trace" and self.users is None else "closed"

    @property
    def at_once(self) -> int:
        """Most requests at a time in a closed loop."""
        return self.users or (self.clients if self.workload == "herd" else CLOSED_USERS)

    def describe(self) -> str:
        """In a few words, for the report."""
        told = {"closed": f"{self.at_once} at a time", "trace": f"trace's times x {self.time_scale:g}"}
        how = told.get(self.how, f"{self.how} {self.rate or 0:g}/s")
        scale = f" x {self.length_scale:g}" if self.workload == "trace" and self.length_scale != 1 else ""
        return f"{self.workload}{scale}, {how}"

    def check(self, given: frozenset[str]) -> None:
        """Refuse at once what makes no sense. ``given``: the fields that the caller set. Raises ConfigError."""
        for name in sorted(given & USED_BY.keys()):
            if self.workload not in USED_BY[name]:
                flag = "FILE" if name == "file" else f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} changes nothing in {self.workload!r}: it is for {', '.join(USED_BY[name])}")
        if self.workload in USED_BY["file"] and self.file is None:
            raise ConfigError(f"{self.workload!r} needs a file: headwater bench load {self.workload} FILE")
        if self.how not in ARRIVALS:
            raise ConfigError(f"--arrival {self.how!r} is none of {', '.join(ARRIVALS)}")
        self._check_arrival()

    def _check_arrival(self) -> None:
        if self.how == "trace" and self.workload != "trace":
            raise ConfigError("--arrival trace needs the workload trace: nothing else has times of its own")
        if self.how in ("poisson", "fixed") and self.rate is None:
            raise ConfigError(f"--arrival {self.how} needs --rate, in requests per second")
        if self.how not in ("poisson", "fixed") and self.rate is not None:
            raise ConfigError(f"--rate is for --arrival poisson and fixed, not for {self.how}")
        if self.how != "closed" and self.users is not None:
            raise ConfigError(f"--users is for --arrival closed, not for {self.how}: open loads send whatever comes")
        if self.workload == "herd" and (self.how != "closed" or self.users is not None):
            raise ConfigError("a herd comes at once, one after the other: its size is --clients, and it has no arrival")
