"""The experts of all layers of a step, on the CPU while a GPU evaluates everything else."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from ...cuda_kernels.step_offload import Exchange
from ...errors import DeviceError
from ..simd.operations import compile_together, operation, rehearsed
from ..simd.step.exchange import send_reply, take_request
from ..simd.threads import Program, run
from ..state.cache import CacheSettings
from .memory import Buffer
from .offloaded import OffloadedExperts
from .plan import Plan

PATIENCE = 50_000  # polls of the threads between two tokens: some milliseconds
# Polls for a request, before the device is given up: half a minute or more; hours.
MOST_POLLS, ENDLESS = 1 << 26, 1 << 40
# Held from the launch of a step until its experts are answered for. Without it, two models in two
# threads could wait for each other: one for the threads of the CPU, one for the stream of the GPU.
TURN = threading.Lock()


class OffloadedSteps:
    """One program per number of rows, which answers the requests of the layers of a step in order.
    It runs while the step runs on the GPU. NotPlanned if a layer cannot be planned.

    layers: the experts of each layer, and what it shares with the device.
    """

    def __init__(self, layers: Sequence[tuple[OffloadedExperts, Exchange]]):
        self._layers = layers
        # The first is not 0 while nobody is to wait for a request: 1 after `release`, 2 if none
        # came after as many polls as the second.
        self._stop = np.array([0, ENDLESS], dtype=np.int64)
        self._last = {id(exchange): np.zeros(1, dtype=np.int64) for _, exchange in layers}
        self._programs: dict[int, tuple[tuple[int, int], Program, Plan]] = {}
        with rehearsed() as wanted:
            self._plan(1, torch.get_num_threads())
        compile_together(wanted)

    def prepare(self, n: int, n_threads: int) -> None:
        """Plan the program of a step of n rows, before the step is launched: the device would wait
        in vain if planning failed later. NotPlanned if a layer cannot be planned.
        """
        self._program(n, n_threads)

    def run(self, n: int, n_threads: int, most: int = MOST_POLLS) -> None:
        """Answer all layers of a step of n rows. DeviceError if the device does not ask; most: how
        often this looks for a request.
        """
        self._stop[1] = most
        run(self._program(n, n_threads), n_threads)
        if self._stop[0] == 2:
            raise DeviceError("the GPU has not asked for the experts of a step")

    def release(self) -> None:
        """Let a program that waits for requests end: nobody will ask."""
        self._stop[0] = 1

    def begin(self) -> None:
        """Wait for requests again."""
        self._stop[0] = 0

    def _program(self, n: int, n_threads: int) -> Program:
        key = n_threads, sum(experts.store.n_changes for experts, _ in self._layers)
        if n not in self._programs or self._programs[n][0] != key:
            plan = self._plan(n, n_threads)
            program = plan.program()
            program.patience = PATIENCE
            self._programs[n] = key, program, plan  # the plan owns memory
        return self._programs[n][1]

    def _plan(self, n: int, n_threads: int) -> Plan:
        plan = Plan(n_threads, CacheSettings(), 0, rounds=self._layers[0][0].rounds)
        for experts, exchange in self._layers:
            last = self._last[id(exchange)].ctypes.data
            plan.add(
                operation(take_request),
                *(exchange.request.data_ptr(), last, self._stop.ctypes.data),
            )
            for row in range(n):
                x, shares, y = (
                    Buffer(part[row].data_ptr())
                    for part in (exchange.x, exchange.shares, exchange.y)
                )
                experts.add(plan, x, Buffer(exchange.chosen[row].data_ptr()), shares, y)
            plan.add(operation(send_reply), exchange.reply.data_ptr(), last, meet=False)
        return plan
