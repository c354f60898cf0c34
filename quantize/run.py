"""The run: tensors stream from a Source through a plan into a Sink, in pieces of rows, on several threads or GPUs.

Every piece is read, decoded, quantized and measured by one worker; results are taken in order, so the output and all sums are
the same for any number of threads. With GPUs, pieces of quantized tensors are larger, and what a worker does with one is in
`cuda_run.py`; everything else is as without. Memory is bounded by the number of pieces in flight, whatever the size of a tensor: pages
of the source are handed back as soon as their piece is done.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..errors import IqforgeError, NonFiniteError
from ..formats.codec import decode, encode_float
from ..formats.source import Sink, Source
from ..formats.types import ggml_type
from .encode import arrange_rows, refuse_non_finite, row_encoder, zero_non_finite
from .piece import Piece
from .plan import PlannedTensor

if TYPE_CHECKING:
    from .cuda_run import DeviceWorkers

# importance(name, shape) -> float32[n_matrices, n_cols], or None where nothing is known of the tensor
ImportanceLookup = Callable[[str, tuple[int, ...]], np.ndarray | None]

log = logging.getLogger(__name__)

PIECE_ELEMENTS = 1 << 20
# Largest magnitude that surely fits when nothing is measured: scales are F16, and none is more than a few times its largest value.
_SURELY_FITS = {"F16": 65504.0, "BF16": 3e38, "F32": float("inf")}
_SURELY_FITS_QUANTIZED = 8192.0
_RELEASE_BYTES = 64 << 20  # pages handed back after this much reading
_RELEASE_BYTES_DEVICE = 1 << 30  # its pieces are larger, and pages that another piece is being read from must be found again


@dataclass
class TensorReport:
    """What became of one tensor. Errors are relative to the root mean square of the source, None where bytes were kept or nothing was
    measured."""

    planned: PlannedTensor
    rmse: float | None = None
    weighted_rmse: float | None = None
    weighted: bool = False  # whether importances were used
    largest_error: float = 0.0
    zeroed: int = 0  # NaN and infinities of the source that were set to 0


@dataclass
class RunReport:
    """Totals of a run; sizes are bytes of tensor data."""

    tensors: list[TensorReport] = field(default_factory=list)

    @property
    def source_bytes(self) -> int:
        return sum(t.planned.source.n_bytes for t in self.tensors)

    @property
    def target_bytes(self) -> int:
        return sum(t.planned.target.n_bytes for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.target_bytes / max(1, sum(t.planned.target.n_elements for t in self.tensors))

    @property
    def replaced(self) -> int:
        """Tensors whose rows or row counts the type asked for cannot have."""
        return sum(1 for t in self.tensors if t.planned.fallback)


class Progress:
    """What a caller may want to hear of a run; this one stays silent."""

    def begin(self, planned: Sequence[PlannedTensor]) -> None: ...

    def advance(self, n_elements: int) -> None: ...

    def tensor_done(self, index: int, report: TensorReport) -> None: ...

    def end(self, report: RunReport) -> None: ...


def default_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count(asked: int) -> int:
    """Threads to start: those asked for, but at most four per core, as more would only take memory; 0 or less: one per core."""
    return min(asked, 4 * default_threads()) if asked > 0 else default_threads()


def stream(source: Source, planned: Sequence[PlannedTensor], sink: Sink, *, importance: ImportanceLookup | None = None,
           threads: int = 0, progress: Progress | None = None, devices: Sequence[int] = (), measure: bool = True) -> RunReport:
    """Carry out a plan. The sink must list the plan's target tensors in order; finishing or aborting it is the caller's.

    threads: 0 for all cores that this process may use; more than four per core are not started, as they would only take memory.
    devices: numbers of CUDA devices that quantize, as `devices.find_devices` gives them. Their number changes no byte and no sum; the
    bytes are the CPU's, but for trellis types.
    measure: whether errors are measured, which takes longer than making blocks without a search; on devices they always are.
    Errors name the source file and tensor. NonFiniteError also where finite values do not fit into the target type.
    """
    progress = progress or Progress()
    threads = thread_count(threads)
    if not devices:
        return _stream(source, planned, sink, importance, progress, threads, measure=measure)
    from .cuda_device import CudaDevice
    from .cuda_run import DeviceWorkers

    workers = DeviceWorkers([CudaDevice(number) for number in devices], threads)
    try:
        report = _stream(source, planned, sink, importance, progress, len(workers.slots), workers)
    except BaseException:
        with contextlib.suppress(IqforgeError):  # the first error is the one to tell
            workers.close()
        raise
    workers.close()
    return report


def _stream(source: Source, planned: Sequence[PlannedTensor], sink: Sink, importance: ImportanceLookup | None, progress: Progress,
            threads: int, workers: DeviceWorkers | None = None, measure: bool = True) -> RunReport:
    report = RunReport()
    progress.begin(planned)
    pieces = _pieces(source, planned, importance, workers)
    n_readers = getattr(source, "parallel_reads", 0) if workers is None else 0
    readers = ThreadPoolExecutor(n_readers, thread_name_prefix="read") if n_readers else None
    ahead = max(2 * threads, 2 * n_readers) if workers is None else threads
    waiting: deque[tuple[Piece, Future]] = deque()
    sums = _Sums()
    read_bytes = 0
    clock = _Clock()
    with ThreadPoolExecutor(threads, thread_name_prefix="quantize") as pool:
        try:
            while True:
                while len(waiting) < ahead and (piece := next(pieces, None)) is not None:
                    waiting.append((piece, _submit(pool, readers, workers, source, piece, measure)))
                if not waiting:
                    break
                piece, future = waiting.popleft()
                clock.spent("planning")
                data, measured = future.result()
                clock.spent("waiting")
                sink.write(piece.planned.target, data)
                clock.spent("writing")
                sums.add(measured)
                read_bytes += data.nbytes if piece.kept else (piece.stop - piece.start) * piece.planned.source.row_bytes
                last = not waiting or waiting[0][0].index != piece.index
                if last or read_bytes >= (_RELEASE_BYTES if workers is None else _RELEASE_BYTES_DEVICE):
                    source.release(piece.planned.source)
                    read_bytes = 0
                progress.advance((piece.stop - piece.start) * piece.planned.source.n_cols)
                if last:
                    done = sums.report(piece)
                    report.tensors.append(done)
                    progress.tensor_done(piece.index, done)
                    sums = _Sums()
        except BaseException:
            if readers is not None:
                readers.shutdown(wait=True, cancel_futures=True)
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    if readers is not None:
        readers.shutdown()
    progress.end(report)
    log.debug("seconds of the run: %s", clock)
    return report


def _submit(pool: ThreadPoolExecutor, readers: ThreadPoolExecutor | None, workers: DeviceWorkers | None, source: Source,
            piece: Piece, measure: bool) -> Future:
    """Start the work on a piece. Where reading means waiting, for a server, many pieces are read at once by threads of their own."""
    if piece.number is not None:
        return pool.submit(workers.work, source, piece)
    if readers is None:
        return pool.submit(_work, source, piece, measure)
    return pool.submit(_work, source, piece, measure, readers.submit(source.read_rows, piece.planned.source, piece.start, piece.stop))


def _pieces(source: Source, planned: Sequence[PlannedTensor], importance: ImportanceLookup | None,
            workers: DeviceWorkers | None) -> Iterator[Piece]:
    numbers = itertools.count()
    for index, tensor in enumerate(planned):
        info = tensor.source
        rows_per_matrix = info.n_rows // info.n_matrices
        group = tensor.target.type.group_rows * info.type.group_rows
        step = max(1, PIECE_ELEMENTS // info.n_cols // group) * group
        weights = None if tensor.kept or importance is None else importance(info.name, info.shape)
        if tensor.kept:
            for start in range(0, info.n_rows, step):
                yield Piece(index, tensor, start, min(start + step, info.n_rows), None, None)
            continue
        if workers is not None and workers.takes(tensor):
            for start, stop in workers.pieces(tensor):
                own = None if weights is None else weights[start // rows_per_matrix:-(-stop // rows_per_matrix)]
                yield Piece(index, tensor, start, stop, own, None, next(numbers))
            continue
        for matrix in range(info.n_matrices):
            own = None if weights is None else weights[matrix]
            encode = _encoder(tensor, own, source.path)
            first = matrix * rows_per_matrix
            for start in range(first, first + rows_per_matrix, step):
                yield Piece(index, tensor, start, min(start + step, first + rows_per_matrix), own, encode)


def _encoder(tensor: PlannedTensor, importance: np.ndarray | None, file: str) -> Callable[[np.ndarray], np.ndarray]:
    target, n_cols = tensor.target.type, tensor.source.n_cols
    plain = ggml_type(target.base) if target.base else target
    if plain.is_float:
        return lambda x: arrange_rows(target, encode_float(plain, x), n_cols)
    try:
        run = row_encoder(target, n_cols, importance)
    except IqforgeError as error:
        raise type(error)(error.message, file=file, tensor=tensor.source.name) from None

    def encode(x: np.ndarray) -> np.ndarray:
        out = np.empty((len(x), plain.row_bytes(n_cols)), dtype=np.uint8)
        run(x, out)
        return arrange_rows(target, out, n_cols)

    return encode


def _work(source: Source, piece: Piece, measure: bool = True, reading: Future | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """(bytes, sums) of a piece, whose rows may be on their way already. No sums of one that is kept, nor, as a rule, without `measure`.

    sums: float64[6] = sum e^2, sum x^2, sum w e^2, sum w x^2, max |e|, values zeroed.
    """
    info = piece.planned.source
    rows = source.read_rows(info, piece.start, piece.stop) if reading is None else reading.result()
    if piece.kept:
        if info.type.tail_bytes and piece.stop == info.n_rows:
            return np.concatenate([rows.reshape(-1), source.read_bytes(info, info.n_bytes - info.type.tail_bytes, info.n_bytes)]), None
        return np.array(rows), None
    x = decode(info.type, rows, info.n_cols)
    del rows
    target = piece.planned.target.type
    zeroed = zero_non_finite(x) if piece.planned.nan_to_zero else 0
    if not measure and not zeroed and x.size and max(x.max(), -x.min()) <= _SURELY_FITS.get(target.name, _SURELY_FITS_QUANTIZED):
        return piece.encode(x), None  # a NaN fails the comparison
    if not target.is_float:
        matrix_rows = info.n_rows // info.n_matrices
        refuse_non_finite(x, info.name, source.path, first_row=piece.start % matrix_rows)
    data = piece.encode(x)
    error = decode(target, data, info.n_cols, as_weights=True)
    with np.errstate(invalid="ignore"):  # a tensor that becomes floats keeps what is not finite, and its errors are NaN
        np.subtract(x, error, out=error)
    largest = float(np.abs(error).max(initial=0))
    if not np.isfinite(largest) and np.isfinite(x).all():
        raise NonFiniteError(f"values up to {np.abs(x).max():g} do not fit into {target}", tensor=info.name,
                             file=source.path)
    e2, x2 = _column_squares(error), _column_squares(x)
    w = np.ones(info.n_cols) if piece.weights is None else piece.weights.astype(np.float64)
    return data, np.array([e2.sum(), x2.sum(), (w * e2).sum(), (w * x2).sum(), largest, zeroed])


def _column_squares(x: np.ndarray) -> np.ndarray:
    """float64[n_cols]: sums of squares. Summed in float32, which loses nothing that matters here, unless that overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.einsum("ij,ij->j", x, x)
        return sums.astype(np.float64) if np.isfinite(sums).all() else np.einsum("ij,ij->j", x, x, dtype=np.float64)


class _Sums:
    """Adds up the measurements of a tensor's pieces in order."""

    def __init__(self) -> None:
        self.totals, self.largest, self.any = np.zeros(4), 0.0, False
        self.zeroed = 0

    def add(self, measured: np.ndarray | None) -> None:
        if measured is not None:
            self.totals += measured[:4]
            self.largest, self.any = max(self.largest, float(measured[4])), True
            self.zeroed += int(measured[5:].sum())

    def report(self, piece: Piece) -> TensorReport:
        if not self.any:
            return TensorReport(piece.planned)
        e2, x2, we2, wx2 = self.totals
        return TensorReport(piece.planned, float(np.sqrt(e2 / x2)) if x2 != 0 else 0.0, float(np.sqrt(we2 / wx2)) if wx2 != 0 else 0.0,
                            piece.weights is not None, self.largest, self.zeroed)


class _Clock:
    """Where the run's own thread spends its time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def spent(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{phase} {spent:.2f}" for phase, spent in self.seconds.items())
