"""The commands `headwater bench ...` that measure a server over HTTP."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headwater.cli import bench_load, bench_prefix, bench_report

AddCommand = Callable[[Any, str, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
"""Adds a command to others: where, its name, what it is about, what runs it, examples."""


def add_commands(kinds: Any, add: AddCommand) -> None:
    """Put them beside `headwater bench step`."""
    about = "measure what prefix caching buys on a server, ours or another, and whether the difference is real"
    bench_prefix.add_arguments(add(kinds, "prefix", about, bench_prefix.prefix, bench_prefix.EXAMPLES))
    about = "draw the report of one or several measurements, beside each other"
    bench_report.add_arguments(add(kinds, "report", about, bench_report.report, bench_report.EXAMPLES))
    about = "put a server under load: made-up conversations, herds, requests from a file, a recorded trace"
    bench_load.add_arguments(add(kinds, "load", about, bench_load.load, bench_load.EXAMPLES))
