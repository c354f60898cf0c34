"""`Rounders` of GPUs: rows are rounded with second moments on whichever GPU is free. The bytes are
the CPU's, whatever the number of GPUs. Types without kernels are rounded on the CPU.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ....formats.types import GGMLType, ggml_type
from ...encode import prepare_weights
from ..methods import ON_CPU, RowRounder
from ..tensor_moments import MatrixMoments
from ..ternary_rounder import TWINS, TernaryRounder
from .code_rounder import CodeRounder
from .code_tables import code_tables
from .factor import DeviceFactor, factored_there, held_out_error_there
from .memory import Memory

log = logging.getLogger(__name__)

# Tensors at a time on each GPU: one is copied while another is rounded, and trials of few rows
# leave most of a GPU free.
PLACES = 4


class _Place:
    """Memory for one tensor at a time on a GPU, and the rounder that was last made in it."""

    def __init__(self, device: Any):
        self.device, self.number = device, device.number
        self._memory: Memory | None = None
        self._stream: Any = None
        self._key: object = None
        self._rounder: CodeRounder | None = None
        self._searches: dict[tuple[GGMLType, int], Any] = {}

    def rounder(self, wanted: DeviceRounder) -> CodeRounder:
        if self._key is not wanted or self._rounder is None:
            factor = self.factored(wanted.moments, wanted.shrink, wanted.name)
            self._rounder = CodeRounder(
                wanted.type, wanted.n_cols, factor, wanted.passes, *self._ready()
            )
            self._key = wanted
        return self._rounder

    def factored(self, moments: MatrixMoments, shrink: float, name: str) -> DeviceFactor:
        """Return the factor of moments, in memory that the next one overwrites."""
        self._rounder = None
        return factored_there(moments, shrink, name, self.number, *self._ready())

    def search(self, type: GGMLType, x: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
        """Write the bytes of the search for x float32[rows, n_cols]."""
        memory, stream = self._ready()
        n_cols, head = x.shape[1], type.header_bytes
        encoder = self.device.encoder(type, n_cols, True)
        names = iter(range(1 << 30))
        arrays = encoder.arrays(
            len(x), lambda shape, dtype: memory.array(f"searched {next(names)}", shape, dtype)
        )
        self.device.upload(x.reshape(arrays[0].shape), arrays[0], stream)
        there = memory.filled("searched weights", weights, stream)
        encoder.launch(arrays, stream=stream, weights=there)
        parts = [np.empty(array.shape, dtype=np.uint8) for array in arrays[1 : 2 + (head > 0)]]
        for array, part in zip(arrays[1:], parts):
            self.device.download(array, part, stream)
        self.device.wait(stream)
        out[:, head:] = parts[-1].reshape(len(x), -1)
        if head:
            out[:, :head] = parts[0]

    def held_out_error(self, moments: MatrixMoments, rest: np.ndarray) -> float:
        return held_out_error_there(moments, rest, self.number, *self._ready())

    def _ready(self) -> tuple[Memory, Any]:
        if self._memory is None:
            self._memory, self._stream = Memory(self.device), self.device.stream()
        return self._memory, self._stream


class DeviceRounder:
    """Round rows of a matrix on the GPUs of `rounders`; see `rounding.methods.RowRounder`."""

    def __init__(
        self,
        rounders: DeviceRounders,
        type: GGMLType,
        n_cols: int,
        moments: MatrixMoments,
        shrink: float,
        passes: int,
        name: str,
    ):
        self.type, self.n_cols, self.moments, self.shrink = type, n_cols, moments, shrink
        self.passes, self.name, self._rounders = passes, name, rounders

    def __call__(self, x: np.ndarray, out: np.ndarray) -> None:
        with self._rounders.place() as place:
            place.rounder(self)(x, out)

    def stages(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the bytes of rows after error feedback, and after each refinement."""
        with self._rounders.place() as place:
            made = list(place.rounder(self).stages(x))
        yield from made


class DeviceRounders:
    """`rounding.methods.Rounders` of GPUs (`run.cuda_device.CudaDevice`)."""

    large_pieces = True

    def __init__(self, devices: Sequence[Any]):
        self._free: queue.LifoQueue[_Place] = queue.LifoQueue()
        for _ in range(PLACES):
            for device in devices:
                self._free.put(_Place(device))
        self._refused: set[str] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def place(self) -> Iterator[_Place]:
        """Yield a place that nobody else uses meanwhile."""
        place = self._free.get()
        try:
            with place.device.context():
                yield place
        finally:
            self._free.put(place)

    def rounder(
        self,
        type: GGMLType,
        n_cols: int,
        moments: MatrixMoments,
        shrink: float,
        passes: int,
        name: str,
    ) -> RowRounder:
        """Return what rounds rows; see `rounding.methods.Rounders`."""
        if type.name in TWINS:
            twin = ggml_type(TWINS[type.name])
            return TernaryRounder(
                type, n_cols, self.rounder(twin, n_cols, moments, shrink, passes, name)
            )
        if code_tables(type.name) is None:
            self._warn(type)
            return ON_CPU.rounder(type, n_cols, moments, shrink, passes, name)
        return DeviceRounder(self, type, n_cols, moments, shrink, passes, name)

    def held_out_error(self, moments: MatrixMoments, rest: np.ndarray) -> float:
        """Return the error: on the GPU that has the moments, else on the CPU."""
        sums = moments.on_device(hold=True)
        if sums is None:
            return ON_CPU.held_out_error(moments, rest)
        with self.place() as place:
            return place.held_out_error(moments, rest)

    def search(
        self, type: GGMLType, n_cols: int, importance: np.ndarray | None
    ) -> Callable[[np.ndarray, np.ndarray], None]:
        """Return the search of a type, on a GPU if it is rounded there, too."""
        if importance is None or code_tables(type.name) is None:
            return ON_CPU.search(type, n_cols, importance)
        weights = prepare_weights(importance, n_cols)

        def run(x: np.ndarray, out: np.ndarray) -> None:
            with self.place() as place:
                place.search(type, np.ascontiguousarray(x, dtype=np.float32), weights, out)

        return run

    def _warn(self, type: GGMLType) -> None:
        with self._lock:
            if type.name not in self._refused:
                self._refused.add(type.name)
                log.warning(
                    "%s: no GPU kernel rounds this type with second moments; the CPU does", type
                )
