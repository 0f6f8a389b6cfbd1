"""The front's threads beside the engine's."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from headwater.serve.front import NICENESS, give_way


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_work_on_text_gives_way_and_nothing_else_does() -> None:
    before = niceness()
    with ThreadPoolExecutor(1, "text", give_way) as pool:
        assert pool.submit(niceness).result() == NICENESS
    assert niceness() == before
