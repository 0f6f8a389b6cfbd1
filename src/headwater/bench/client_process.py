"""The process that sends the requests and reads the clock: ``python -m headwater.bench.client_process``.

One event loop and nothing else, so that what is measured is the server. Lines of JSON on stdin: first a Setup, then
an Order for every request, answered on stdout by a Done when its request ends, in any order. The end of stdin ends it.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec

from headwater.bench.client import Answer, Ask, Lag, make_client, send

READY = b"ready\n"
"""The first line on stdout: orders are carried out without delay from now on."""

LINE_BYTES = 1 << 28
"""The longest order: a prompt of some ten million tokens."""


class Setup(msgspec.Struct, frozen=True):
    """Whom to ask: the API's base address (…/v1), and headers for every request."""

    base_url: str
    headers: dict[str, str]


class Order(msgspec.Struct, frozen=True):
    order_id: int
    ask: Ask


class Done(msgspec.Struct, frozen=True):
    order_id: int
    answer: Answer


async def run() -> None:
    """Carry out orders until stdin ends; what still runs then is given up."""
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    setup = msgspec.json.decode(await reader.readline(), type=Setup)
    lag = Lag()
    working: set[asyncio.Task[None]] = {asyncio.create_task(lag.beat())}
    async with make_client(setup.base_url, setup.headers) as client:

        async def carry_out(order: Order) -> None:
            answer = await send(client, order.ask, lag)
            sys.stdout.buffer.write(msgspec.json.encode(Done(order.order_id, answer)) + b"\n")
            sys.stdout.buffer.flush()

        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        while line := await reader.readline():
            task = asyncio.create_task(carry_out(msgspec.json.decode(line, type=Order)))
            working.add(task)
            task.add_done_callback(working.discard)
        for task in working:
            task.cancel()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that gives the orders
    asyncio.run(run())


if __name__ == "__main__":
    main()
