"""The measuring process as its parent sees it: orders in, answers out."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from concurrent.futures import Future
from types import TracebackType

import msgspec

from headwater.bench.client import Answer, Ask
from headwater.bench.client_process import READY, Done, Order, Setup
from headwater.errors import BenchError

STOP_S = 5.0


class Clients:
    """Use as a context. ``base_url`` is the API's, such as http://127.0.0.1:8000/v1."""

    def __init__(self, base_url: str, headers: dict[str, str] | None = None) -> None:
        self._setup = Setup(base_url, headers or {})
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Answer]] = {}
        self._n_orders = 0

    def __enter__(self) -> Clients:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headwater.bench.client_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._write(msgspec.json.encode(self._setup))
        if self._process.stdout is None or self._process.stdout.readline() != READY:
            self._process.kill()
            raise BenchError("the measuring process did not start; its error is above")
        self._reader = threading.Thread(target=self._read, name="bench answers", daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it is gone already
                stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def submit(self, ask: Ask) -> Future[Answer]:
        """Send ``ask``, at its time. The future fails with BenchError only if the measuring process itself dies."""
        future: Future[Answer] = Future()
        with self._lock:
            order_id = self._n_orders
            self._n_orders += 1
            self._waiting[order_id] = future
        self._write(msgspec.json.encode(Order(order_id, ask)))
        return future

    def ask(self, ask: Ask) -> Answer:
        """Send ``ask`` and wait for its answer."""
        return self.submit(ask).result()

    def _write(self, line: bytes) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise BenchError("the measuring process has no stdin")
        try:
            with self._lock:
                stdin.write(line + b"\n")
                stdin.flush()
        except (BrokenPipeError, ValueError):
            raise BenchError("the measuring process is gone") from None

    def _read(self) -> None:
        stdout = self._process.stdout
        if stdout is not None:
            for line in stdout:
                done = msgspec.json.decode(line, type=Done)
                with self._lock:
                    future = self._waiting.pop(done.order_id)
                future.set_result(done.answer)
        with self._lock:
            left, self._waiting = list(self._waiting.values()), {}
        for future in left:
            future.set_exception(BenchError("the measuring process ended before the answer came"))
