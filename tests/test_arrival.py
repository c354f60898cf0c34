"""Processes of torchrun that wait for each other learn why one does not come."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist
from iqforge.errors import DeviceError, UsageError
from iqforge.runtime import start_ranks
from iqforge.runtime.parallel.arrival import await_all, shared_store, tell_failure
from iqforge.runtime.parallel.ranks import Ranks, named_ranks

from .ports import free_port


@pytest.fixture
def two(monkeypatch):
    """Two ranks of two hosts, as torchrun describes them; the first one has the store."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return Ranks(0, 2, 0, 1, port), Ranks(1, 2, 0, 1, port)


def test_ranks_are_named():
    assert named_ranks([1]) == "rank 1" and named_ranks("01") == "rank 0 and rank 1"
    assert named_ranks([0, 1, 3]) == "rank 0, rank 1 and rank 3"


def test_all_go_on_when_all_have_come():
    store, others = dist.HashStore(), [Ranks(rank, 3, rank, 3) for rank in range(3)]
    waiting = [threading.Thread(target=await_all, args=(store, one, 60)) for one in others[1:]]
    for one in waiting:
        one.start()
    await_all(store, others[0], 60)
    for one in waiting:
        one.join(60)
        assert not one.is_alive()


def test_those_that_do_not_come_are_named():
    with pytest.raises(
        DeviceError, match=r"rank 1 of 3 has waited 0 s for rank 0 and rank 2 to st"
    ):
        await_all(dist.HashStore(), Ranks(1, 3, 0, 1), 0.1)


def test_a_failure_ends_those_that_wait(two, monkeypatch):
    monkeypatch.setattr("iqforge.runtime.parallel.arrival._PATIENCE", 240)  # on a busy machine
    first, second = two
    store = shared_store(first, 240)
    telling = threading.Thread(target=tell_failure, args=(second, "cut.gguf: too short"))
    telling.start()
    with pytest.raises(DeviceError, match="^rank 1 of 2 has failed: cut.gguf: too short$"):
        await_all(store, first, 600)
    telling.join(240)
    assert not telling.is_alive()
    tell_failure(first, "another error")
    with pytest.raises(DeviceError, match="cut.gguf"):  # the first reason stays
        await_all(store, second, 60)


def test_a_failure_that_nobody_reads_is_no_other_error(monkeypatch, two):
    monkeypatch.setattr("iqforge.runtime.parallel.arrival._PATIENCE", 0.2)
    tell_failure(two[1], "nobody has the store")
    monkeypatch.delenv("MASTER_ADDR")
    tell_failure(two[1], "nobody can")
    with pytest.raises(UsageError, match="RANK and no MASTER_ADDR"):
        shared_store(two[0], 1)


@pytest.mark.parametrize(
    "ranks, joined, told",
    [
        (Ranks(1, 2, 0, 1), [], ["a reason"]),
        (Ranks(1, 2, 0, 1), ["a group"], []),
        (Ranks(1, 2, 1, 2, launched=True), [], []),
        (Ranks(0, 1, 0, 1), [], []),
        (None, [], []),
    ],
)
def test_who_tells(ranks, joined, told, monkeypatch):
    said = []
    monkeypatch.setattr(start_ranks.Ranks, "here", lambda: ranks)
    monkeypatch.setattr(start_ranks, "_joined", joined)
    monkeypatch.setattr(start_ranks, "tell_failure", lambda _, reason: said.append(reason))
    with pytest.raises(ValueError, match="a reason"), start_ranks.failures_told():
        raise ValueError("a reason")
    assert said == told
