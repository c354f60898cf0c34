"""Programs: operations one after the other, run by several threads without Python between them.

The threads meet after every operation, unless the program says otherwise. Between programs they
wait by polling for a moment, as the next token follows soon, and then in the operating system.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ...formats.kernel import CompiledLoop, inlined_function
from .operations import SIGNATURE
from .vectors import integer_at, store_integer
from .vectors.core import INT64, NONE, function, pointer
from .waiting import atomic_add, atomic_load, atomic_store, give_way, pause

# Places in the memory that the threads share, in bytes; each in a cache line of its own.
GENERATION, PROGRAM, LENGTH, BASE, PATIENCE, LED, ARRIVED = 0, 64, 72, 80, 88, 96, 128
CONTROL_BYTES = 192
POLLS = 4000  # between programs, before a thread sleeps: about 100 us
SPINS = 200  # before a thread gives its processor away

_VOID = ir.VoidType()


@function(types.none, types.int64, types.int64, types.int64, types.int64)
def _invoke(builder, function, arguments, thread, threads):
    """Call the operation at an address."""
    type = ir.FunctionType(_VOID, [INT64] * len(SIGNATURE.args))
    builder.call(pointer(builder, function, type), [arguments, thread, threads])
    return NONE


@inlined_function
def _run(control, thread, threads):
    """Run the program, meeting the other threads after operations that say so."""
    program, length = integer_at(control + PROGRAM), integer_at(control + LENGTH)
    # Arrivals are never set back: some may still wait for them.
    awaited = integer_at(control + BASE)
    for i in range(length):
        at = program + 24 * i
        _invoke(integer_at(at), integer_at(at + 8), thread, threads)
        if not integer_at(at + 16):
            continue
        awaited += threads
        atomic_add(control + ARRIVED, 1)
        spins = 0
        while atomic_load(control + ARRIVED) < awaited:
            spins += 1
            if spins < SPINS:
                pause()
            else:
                give_way()


def _lead(control, threads, generation):
    """Run the published program as thread 0, unless it has done so for this generation."""
    if integer_at(control + LED) != generation:
        _run(control, 0, threads)
        store_integer(control + LED, generation)


def _follow(control, thread, threads, seen):
    """Run programs as they are published, until none comes for a while. seen[0]: the generation of
    the last program that this thread ran.
    """
    polls, patience = 0, POLLS
    while polls < patience:
        generation = atomic_load(control + GENERATION)
        if generation == seen[0]:
            polls += 1
            if polls < SPINS:
                pause()
            else:
                give_way()
            continue
        seen[0] = generation
        _run(control, thread, threads)
        polls, patience = 0, integer_at(control + PATIENCE)


@functools.cache
def _loops() -> tuple[Any, Any, Any]:
    return CompiledLoop(_lead), CompiledLoop(_follow), CompiledLoop(_publish)


def compile_loops() -> None:
    """Compile what runs programs."""
    numbers = types.int64, types.int64, types.int64
    lead, follow, publish = _loops()
    lead.compile(numbers)
    follow.compile((*numbers, types.Array(types.int64, 1, "C")))
    publish.compile((*numbers, types.int64, types.int64))


def _publish(control, program, length, patience, generation):
    """Make a program the next one, unless it is. patience: polls until the next one, before threads
    sleep.
    """
    if atomic_load(control + GENERATION) == generation:
        return
    atomic_store(control + PROGRAM, program)
    atomic_store(control + LENGTH, length)
    atomic_store(control + BASE, atomic_load(control + ARRIVED))
    atomic_store(control + PATIENCE, patience)
    atomic_store(control + GENERATION, generation)


class Program:
    """Operations with their arguments: (address of the code, arguments int64[n]) each. Arguments
    may be changed between runs.

    meets: whether the threads meet after each operation (default: after all). They always meet
    after the last one. patience: how often threads look for the next program before they sleep.
    """

    def __init__(
        self,
        operations: Sequence[tuple[int, np.ndarray]],
        meets: Sequence[bool] | None = None,
        patience: int = POLLS,
    ):
        self.patience = patience
        self._arguments = [arguments for _, arguments in operations]  # they own the memory
        found = [True] * len(operations) if meets is None else [*meets[:-1], True]
        self.table = np.array(
            [
                (code, arguments.ctypes.data, int(meet))
                for (code, arguments), meet in zip(operations, found, strict=True)
            ],
            dtype=np.int64,
        ).reshape(-1, 3)
        self.address, self.length = self.table.ctypes.data, len(self.table)


class Threads:
    """This thread and `n` - 1 others. One program runs at a time, whoever calls."""

    def __init__(self, n: int):
        self.n = n
        self._lock = threading.Lock()
        self._memory = np.zeros(CONTROL_BYTES + 64, dtype=np.uint8)
        self._control = -(-self._memory.ctypes.data // 64) * 64
        first = self._control - self._memory.ctypes.data
        self._generation = self._memory[first + GENERATION :][:8].view(np.int64)
        self._asleep = [False] * n
        self._wake = [threading.Event() for _ in range(n)]
        self._lead, self._follow, self._publish = _loops()
        self._publish(self._control, 0, 0, POLLS, 1)  # compiles
        for thread in range(1, n):
            threading.Thread(
                target=self._serve, args=(thread,), name=f"operations-{thread}", daemon=True
            ).start()

    def run(self, program: Program) -> None:
        """Run all operations of a program. Ctrl-C is raised after it: other threads may have begun,
        and wait for this one.
        """
        with self._lock:
            interrupted, control, generation = None, self._control, int(self._generation[0]) + 1
            what = program.address, program.length, program.patience
            while True:
                try:  # nothing of this happens twice
                    self._publish(control, *what, generation)
                    for thread in range(1, self.n):
                        if self._asleep[thread]:
                            self._wake[thread].set()
                    self._lead(control, self.n, generation)
                    break
                except KeyboardInterrupt as error:
                    interrupted = error
            if interrupted is not None:
                raise interrupted

    def _serve(self, thread: int) -> None:
        seen = np.ones(1, dtype=np.int64)
        while True:
            self._follow(self._control, thread, self.n, seen)
            self._asleep[thread] = True
            if self._generation[0] == seen[0]:  # a program that came since has not seen `_asleep`
                self._wake[thread].wait()
            self._wake[thread].clear()
            self._asleep[thread] = False


@functools.cache
def _threads(process: int, n: int) -> Threads:
    return Threads(n)


def run(program: Program, n: int) -> None:
    """Run a program on `n` threads, which are kept. A forked child gets its own."""
    _threads(os.getpid(), n).run(program)
