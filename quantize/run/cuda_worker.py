"""Quantize pieces of tensors on GPUs: the work of a thread on a piece, and the memory that it uses.

Every worker thread of a run holds one piece at a time: it copies rows into pinned memory, has its
GPU copy, widen, search and measure them on a separate stream, and waits. Several pieces are under
way on each GPU, so that reading, copying, searching and (in the run's own thread) writing overlap.
Piece number n belongs to slot n modulo the number of slots, and slots take turns among the GPUs. As
pieces are written in order, and no more are under way than there are slots, a slot is free when its
turn comes.

What is in a piece depends on the plan alone, never on the number of GPUs or threads, and so do all
bytes and sums. The sums are taken in double precision and in another order than on the CPU: they
agree to about 1e-6, and are the same in every run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from ...errors import IqforgeError, NonFiniteError
from ...formats.codecs.codec import decode
from ...formats.source import Source
from ..cuda.device_kernels import MEASURED_PER_PARTIAL, NONE_FOUND, SUMS, WIDENED
from ..cuda.encoder import section
from ..encode import arrange_rows, prepare_weights
from . import cuda_device
from .cuda_device import CudaDevice
from .piece import Piece, PieceResult, PieceTask, plain_type

log = logging.getLogger(__name__)

SLOTS_PER_DEVICE = 8


def slot_count(devices: int, threads: int) -> int:
    """Return the number of pieces under way on all devices."""
    return min(max(2, -(-threads // devices)), SLOTS_PER_DEVICE) * devices


class DeviceWorkers:
    """The slots of a run.

    threads: the number of pieces that may be under way in all, but at least two for each device and
    at most SLOTS_PER_DEVICE.
    """

    def __init__(self, devices: Sequence[CudaDevice], threads: int):
        per_device = slot_count(len(devices), threads) // len(devices)
        self.slots = [_Slot(device) for _ in range(per_device) for device in devices]

    def work(self, source: Source, piece: Piece) -> list[PieceResult]:
        """Return bytes and sums of every task of a numbered piece, as the CPU's worker does. The
        bytes are in memory of the piece's slot.
        """
        assert piece.number is not None
        return self.slots[piece.number % len(self.slots)].quantize(source, piece)

    def close(self) -> None:
        """Release all memory. No piece may be under way."""
        seconds: dict[str, float] = defaultdict(float)
        for slot in self.slots:
            slot.close()
            for phase, spent in slot.seconds.items():
                seconds[phase] += spent
        log.debug(
            "seconds in %d threads: %s",
            len(self.slots),
            ", ".join(f"{phase} {spent:.2f}" for phase, spent in seconds.items()),
        )


@contextlib.contextmanager
def device_workers(devices: Sequence[int], threads: int) -> Iterator[DeviceWorkers]:
    """Yield the slots of a run on the GPUs with these numbers, and release their memory after
    it.
    """
    workers = DeviceWorkers([cuda_device.CudaDevice(number) for number in devices], threads)
    try:
        yield workers
    except BaseException:
        with contextlib.suppress(IqforgeError):  # the first error is reported
            workers.close()
        raise
    workers.close()


class _Slot:
    """Memory on one device and on the host for one piece at a time. It is kept from piece to piece
    and grows as needed.
    """

    def __init__(self, device: CudaDevice):
        self.device = device
        self.stream: Any = None
        self.seconds: dict[str, float] = defaultdict(float)
        self._pinned: dict[str, np.ndarray] = {}
        self._memory: list[Any] = []
        self._taken = 0

    def quantize(self, source: Source, piece: Piece) -> list[PieceResult]:
        with self.device.context():
            try:
                return self._quantize(source, piece)
            except BaseException:
                if self.stream is not None:
                    # Memory must not be released while the device writes to it.
                    self.device.wait(self.stream)
                raise

    def _quantize(self, source: Source, piece: Piece) -> list[PieceResult]:
        """Read, copy and widen the rows once, then run the searches of all tasks one after another
        on the stream.
        """
        device, n_elements = self.device, piece.n_elements
        self._taken = 0
        if self.stream is None:
            self.stream = device.stream()
        self._clock = time.perf_counter()
        kind, raw = self._read(source, piece)
        self._spent("reading")
        x = self._new((n_elements,), np.float32)
        given = x if kind == "F32" else self._new((n_elements,), raw.dtype)
        device.upload(raw, given, self.stream)
        found = self._host("found", (2,), np.int64)
        found[:] = NONE_FOUND, 0
        found_there = self._to_device(found)
        device.widen(kind, given, x, found_there, self.stream)
        started = [self._start(source, piece, number, x) for number in range(len(piece.tasks))]
        device.download(found_there, found, self.stream)
        self._spent("starting")
        device.wait(self.stream)
        self._spent("waiting")

        zeroed = int(found[1])
        if zeroed and not any(task.planned.nan_to_zero for task in piece.tasks):
            self._refuse(source, piece, raw, int(found[0]))
        results = [
            self._finish(source, task, zeroed, *arrays)
            for task, arrays in zip(piece.tasks, started)
        ]
        self._spent("arranging")
        return results

    def _start(
        self, source: Source, piece: Piece, number: int, x: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Queue the search for task `number` of the piece, and its measurement, on the stream.
        Return the arrays that will hold its bytes and sums.
        """
        device, task = self.device, piece.tasks[number]
        rows, n_cols = piece.stop - piece.start, piece.source.n_cols
        target = task.planned.target.type
        plain, matrices = plain_type(target), 1 if task.weights is None else len(task.weights)
        self._spent("starting")
        encoder = device.encoder(target, n_cols, task.weights is not None)
        self._spent("compiling")
        ready = [x]  # the first array that an encoder asks for
        arrays = encoder.arrays(
            rows,
            lambda shape, dtype: ready.pop().reshape(shape) if ready else self._new(shape, dtype),
        )
        search_weights, error_weights = self._weights(source, task, matrices, f"weights {number}")
        for matrix in range(matrices):
            own = None if search_weights is None else search_weights[matrix]
            encoder.launch(section(arrays, matrix, matrices), stream=self.stream, weights=own)

        blocks, results = (
            n_cols // plain.block_size,
            (arrays[1:3] if plain.header_bytes else arrays[1:2]),
        )
        partials = self._new((-(-rows * blocks // MEASURED_PER_PARTIAL), SUMS), np.float64)
        device.measure(
            plain,
            x.reshape(rows * blocks, plain.block_size),
            results,
            error_weights.reshape(matrices, blocks, plain.block_size),
            rows // matrices,
            partials,
            self.stream,
        )
        packed = self._rows(results, rows, plain.row_bytes(n_cols))
        data, sums = (
            self._host(f"data {number}", packed.shape, np.uint8),
            self._host(f"sums {number}", partials.shape, np.float64),
        )
        device.download(packed, data, self.stream)
        device.download(partials, sums, self.stream)
        return data, sums

    def _finish(
        self, source: Source, task: PieceTask, zeroed: int, data: np.ndarray, sums: np.ndarray
    ) -> PieceResult:
        info, target = task.planned.source, task.planned.target.type
        totals, largest = sums[:, :4].sum(axis=0), sums[:, 4:].max(axis=0)
        if not math.isfinite(largest[0]):
            raise NonFiniteError(
                f"values up to {largest[1]:g} do not fit into {target}",
                tensor=info.name,
                file=source.path,
            )
        return arrange_rows(target, data, info.n_cols), np.array([*totals, largest[0], zeroed])

    def _read(self, source: Source, piece: Piece) -> tuple[str, np.ndarray]:
        """Return (type, numbers) of the piece in pinned memory: the source's type if the device can
        widen it, else F32.
        """
        info = piece.source
        rows = source.read_rows(info, piece.start, piece.stop)
        if info.type.name not in WIDENED:
            x = self._host("raw", (len(rows), info.n_cols), np.float32)
            decode(info.type, rows, info.n_cols, out=x)
            return "F32", x.reshape(-1)
        raw = self._host("raw", rows.shape, np.uint8)
        np.copyto(raw, rows)
        return info.type.name, raw.reshape(-1).view(WIDENED[info.type.name])

    def _weights(
        self, source: Source, task: PieceTask, matrices: int, kept_as: str
    ) -> tuple[Any, Any]:
        """Return the weights of the search and of the sums on the device, float32[matrices,
        n_cols]; None for a search without weights.
        """
        info, n_cols = task.planned.source, task.planned.source.n_cols
        here = self._host(kept_as, (2, matrices, n_cols), np.float32)
        here[...] = 1
        if task.weights is not None:
            here[1] = task.weights
            try:
                for matrix, importance in enumerate(task.weights.reshape(matrices, n_cols)):
                    here[0, matrix] = prepare_weights(importance, n_cols)
            except IqforgeError as error:
                raise type(error)(error.message, file=source.path, tensor=info.name) from None
        there = self._to_device(here)
        return None if task.weights is None else there[0], there[1]

    def _refuse(self, source: Source, piece: Piece, raw: np.ndarray, index: int) -> NoReturn:
        """Raise NonFiniteError naming the number at `index` of the piece, with its row counted in
        its matrix, as on the CPU.
        """
        info = piece.source
        row, column = divmod(index, info.n_cols)
        at = raw[index : index + 1]
        value = (
            at[0]
            if raw.dtype == np.float32
            else decode(info.type, at.view(np.uint8)[None], 1)[0, 0]
        )
        raise NonFiniteError(
            f"{value} at row {(piece.start + row) % (info.n_rows // info.n_matrices)}, column"
            f" {column}",
            tensor=info.name,
            file=source.path,
        )

    def _rows(self, results: list[Any], rows: int, row_bytes: int) -> Any:
        """Return uint8[rows, row_bytes] of an encoder's results: blocks alone, or headers and
        blocks.
        """
        if len(results) == 1:
            return results[0].reshape(rows, row_bytes)
        out = self._new((rows, row_bytes), np.uint8)
        heads, bodies = results
        self.device.join(heads, bodies, out, self.stream)
        return out

    def _to_device(self, host: np.ndarray) -> Any:
        there = self._new(host.shape, host.dtype)
        self.device.upload(host, there, self.stream)
        return there

    def _host(self, what: str, shape: tuple[int, ...], dtype: type | np.dtype) -> np.ndarray:
        """Return pinned memory that is kept under the name `what`."""
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if what not in self._pinned or len(self._pinned[what]) < n_bytes:
            self._pinned.pop(what, None)
            self._pinned[what] = self.device.pinned(n_bytes)
        return self._pinned[what][:n_bytes].view(dtype).reshape(shape)

    def _new(self, shape: tuple[int, ...], dtype: type | np.dtype) -> Any:
        """Return the next array of this piece on the device. The n-th array of a piece uses the
        memory of the n-th array of the piece before.
        """
        n_bytes, at = math.prod(shape) * np.dtype(dtype).itemsize, self._taken
        self._taken += 1
        if at == len(self._memory):
            self._memory.append(None)
        if self._memory[at] is None or len(self._memory[at]) < n_bytes:
            self._memory[at] = None
            self._memory[at] = self.device.memory(n_bytes)
        return self._memory[at][:n_bytes].view(dtype).reshape(shape)

    def _spent(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._clock
        self._clock = now

    def close(self) -> None:
        with self.device.context():
            self._pinned, self._memory, self.stream = {}, [], None
