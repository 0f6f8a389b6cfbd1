"""``headwater events``: a server's KV events as JSON lines, for people to look at."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator

import zmq

from headwater.cli.numbers import number
from headwater.config import EventsConfig
from headwater.events.client import Context, LiveClient, ReplayClient
from headwater.events.wire import BlockRemoved, BlockStored, Event, Message

EXAMPLES = """examples:
  headwater serve --kv-events            in another terminal
  headwater events                       every event as it comes, until Ctrl-C
  headwater events --snapshot            what the cache holds now
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    here = EventsConfig()
    parser.add_argument(
        "--endpoint", default=here.endpoint, metavar="ADDRESS", help="the server's stream (%(default)s)"
    )
    parser.add_argument(
        "--replay-endpoint",
        default=here.replay_endpoint,
        metavar="ADDRESS",
        help="where it answers requests (%(default)s)",
    )
    parser.add_argument("--topic", default=here.topic, metavar="TEXT", help="only topics that begin so; default: all")
    parser.add_argument("--snapshot", action="store_true", help="print what the cache holds now, and stop")
    parser.add_argument(
        "--timeout", type=number(0.001, 86_400), default=10.0, metavar="S", help="seconds to wait for an answer (10)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print until Ctrl-C, or until the snapshot is told. EventsError if the server does not answer."""
    context: Context = zmq.Context()
    try:
        if arguments.snapshot:
            replay = ReplayClient(context, arguments.replay_endpoint, timeout_s=arguments.timeout)
            show(iter(replay.snapshot()))
        else:
            show(_heard(LiveClient(context, arguments.endpoint, topic=arguments.topic), arguments.endpoint))
    except BrokenPipeError:  # `headwater events | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        context.destroy(linger=0)
    return 0


def _heard(live: LiveClient, endpoint: str) -> Iterator[Message]:
    """The stream; what is missing of it is told on stderr."""
    print(f"listening on {endpoint}", file=sys.stderr)
    expected: int | None = None
    while True:
        if not live.wait(0.2):  # a short wait, so that Ctrl-C is heard
            continue
        message = live.receive()
        if expected is not None and message.sequence != expected:
            print(f"batch {expected} was to come, {message.sequence} came", file=sys.stderr)
        expected = message.sequence + 1
        yield message


def show(messages: Iterator[Message]) -> None:
    """One line for each event."""
    for message in messages:
        for event in message.events:
            print(json.dumps(line(message, event)))
        sys.stdout.flush()


def line(message: Message, event: Event) -> dict[str, object]:
    """What is printed of one event; keys in hexadecimal."""
    told: dict[str, object] = {"sequence": message.sequence, "time": round(message.time_s, 3)}
    if message.publisher is not None:
        told["publisher"] = message.publisher.hex()
    told["event"] = type(event).__name__
    if isinstance(event, BlockStored | BlockRemoved):
        told |= {"group": event.group_idx, "keys": [key.hex() for key in event.block_hashes]}
    if isinstance(event, BlockStored):
        told |= {
            "parent": None if event.parent_block_hash is None else event.parent_block_hash.hex(),
            "block_size": event.block_size,
            "token_ids": event.token_ids,
            "namespace": None if event.namespace is None else event.namespace.hex(),
            "extra_keys": event.extra_keys,
            "kind": event.kv_cache_spec_kind,
            "window": event.kv_cache_spec_sliding_window,
        }
    return told
