"""The experts of all layers of a step, on the CPU while a GPU evaluates everything else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from ...cuda_kernels.step.offload import TIMEOUT, Exchange
from ...errors import DeviceError
from ..simd.operations import compile_together, operation, rehearsed
from ..simd.step.exchange import send_reply, take_request
from ..simd.threads import Program, run
from ..state.cache import CacheSettings
from .memory import Buffer
from .offloaded import OffloadedExperts
from .plan import Plan

PATIENCE = 50_000  # polls of the threads between two tokens: some milliseconds
# Seconds without a request, before the device is given up: in a step of one GPU, and while kernels
# of one are loaded or compiled (`release` ends that).
MOST_SECONDS, ENDLESS = 30.0, 1e9
# Held from the launch of a step until its experts are answered for. Without it, two models in two
# threads could wait for each other: one for the threads of the CPU, one for the stream of the GPU.
TURN = threading.Lock()


class OffloadedSteps:
    """One program per number of rows, which answers the requests of the layers of a step in order.
    It runs while the step runs on the GPU. NotPlanned if a layer cannot be planned.

    layers: the experts of each layer, and what it shares with the device. most: the seconds without
    a request before the device is given up.
    """

    def __init__(
        self, layers: Sequence[tuple[OffloadedExperts, Exchange]], most: float = MOST_SECONDS
    ):
        self._layers, self._most = layers, most
        # The first is not 0 while nobody is to wait for a request: 1 after `release`, 2 if none
        # came after as many nanoseconds as the second.
        self._stop = np.array([0, 0], dtype=np.int64)
        self._is_open = False  # a step was launched, and has not ended as it should
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

    @contextmanager
    def turn(self, wait: Callable[[], None]) -> Iterator[None]:
        """While the context is open, a step is launched and answered, and no other one. If it ends
        with an exception, whatever it is, the device goes on without answers. wait: for all that
        was launched.
        """
        with TURN:
            if self._is_open:  # giving up was interrupted
                self._give_up(wait)
            self._is_open = True
            try:
                yield
            except BaseException:
                self._give_up(wait)
                raise
            self._is_open = False

    def run(self, n: int, n_threads: int, most: float | None = None) -> None:
        """Answer all layers of a step of n rows. DeviceError if the device has not asked for `most`
        seconds, or if it has waited for too long.
        """
        most = self._most if most is None else most
        self._stop[1] = int(most * 1e9)
        run(self._program(n, n_threads), n_threads)
        if any(int(exchange.failed) for _, exchange in self._layers):
            raise DeviceError(
                f"the GPU got no answer for the experts of a step within {TIMEOUT} seconds; was the"
                " program suspended?"
            )
        if self._stop[0] == 2:
            raise DeviceError(f"the GPU has not asked for the experts of a step in {most:g} s")

    def release(self) -> None:
        """Let a program that waits for requests end: nobody will ask."""
        self._stop[0] = 1

    def _give_up(self, wait: Callable[[], None]) -> None:
        """Let the device end its step without answers. No program runs."""
        exchanges = [exchange for _, exchange in self._layers]
        for exchange in exchanges:
            exchange.abandon()
        wait()
        for exchange in exchanges:
            exchange.settle()
            self._last[id(exchange)][0] = int(exchange.request)
        self._stop[0] = 0
        self._is_open = False

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
