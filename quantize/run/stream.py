"""The run: tensors stream from a Source through one plan or several into as many Sinks, in pieces
of rows, on several threads or GPUs.

Every piece is read and decoded once, by one worker, which quantizes and measures it for every
output that wants it; results are taken in order, so the outputs and all sums are the same for any
number of threads. With GPUs, pieces of quantized tensors are larger, and what a worker does with
one is in `cuda_run.py`; everything else is as without. Results of the CPU are written by a thread
of their own, which has up to 32 MB of them waiting, so that workers go on while the disk pauses.
Memory is bounded by the number of pieces in flight, whatever the size of a tensor: pages of the
source are handed back as soon as their piece is done.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ...errors import IqforgeError
from ...formats.source import Sink, Source
from ..plan.plan import PlannedTensor
from ..report.report import Clock, Progress, RunReport, Sums, TensorReport
from .background import Behind
from .piece import ImportanceLookup, Part, Piece, Result, Target, cut, work

if TYPE_CHECKING:
    from ..cuda.pieces import DeviceWorkers

log = logging.getLogger(__name__)

RELEASE_BYTES = 64 << 20  # pages handed back after this much reading
RELEASE_BYTES_DEVICE = (
    1 << 30
)  # its pieces are larger, and pages that another piece is being read from must be found again


def default_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count(asked: int) -> int:
    """Threads to start: those asked for, but at most four per core, as more would only take memory;
    0 or less: one per core.
    """
    return min(asked, 4 * default_threads()) if asked > 0 else default_threads()


@dataclass
class Output:
    """A plan and the sink it is carried out into, which lists the plan's targets in order;
    finishing or aborting it is the caller's.

    A plan may leave tensors of the source out and may name one several times, in the order of the
    source. finished: reports of the first tensors of the plan, which the sink has already.
    tensor_done: called when the last byte of a tensor was given to the sink.
    """

    planned: Sequence[PlannedTensor]
    sink: Sink
    importance: ImportanceLookup | None = None
    progress: Progress = field(default_factory=Progress)
    finished: Sequence[TensorReport] = ()
    tensor_done: Callable[[TensorReport], None] | None = None


def stream(
    source: Source,
    outputs: Sequence[Output],
    *,
    threads: int = 0,
    devices: Sequence[int] = (),
    measure: bool = True,
) -> list[RunReport]:
    """Carry out the plans of all outputs in one pass over the source. Returns a report for each.

    threads: 0 for all cores that this process may use; more than four per core are not started, as
    they would only take memory. devices: numbers of CUDA devices that quantize, as
    `devices.find_devices` gives them. Their number changes no byte and no sum; the bytes are the
    CPU's, but for trellis types. measure: whether errors are measured, which takes longer than
    making blocks without a search; on devices they always are. Errors name the source file and
    tensor. NonFiniteError also where finite values do not fit into the target type.
    """
    threads = thread_count(threads)
    if not devices:
        return _stream(source, outputs, threads, measure=measure)
    from ..cuda.device import CudaDevice
    from ..cuda.pieces import DeviceWorkers

    workers = DeviceWorkers([CudaDevice(number) for number in devices], threads)
    try:
        reports = _stream(source, outputs, len(workers.slots), workers)
    except BaseException:
        with contextlib.suppress(IqforgeError):  # the first error is the one to tell
            workers.close()
        raise
    workers.close()
    return reports


class _Taking:
    """What comes in for one output, in its order."""

    def __init__(self, output: Output):
        self.output, self.sums = output, Sums()
        self.report = RunReport(list(output.finished))
        output.progress.begin(output.planned)
        if output.finished:
            output.progress.resume(output.finished)

    def take(self, piece: Piece, part: Part, result: Result, behind: Behind | None) -> None:
        """behind: what writes; None where the data lies in memory that the next piece is to have."""
        data, measured = result
        self._do(behind, data.nbytes, partial(self.output.sink.write, part.planned.target, data))
        self.sums.add(measured)
        self.output.progress.advance((piece.stop - piece.start) * piece.source.n_cols)
        if piece.last:
            done, self.sums = self.sums.report(part.planned, part.weights is not None), Sums()
            self.report.tensors.append(done)
            if self.output.tensor_done is not None:
                self._do(behind, 0, partial(self.output.tensor_done, done))
            self.output.progress.tensor_done(part.target.index, done)

    @staticmethod
    def _do(behind: Behind | None, n_bytes: int, call: Callable[[], object]) -> None:
        if behind is None:
            call()
        else:
            behind.put(n_bytes, call)


def _stream(
    source: Source,
    outputs: Sequence[Output],
    threads: int,
    workers: DeviceWorkers | None = None,
    measure: bool = True,
) -> list[RunReport]:
    takings = [_Taking(output) for output in outputs]
    targets = [
        Target(number, index, planned, output.importance, index < len(output.finished))
        for number, output in enumerate(outputs)
        for index, planned in enumerate(output.planned)
    ]
    pieces = cut(source, targets, workers)
    n_readers = source.parallel_reads if workers is None else 0
    readers = ThreadPoolExecutor(n_readers, thread_name_prefix="read") if n_readers else None
    ahead = max(2 * threads, 2 * n_readers) if workers is None else threads
    waiting: deque[tuple[Piece, Future]] = deque()
    read_bytes = 0
    clock = Clock()
    with (
        Behind() if workers is None else nullcontext() as behind,
        ThreadPoolExecutor(threads, thread_name_prefix="quantize") as pool,
    ):
        try:
            while True:
                while len(waiting) < ahead and (piece := next(pieces, None)) is not None:
                    waiting.append((piece, _submit(pool, readers, workers, source, piece, measure)))
                if not waiting:
                    break
                piece, future = waiting.popleft()
                clock.spent("planning")
                results = future.result()
                clock.spent("waiting")
                for part, result in zip(piece.parts, results):
                    takings[part.target.output].take(piece, part, result, behind)
                clock.spent("writing")
                read_bytes += (piece.stop - piece.start) * piece.source.row_bytes
                if piece.last or read_bytes >= (
                    RELEASE_BYTES if workers is None else RELEASE_BYTES_DEVICE
                ):
                    source.release(piece.source)
                    read_bytes = 0
        except BaseException:
            if readers is not None:
                readers.shutdown(wait=True, cancel_futures=True)
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    if readers is not None:
        readers.shutdown()
    for taking in takings:
        taking.output.progress.end(taking.report)
    log.debug("seconds of the run: %s", clock)
    return [taking.report for taking in takings]


def _submit(
    pool: ThreadPoolExecutor,
    readers: ThreadPoolExecutor | None,
    workers: DeviceWorkers | None,
    source: Source,
    piece: Piece,
    measure: bool,
) -> Future:
    """Start the work on a piece. Where reading means waiting, for a server, many pieces are read at
    once by threads of their own.
    """
    if piece.number is not None:
        return pool.submit(workers.work, source, piece)
    if readers is None:
        return pool.submit(work, source, piece, measure)
    return pool.submit(
        work,
        source,
        piece,
        measure,
        readers.submit(source.read_rows, piece.source, piece.start, piece.stop),
    )
