"""Runs a command as long as its own stdin stays open: ``python -m headwater.bench.guard COMMAND...``.

A benchmark may be killed at any moment; the server that it started must not outlive it. The end of stdin, which
comes however the benchmark ends, stops the command and all that it started: politely first, then not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

STOP_S = 20.0
"""How long a server may take to stop by itself."""


def guard(command: list[str]) -> int:
    """Run ``command`` in a session of its own, until it ends or stdin does; returns its exit status."""
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror or error}", file=sys.stderr)
        return 127
    threading.Thread(target=_stop_with_stdin, args=(process,), daemon=True).start()
    status = process.wait()
    _signal_all(process.pid, signal.SIGKILL)  # children that the command left behind
    return status


def _stop_with_stdin(process: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    _signal_all(process.pid, signal.SIGTERM)
    end = time.monotonic() + STOP_S
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    _signal_all(process.pid, signal.SIGKILL)


def _signal_all(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already; or, on macOS, zombies only
        os.killpg(group, number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(guard(sys.argv[1:]))
