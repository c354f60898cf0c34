"""A rank that has waited too long says at once for whom, and no process outlives the others."""

from __future__ import annotations

import signal
import subprocess
import threading
import time

import pytest
import torch.distributed as dist
from iqforge.runtime.parallel import launch
from iqforge.runtime.parallel import waits as waits_module
from iqforge.runtime.parallel.waits import Waits

TIMEOUT = 1.0  # seconds: a rank says after a quarter that it waits


def wait_until(true) -> None:
    limit = time.monotonic() + 30
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


def waiting(store, ranks, size) -> list[Waits]:
    """Return the waits of the first `ranks` of `size` ranks, which have all said so."""
    found = [Waits(store, rank, size, TIMEOUT) for rank in range(ranks)]
    for waits in found:
        waits.begin()
    wait_until(lambda: all_said(store, ranks))
    return found


def all_said(store, ranks) -> bool:
    return all(store.check([f"waits/{rank}"]) for rank in range(ranks))


def test_ranks_that_wait_are_not_missing():
    store = dist.HashStore()
    first, second = waiting(store, 2, 3)
    try:
        begun = time.monotonic()
        assert first.seconds > 0
        second.end()
        assert second.seconds == 0
        wait_until(lambda: not store.check(["waits/1"]))
        assert first.missing(lost=False) == ["1", "2"]
        assert time.monotonic() - begun < 3
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_rank_that_has_failed_is_not_named_by_others(monkeypatch, lost):
    monkeypatch.setattr(waits_module, "_GRACE", TIMEOUT)
    store = dist.HashStore()
    both = waiting(store, 2, 3)
    try:
        for waits in both:  # one after the other: the first has failed for longer than a wait
            assert waits.missing(lost=lost) == ["2"]
            waits.end()
            time.sleep(TIMEOUT)
    finally:
        for waits in both:
            waits.close()


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
