"""A rank that has waited too long says at once for whom, and no process outlives the others."""

from __future__ import annotations

import signal
import subprocess
import threading
import time

import torch.distributed as dist
from iqforge.runtime.parallel import launch
from iqforge.runtime.parallel.waits import Waits

TIMEOUT = 1.0  # seconds: a rank says after a quarter that it waits


def wait_until(true) -> None:
    limit = time.monotonic() + 30
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_ranks_that_wait_are_not_missing():
    store = dist.HashStore()
    first, second = (Waits(store, rank, 3, TIMEOUT) for rank in range(2))
    try:
        first.begin()
        second.begin()
        wait_until(lambda: store.check(["waits/0"]) and store.check(["waits/1"]))
        begun = time.monotonic()
        assert first.missing(lost=False) == ["2"]
        assert time.monotonic() - begun < 1
        assert second.end() > 0
        wait_until(lambda: not store.check(["waits/1"]))
        assert first.missing(lost=False) == ["1", "2"]
    finally:
        first.close()
        second.close()


def test_a_short_call_is_not_told():
    store = dist.HashStore()
    waits = Waits(store, 0, 2, TIMEOUT)
    try:
        for _ in range(20):
            waits.begin()
            time.sleep(0.03)
            waits.end()
        assert not store.check(["waits/0"])
    finally:
        waits.close()


def test_a_store_that_does_not_answer_is_that_of_rank_0():
    released = threading.Event()

    class Hung:
        def set(self, key, value):
            released.wait(60)
            raise RuntimeError("the connection has ended")

    for rank, missing in ((0, []), (1, ["0"])):
        waits, begun = Waits(Hung(), rank, 2, TIMEOUT), time.monotonic()
        assert waits.missing(lost=False) == missing
        assert time.monotonic() - begun < 3
        waits.close()
    released.set()


def test_a_stopped_process_ends_at_once():
    process = subprocess.Popen(["sleep", "99"])
    process.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    launch._end([process])
    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - begun < launch._PATIENCE
