"""Experts that are on the CPU beside a device that is the CPU, too: what `step_on_cpu` and
`prompt_on_cpu` do not replace.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from iqforge.cuda_kernels.step.offload import Exchange
from iqforge.runtime.cpu.offloaded_steps import TURN, OffloadedSteps
from iqforge.runtime.cuda.common.registry import PROMPT, STEP
from iqforge.runtime.cuda.prompt import locked, offloaded
from iqforge.runtime.cuda.step import dense_and_experts
from iqforge.runtime.cuda.step import offloaded as step_offloaded
from iqforge.runtime.cuda.step.offloaded import StepOffloadedMoE
from iqforge.runtime.layers.moe import MoE
from iqforge.runtime.weights.store import TensorStore

from . import prompt_on_cpu
from .step_graphs_on_cpu import Graph, kernel
from .step_rows_on_cpu import normed

_MATRICES = TensorStore.matrices  # before it is replaced


@kernel
def _hand_over(exchange, h, norm, eps, ids, weights):
    n = len(h)
    exchange.x[:n] = normed(h, norm, eps)
    exchange.chosen[:n] = ids
    exchange.shares[:n] = torch.where(ids < 0, 0, weights)
    exchange.number += 1
    exchange.request.copy_(exchange.number)


@kernel
def _take_back(exchange, to):
    until = time.monotonic() + 240
    while 0 <= int(exchange.reply) < int(exchange.number):
        assert time.monotonic() < until
        time.sleep(0)
    to += exchange.y[: len(to)]


class Device:
    """Graphs that run beside the host, as on a device. `others`: graphs to which nobody answers run
    at once.
    """

    def __init__(self, monkeypatch, others: bool = False):
        self.n_replays, self.seconds = 0, 0.0  # that were waited for a graph after its answers
        self._graphs: list[threading.Thread] = []
        real, answer, give_up = Graph.replay, OffloadedSteps.run, OffloadedSteps._give_up

        def replay(graph):
            if others and not TURN.locked():
                real(graph)
                return
            assert TURN.locked()  # no step of another thread comes between it and its answers
            self.n_replays += 1
            self._graphs.append(threading.Thread(target=real, args=(graph,)))
            self._graphs[-1].start()

        def run(steps, *arguments):
            answer(steps, *arguments)
            self._wait()

        monkeypatch.setattr(Graph, "replay", replay)
        monkeypatch.setattr(OffloadedSteps, "run", run)
        monkeypatch.setattr(OffloadedSteps, "_give_up", lambda steps, _: give_up(steps, self._wait))
        monkeypatch.setattr(Exchange, "hand_over", _hand_over)
        monkeypatch.setattr(Exchange, "take_back", _take_back)
        monkeypatch.setitem(STEP, MoE, StepOffloadedMoE)
        for module in (dense_and_experts, step_offloaded):
            monkeypatch.setattr(module, "on_cpu", lambda moe, context: True)

    def _wait(self):
        begun = time.monotonic()
        while self._graphs:
            self._graphs.pop().join()
        self.seconds = max(self.seconds, time.monotonic() - begun)


class Driver:
    """What of the host's memory is page-locked. refuses: nothing can be."""

    def __init__(self, monkeypatch, refuses: bool = False):
        self.locked: dict[int, int] = {}
        self.refuses = refuses
        monkeypatch.setattr(locked, "_lock", self.lock)
        monkeypatch.setattr(locked, "_unlock", self.unlock)

    def lock(self, device, array):
        if self.refuses:
            return "CUDA_ERROR_OUT_OF_MEMORY"
        assert array.ctypes.data not in self.locked
        self.locked[array.ctypes.data] = array.nbytes
        return ""

    def unlock(self, device, array):
        assert self.locked.pop(array.ctypes.data) == array.nbytes


def install_copies(monkeypatch) -> None:
    """Models that are opened from now on have experts alone as matrices of the CPU, and prompts
    copy them.
    """
    prompt_on_cpu.install(monkeypatch)
    resident = TensorStore.matrices

    def matrices(store, tensors, n):
        of_experts = "_exps" in tensors[0].name
        return (_MATRICES if of_experts else resident)(store, tensors, n)

    monkeypatch.setattr(TensorStore, "matrices", matrices)
    stream = SimpleNamespace(
        wait_event=lambda event: None,
        wait_stream=lambda other: None,
        record_event=lambda event=None: SimpleNamespace(synchronize=lambda: None),
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(offloaded, "on_cpu", lambda moe, context: True)
    monkeypatch.setitem(PROMPT, MoE, offloaded.prompt_moe)
