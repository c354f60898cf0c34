"""A rank that has waited too long says at once for whom, and no process outlives the others."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from iqforge.runtime.parallel import launch
from iqforge.runtime.parallel import waits as waits_module
from iqforge.runtime.parallel.waits import Waits

TIMEOUT = 1.0  # seconds: a rank says after a quarter that it waits


def wait_until(true) -> None:
    limit = time.monotonic() + 240
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


@pytest.fixture
def patient(monkeypatch):
    """Give the store time to answer, however busy the machine is."""
    monkeypatch.setattr(waits_module, "_ANSWER", 240)


def test_ranks_that_wait_are_not_missing(patient, monkeypatch):
    """Where no connection has ended, nobody has to be given time to notice."""
    monkeypatch.setattr(waits_module, "_GRACE", 600)
    store = dist.HashStore()
    first, second = waiting(store, 2, 3)
    try:
        assert first.seconds > 0
        second.end()
        assert second.seconds == 0
        wait_until(lambda: not store.check(["waits/1"]))
        assert first.missing(lost=False) == ["1", "2"]
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_rank_that_has_failed_is_not_named_by_others(patient, monkeypatch, lost):
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


def test_a_short_call_is_not_told(monkeypatch):
    now = 0.0
    monkeypatch.setattr(waits_module, "time", SimpleNamespace(monotonic=lambda: now))
    store = dist.HashStore()
    waits = Waits(store, 0, 2, TIMEOUT)
    waits.close()  # its thread asks the same now and then
    for _ in range(20):  # longer than a rank waits before it says so, but not at a stretch
        waits.begin()
        now += 0.03
        assert waits.tell(0) == 0
        waits.end()
    assert not all_said(store, 1)
    waits.begin()
    now += TIMEOUT
    said = waits.tell(0)
    assert said and all_said(store, 1)
    waits.end()
    waits.begin()
    assert waits.tell(said) == 0 and not all_said(store, 1), "another call is another wait"


def test_a_store_that_does_not_answer_is_that_of_rank_0():
    released, answered = threading.Event(), []

    class Hung:
        def set(self, key, value):
            released.wait(240)
            answered.append(key)
            raise RuntimeError("the connection has ended")

    for rank, missing in ((0, []), (1, ["0"])):
        waits = Waits(Hung(), rank, 2, TIMEOUT)
        assert waits.missing(lost=False) == missing
        assert not answered, "nobody waits for it"
        waits.close()
    released.set()


def test_a_stopped_process_ends_at_once(monkeypatch):
    monkeypatch.setattr(launch, "_PATIENCE", 240)  # before it would be killed
    process = subprocess.Popen(["sleep", "999"])
    process.send_signal(signal.SIGSTOP)
    launch._end([process])
    assert process.returncode == -signal.SIGTERM
