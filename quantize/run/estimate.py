"""Estimate the time and memory of a run by briefly running its own pipeline on rows of its tensors.

Tensors are sorted into workloads, whose pieces cost the same per element: the same types before and
after in every output, with or without importances, the same row length and about the same size of a
piece. Some pieces of every workload go through `run.stream`, with the threads or devices of the
run, from the source into a scratch file on the disk of the outputs. The measured cost per element
is multiplied by the elements of the workload. The first piece of a workload, which compiles its
search or loads compiled code, is timed separately.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...formats.disk import disk_needs
from ...formats.source import Source
from ..plan.plan import PlannedTensor
from . import background
from . import piece as pieces
from .cuda_worker import slot_count
from .parallel import thread_count
from .piece import ImportanceLookup, runs_on_device
from .sample import RowSample, SampledSource, spread
from .scratch_file import ScratchFile
from .stream import RunOutput, stream
from .workload import RunEstimate, Workload

_TIMED_SECONDS = 0.5  # the time that a workload is tried for in all
_ROUNDS = 2
_SIZINGS = 3
_FIRST_ELEMENTS = 1 << 14
_SMALL_SHARE = (
    0.02  # workloads with a smaller share of the elements are tried for a quarter of the time
)


def estimate_run(
    source: Source,
    plans: Sequence[Sequence[PlannedTensor]],
    lookups: Sequence[ImportanceLookup | None],
    *,
    threads: int = 0,
    devices: Sequence[int] = (),
    files: Sequence[tuple[str | os.PathLike, int]] = (),
    setup: float = 0.0,
) -> RunEstimate:
    """Return time and memory of `run.stream` with these plans, one for each output, on this machine
    as busy as it is now.

    files: paths and bytes of the outputs; one without a name is written next to the first. setup:
    seconds that the caller's preparations took. Some rows are read. Raise the errors of reading and
    quantizing them, such as NonFiniteError.
    """
    threads = thread_count(threads)
    before = resident_bytes("VmHWM")
    disks = disk_needs(files)
    workloads = workloads_of(source, plans, lookups, bool(devices))
    n_elements = sum(workload.n_elements for workload in workloads)
    with ScratchFile(disks[0].folder if disks else None) as scratch, _compiling() as compiling:
        trial = _Trial(source, lookups, threads, devices, scratch)
        for workload in workloads:
            trial.first(workload, compiling)
        base = resident_bytes()
        for turn in range(_ROUNDS):
            for workload in workloads:
                share = 1 if workload.n_elements >= _SMALL_SHARE * n_elements else 0.25
                trial.timed(workload, share * _TIMED_SECONDS / _ROUNDS, (turn + 0.5) / _ROUNDS)
        n_written = sum(plan.target.n_bytes for planned in plans for plan in planned)
        writing, finishing = scratch.seconds_for(n_written)
    working, loading = (
        sum(workload.seconds for workload in workloads),
        sum(workload.first for workload in workloads) + trial.filling,
    )
    total = setup + loading + max(working, writing) + finishing
    # The disk may pause at any time, so the queue of the thread that writes counts as full.
    queued = 0 if devices else min(background.MAX_BYTES, n_written)
    readers = 0 if devices else source.parallel_reads
    peak = base + memory_of_pieces(workloads, trial.workers, readers) + queued
    return RunEstimate(
        total,
        max(before, peak),
        setup,
        loading,
        max(working, writing),
        finishing,
        sum(compiling),
        writing > working,
        disks,
        workloads,
    )


def workloads_of(
    source: Source,
    plans: Sequence[Sequence[PlannedTensor]],
    lookups: Sequence[ImportanceLookup | None],
    with_devices: bool = False,
) -> list[Workload]:
    """Return the workloads of a run in its order."""
    wanted: dict[str, list[tuple[int, PlannedTensor]]] = defaultdict(list)
    for output, planned in enumerate(plans):
        for plan in planned:
            wanted[plan.source.name].append((output, plan))
    workloads: dict[tuple, Workload] = {}
    for info in source.tensors:
        if own := wanted.get(info.name):
            kept, on_device = (
                all(plan.kept for _, plan in own),
                with_devices and all(runs_on_device(plan) for _, plan in own),
            )
            weighted = tuple(
                not plan.kept
                and (lookup := lookups[output]) is not None
                and lookup(info.name, info.shape) is not None
                for output, plan in own
            )
            matrices = 1 if kept or on_device else info.n_matrices
            piece = min(
                pieces.DEVICE_PIECE_ELEMENTS if on_device else pieces.PIECE_ELEMENTS,
                info.n_elements // matrices,
            )
            key = (
                info.type.name,
                tuple((output, plan.target.type.name, plan.nan_to_zero) for output, plan in own),
                weighted,
                0 if kept else info.n_cols,
                piece.bit_length(),
            )
            workload = workloads.setdefault(
                key, Workload(info, tuple(own), any(weighted), piece, on_device)
            )
            workload.piece = max(workload.piece, piece)
            workload.tensors.append(info)
    return list(workloads.values())


class _Trial:
    """Run some pieces of workloads.

    workers: the number of pieces worked on at a time. filling: seconds until the devices had memory
    for all pieces under way.
    """

    def __init__(
        self,
        source: Source,
        lookups: Sequence[ImportanceLookup | None],
        threads: int,
        devices: Sequence[int],
        scratch: ScratchFile,
    ):
        self.source, self.lookups, self.threads, self.devices, self.scratch = (
            source,
            lookups,
            threads,
            devices,
            scratch,
        )
        self.workers = slot_count(len(devices), threads) if devices else threads
        self.filling = 0.0
        self._pace: dict[int, float] = {}  # of a workload: seconds per element and worker so far

    def first(self, workload: Workload, compiling: list[float]) -> None:
        """Load or compile what the workload needs, and measure roughly how fast it is."""
        rows = spread(workload.tensors, 1, _FIRST_ELEMENTS, workload.group)
        before, once = sum(compiling), self._run(workload, rows)
        again = self._run(workload, rows)
        workload.first = max(0.0, once - (sum(compiling) - before) - again)
        self._pace[id(workload)] = again / rows[0].n_elements

    def timed(self, workload: Workload, seconds: float, offset: float) -> None:
        """Try about `seconds` of the workload. A trial that turns out much shorter, as the pace was
        not known well, is repeated.
        """
        spent, tried = 0.0, 0
        for _ in range(_SIZINGS):
            n_elements = min(
                int(seconds / self._pace[id(workload)]) * self.workers, workload.n_elements
            )
            spent, tried = self._trial(workload, max(1, n_elements), offset)
            self._pace[id(workload)] = spent / tried * self.workers
            if spent > seconds / 3 or n_elements == workload.n_elements:
                break
        workload.spent, workload.tried = workload.spent + spent, workload.tried + tried

    def _trial(self, workload: Workload, n_elements: int, offset: float) -> tuple[float, int]:
        """Return (seconds, elements) of about `n_elements`, in pieces as large as the run's if that
        gives every worker two.
        """
        # The first piece of a worker allocates its memory, which stays.
        skipped = self.workers if workload.on_device else 0
        count = max(2, round(n_elements / workload.piece / self.workers)) * self.workers + skipped
        rows = spread(
            workload.tensors,
            count,
            max(1, min(workload.piece, n_elements // count)),
            workload.group,
            offset,
            workload.on_device,
        )
        started, self.scratch.written_at = time.perf_counter(), []
        spent = self._run(workload, rows)
        if skipped:
            # When all outputs had a piece.
            written = self.scratch.written_at[len(workload.planned) - 1 :: len(workload.planned)]
            spent, before = written[-1] - written[skipped - 1], written[skipped - 1] - started
            self.filling = max(self.filling, before - spent * skipped / (count - skipped))
        return max(spent, 1e-9), sum(own.n_elements for own in rows[skipped:])

    def _run(self, workload: Workload, rows: list[RowSample]) -> float:
        """Return seconds for these pieces."""
        sampled = SampledSource(self.source, rows)
        outputs: list[RunOutput] = []
        for number, plan in workload.planned:
            planned = [
                replace(plan, source=info, target=info.with_type(plan.target.type))
                for info in sampled.tensors
            ]
            outputs.append(
                RunOutput(planned, self.scratch, sampled.importance(self.lookups[number]))
            )
        started = time.perf_counter()
        stream(sampled, outputs, threads=self.threads, devices=self.devices)
        return time.perf_counter() - started


def memory_of_pieces(workloads: Sequence[Workload], workers: int, readers: int = 0) -> int:
    """Return the most bytes that pieces under way take.

    A worker holds stored rows and their values as float32, then the values, their errors and the
    magnitudes of these; two results for each worker wait for their turn. readers: threads that
    read ahead from a remote source, for each of which two pieces of stored rows or results wait.
    With devices the host holds what is read and what was made, in pinned memory.
    """
    working = waiting = 0.0
    for workload in workloads:
        stored = workload.source.type.block_bytes / workload.source.type.block_size
        made = [
            plan.target.type.block_bytes / plan.target.type.block_size
            for _, plan in workload.planned
        ]
        if workload.on_device:
            held, count, each = 4 + stored + sum(made), workers, sum(made)
        else:
            held = 2 * stored if workload.kept else max(4 + stored, 3 * 4 + max(made))
            count, each = 2 * workers, sum(made)
            if readers:
                count, each = 2 * max(workers, readers), max(stored, sum(made))
        working = max(working, workload.piece * held * workers)
        waiting = max(waiting, workload.piece * each * count)
    return int(working + waiting)


def resident_bytes(what: str = "VmRSS") -> int:
    """Return the memory of this process: VmRSS now, or VmHWM, the most it had so far."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(what + ":"))


@contextlib.contextmanager
def _compiling() -> Iterator[list[float]]:
    """Yield a list to which the seconds that numba spends compiling are appended. Loading compiled
    code does not count.
    """
    from numba.core import event

    class Listener(event.Listener):
        depth, started = 0, 0.0

        def on_start(self, event: event.Event) -> None:
            if self.depth == 0:
                self.started = time.perf_counter()
            self.depth += 1

        def on_end(self, event: event.Event) -> None:
            self.depth -= 1
            if self.depth == 0:
                seconds.append(time.perf_counter() - self.started)

    seconds: list[float] = []
    with event.install_listener("numba:compile", Listener()):
        yield seconds
