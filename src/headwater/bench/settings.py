"""What a prefix sweep was asked for; kept in run.json, so that it can be resumed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import msgspec

from headwater.bench.plan import CACHING, INTERFERENCE, OUTPUTS, PREFIXES, QUESTION_TOKENS, REPEATS, Plan, Start
from headwater.bench.server import PLACEHOLDER, api_base, fill
from headwater.config import ModelConfig
from headwater.errors import ConfigError

QUICK_S = 160.0
"""What a quick sweep may take from its first moment; three minutes with what comes after, a report and a slow stop."""

NEEDED = {
    "caching": ({"caching_flags", "caching"}, "--caching on"),
    "interference": ({"pool_flags", "num_blocks", "pool_tokens", "interference"}, "--interference none"),
}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """``url`` (a server that runs), ``start_command`` (one to be started), or neither: Headwater's own."""

    url: str | None = None
    start_command: str | None = None
    model: str | None = None
    serve_args: str = ""
    caching_on_flags: str = "--enable-prefix-caching"
    caching_off_flags: str = "--no-enable-prefix-caching"
    pool_flags: str = "--num-blocks {num_blocks}"
    served_model: str | None = None
    api_path: str = "/v1"
    """Where a started server has its API."""
    prefixes: tuple[int, ...] = PREFIXES
    outputs: tuple[int, ...] = OUTPUTS
    caching: tuple[str, ...] | None = None
    interference: tuple[str, ...] | None = None
    repeats: int = REPEATS
    seed: int = 0
    quick: bool = False
    evicting_blocks: int | None = None
    block_size: int = 16
    label: str | None = None
    stall_s: float = 300.0
    start_limit_s: float = 600.0

    def check(self) -> None:
        """Refuse at once what could only fail later. Raises ConfigError."""
        if self.url is not None and self.start_command is not None:
            raise ConfigError("--url is for a server that runs, --start-command starts one: give one of them")
        if self.url is not None:
            self._check_url(self.url)
        if self.url is not None or self.start_command is not None:
            which = "--url" if self.url is not None else "--start-command"
            if self.model is not None or self.serve_args:
                raise ConfigError(f"MODEL and --serve-args are for Headwater's own server, not for one by {which}")
        needed = max(self.prefixes) + QUESTION_TOKENS + max(self.outputs)
        if self.evicting_blocks is not None and self.evicting_blocks * self.block_size < needed:
            raise ConfigError(
                f"--evicting-blocks {self.evicting_blocks} of {self.block_size} tokens hold "
                f"{self.evicting_blocks * self.block_size} tokens, and the longest request has {needed}: "
                f"give at least {-(-needed // self.block_size)}, or shorter --prefixes"
            )
        if self.start_command is not None:
            self._check_template(self.start_command)

    def _check_url(self, url: str) -> None:
        api_base(url)
        if self.caching is not None:
            raise ConfigError(
                "--caching needs a server that can be started anew: use --start-command instead of --url; "
                "what is on at --url is found out"
            )

    def _check_template(self, template: str) -> None:
        fill(template, {})
        named = set(PLACEHOLDER.findall(template))
        if "port" not in named:
            raise ConfigError(
                "--start-command must say {port} where the port goes: each start takes a free one, as in "
                "'vllm serve MODEL --port {port} {caching_flags} {pool_flags}'"
            )
        for what, asked, least in (("caching", self.starts_caching, 2), ("interference", self.starts_interference, 2)):
            placeholders, instead = NEEDED[what]
            if len(asked) >= least and not named & placeholders:
                one_of = " or ".join(f"{{{name}}}" for name in sorted(placeholders))
                raise ConfigError(
                    f"--start-command says nothing of {what}, which is to be {' and '.join(asked)}: put {one_of} "
                    f"into it, or measure one kind with {instead}"
                )

    @property
    def starts_caching(self) -> tuple[str, ...]:
        return self.caching or (("on",) if self.url is not None else CACHING)

    @property
    def starts_interference(self) -> tuple[str, ...]:
        return self.interference or (("none",) if self.url is not None else INTERFERENCE)

    def plan(self) -> Plan:
        """The sweep. Interference comes first: its small pool is what does not fit, if anything does not.

        A quick one leaves out caching off with interference, where there is nothing to evict. Interference is its last,
        when it is known for which prefixes there is time, and so how small the pool can be.
        """
        starts = [
            Start(caching, interference)
            for interference in sorted(self.starts_interference, reverse=self.quick)
            for caching in self.starts_caching
            if not (self.quick and caching == "off" and interference == "evicting" and self.interference is None)
        ]
        return Plan(
            prefixes=self.prefixes,
            outputs=self.outputs,
            starts=tuple(starts),
            repeats=self.repeats,
            seed=self.seed,
        )

    def pool_blocks(self, plan: Plan) -> int:
        """Blocks of the pool where interference is to evict."""
        return self.evicting_blocks or plan.pool_blocks(self.block_size)

    def command(self, start: Start, port: int, plan: Plan) -> list[str]:
        """The command that starts the server for ``start``."""
        n_blocks = self.pool_blocks(plan)
        # vLLM keeps one block for itself, and refuses a context that fills them all.
        pool = {"num_blocks": str(n_blocks), "pool_tokens": str((n_blocks - 1) * self.block_size)}
        evicting = start.interference == "evicting"
        values = {
            "port": str(port),
            "caching": start.caching,
            "interference": start.interference,
            "caching_flags": self.caching_on_flags if start.caching == "on" else self.caching_off_flags,
            "pool_flags": shlex.join(fill(self.pool_flags, pool)) if evicting and self.pool_flags.strip() else "",
            **(pool if evicting else {}),
        }
        return fill(self.start_command or self._own_command(), values)

    def _own_command(self) -> str:
        model = shlex.quote(self.model or ModelConfig().model)
        own = (
            f"{shlex.quote(sys.executable)} -m headwater serve {model} --port {{port}} {{caching_flags}} {{pool_flags}}"
        )
        return f"{own} {self.serve_args.replace('{', '').replace('}', '')}"

    def describe(self) -> str:
        """Whom is measured, for a label that was not given."""
        if self.url is not None:
            return self.url
        if self.start_command is not None:
            words = [word for word in shlex.split(self.start_command) if word != "env" and "=" not in word]
            return Path(words[0]).name if words else "server"
        return "headwater"
