"""Stream tensors from a source through one plan or several into as many sinks, in pieces of rows,
on several threads or GPUs.

Every piece is read and decoded once, by one worker, which quantizes and measures it for every
output that wants it. Results are taken in order, so the outputs and all sums are the same for any
number of threads. With GPUs, pieces of quantized tensors are larger, and `cuda_worker` works on
them; everything else is the same. Results of the CPU are written by a background thread that holds
up to 32 MB of them, so that workers continue while the disk pauses. Memory is bounded by the number
of pieces in flight, whatever the size of a tensor.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ...formats.source import Source, TensorInfo
from ..plan.plan import PlannedTensor
from ..rounding.moments import TensorRounding
from .background import BackgroundWriter
from .cpu_worker import work
from .parallel import thread_count
from .piece import ImportanceLookup, OutputTensor, Piece, PieceResult, PieceTask, cut
from .report import ErrorTotals, PhaseClock, RunProgress, RunReport, TensorReport

if TYPE_CHECKING:
    from .cuda_worker import DeviceWorkers

log = logging.getLogger(__name__)


class TensorWriter(Protocol):
    """The part of a sink that a run needs."""

    def write(self, tensor: TensorInfo, data: np.ndarray) -> object:
        """Append the next bytes of `tensor`; see `Sink.write`."""


@dataclass
class RunOutput:
    """A plan and its sink, which lists the plan's targets in order. The caller finishes or aborts
    the sink.

    A plan may leave out tensors of the source and may name one several times, in the order of the
    source. finished: reports of the first tensors of the plan, which the sink already has.
    tensor_done: called when the last byte of a tensor was given to the sink. roundings: how tensors
    are rounded with second moments, by name of the target; the CPU does it. waits: names of targets
    that are planned when all before them are written.
    """

    planned: Sequence[PlannedTensor]
    sink: TensorWriter
    importance: ImportanceLookup | None = None
    progress: RunProgress = field(default_factory=RunProgress)
    finished: Sequence[TensorReport] = ()
    tensor_done: Callable[[TensorReport], None] | None = None
    roundings: Mapping[str, TensorRounding] = field(default_factory=dict)
    waits: Collection[str] = ()


def stream(
    source: Source,
    outputs: Sequence[RunOutput],
    *,
    threads: int = 0,
    devices: Sequence[int] = (),
    measure: bool = True,
) -> list[RunReport]:
    """Carry out the plans of all outputs in one pass over the source. Return a report for each.

    threads: see `thread_count`. devices: numbers of CUDA devices that quantize, as
    `devices.find_devices` returns them. Their number changes no byte and no sum; the bytes are the
    CPU's, except for trellis types. measure: whether errors are measured, which takes longer than
    encoding types without a search; devices always measure what they quantize. Errors name the
    source file and tensor. NonFiniteError is also raised where finite values do not fit into the
    target type.
    """
    threads = thread_count(threads)
    if not devices:
        return _stream(source, outputs, threads, measure=measure)
    from .cuda_worker import device_workers

    with device_workers(devices, threads) as workers:
        return _stream(source, outputs, len(workers.slots), workers, measure)


class _OutputState:
    """Take the results for one output in its order."""

    def __init__(self, output: RunOutput):
        self.output, self.totals = output, ErrorTotals()
        self.report = RunReport(list(output.finished))
        output.progress.begin(output.planned)
        if output.finished:
            output.progress.resume(output.finished)

    def take(
        self, piece: Piece, task: PieceTask, result: PieceResult, writer: BackgroundWriter | None
    ) -> None:
        """writer: None if the data is in memory that the next piece will use."""
        data, measured = result
        self._do(writer, data.nbytes, partial(self.output.sink.write, task.planned.target, data))
        self.totals.add(measured)
        self.output.progress.advance(piece.n_elements)
        if piece.last:
            done = self.totals.report(task.planned, task.weights is not None)
            self.totals = ErrorTotals()
            self.report.tensors.append(done)
            if self.output.tensor_done is not None:
                self._do(writer, 0, partial(self.output.tensor_done, done))
            self.output.progress.tensor_done(task.target.index, done)

    @staticmethod
    def _do(writer: BackgroundWriter | None, n_bytes: int, call: Callable[[], object]) -> None:
        if writer is None:
            call()
        else:
            writer.put(n_bytes, call)


def _stream(
    source: Source,
    outputs: Sequence[RunOutput],
    threads: int,
    workers: DeviceWorkers | None = None,
    measure: bool = True,
) -> list[RunReport]:
    states = [_OutputState(output) for output in outputs]
    targets = [
        OutputTensor(
            number,
            index,
            planned,
            output.importance,
            index < len(output.finished),
            output.roundings.get(planned.target.name),
        )
        for number, output in enumerate(outputs)
        for index, planned in enumerate(output.planned)
    ]
    waits = {(number, name) for number, output in enumerate(outputs) for name in output.waits}
    numbers = itertools.count()
    n_readers = source.parallel_reads if workers is None else 0
    readers = ThreadPoolExecutor(n_readers, thread_name_prefix="read") if n_readers else None
    ahead = max(2 * threads, 2 * n_readers) if workers is None else threads
    waiting: deque[tuple[Piece, Future]] = deque()
    clock = PhaseClock()
    with (
        BackgroundWriter() if workers is None else nullcontext() as writer,
        ThreadPoolExecutor(threads, thread_name_prefix="quantize") as pool,
    ):
        try:
            for together in _between_waits(targets, waits):
                pieces = cut(source, together, workers is not None, numbers)
                while True:
                    while len(waiting) < ahead and (piece := next(pieces, None)) is not None:
                        started = _submit(pool, readers, workers, source, piece, measure)
                        waiting.append((piece, started))
                    if not waiting:
                        break
                    piece, future = waiting.popleft()
                    clock.spent("planning")
                    results = future.result()
                    clock.spent("waiting")
                    for task, result in zip(piece.tasks, results):
                        states[task.target.output].take(piece, task, result, writer)
                    clock.spent("writing")
                    if piece.last:
                        source.release(piece.source)
                if writer is not None:
                    writer.wait()
        except BaseException:
            if readers is not None:
                readers.shutdown(wait=True, cancel_futures=True)
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    if readers is not None:
        readers.shutdown()
    for state in states:
        state.output.progress.end(state.report)
    log.debug("seconds of the run: %s", clock)
    return [state.report for state in states]


def _between_waits(
    targets: Sequence[OutputTensor], waits: Container[tuple[int, str]]
) -> Iterator[list[OutputTensor]]:
    """Yield targets that are planned together: each of `waits`, an output and a name, begins a new
    list.
    """
    together: list[OutputTensor] = []
    for target in targets:
        if together and (target.output, target.planned.target.name) in waits:
            yield together
            together = []
        together.append(target)
    yield together


def _submit(
    pool: ThreadPoolExecutor,
    readers: ThreadPoolExecutor | None,
    workers: DeviceWorkers | None,
    source: Source,
    piece: Piece,
    measure: bool,
) -> Future:
    """Start the work on a piece. Pieces of a remote source are read by separate threads, many at
    once.
    """
    if workers is not None and piece.number is not None:
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
