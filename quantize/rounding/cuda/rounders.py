"""`Rounders` of GPUs: rows are rounded with second moments on whichever GPU is free. The bytes are
the CPU's, whatever the number of GPUs.

Threads that wait for a GPU at the same time with matrices of one size, as those of experts, are
served together: what is rounded does not depend on what it is rounded with.
"""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....errors import IqforgeError, UnsupportedTypeError
from ....formats.types import GGMLType, ggml_type
from ...encode import prepare_weights
from ..methods import ON_CPU, RowRounder
from ..tensor_moments import MatrixMoments
from ..ternary_rounder import TWINS, TernaryRounder
from .block_rounder import MOST_ELEMENTS, BlockRounder
from .code_rounder import CodeRounder
from .code_tables import code_tables
from .factor import DeviceFactor, Wanted, factored_there, held_out_error_there
from .memory import Memory
from .trellis_rounder import DeviceTrellisRounder, trellis_tables
from .vector_rounder import DeviceVectorRounder
from .vector_tables import vector_tables
from .word_rounder import DeviceWordRounder
from .word_tables import word_tables

# Batches at a time on each GPU: one is copied while another is rounded, and trials of few rows
# leave most of a GPU free.
PLACES = 4
_OF_A_SIZE = 2  # batches at a time of matrices that could be in one batch
_MOST_MATRICES = 32  # of a batch
_FACTOR_BYTES = 1 << 31  # of the factors of a batch
_Rounder = CodeRounder | DeviceVectorRounder | DeviceWordRounder | DeviceTrellisRounder


def rounder_there(type: GGMLType) -> builtins.type[_Rounder] | None:
    """Return the class of the rounder of a plain type on a GPU, or None if no kernel rounds it."""
    if code_tables(type.name) is not None:
        return CodeRounder
    if vector_tables(type.name) is not None:
        return DeviceVectorRounder
    if word_tables(type.name) is not None:
        return DeviceWordRounder
    return None if trellis_tables(type.name) is None else DeviceTrellisRounder


@dataclass
class _Request:
    """Rows that a thread waits for: the bytes after every stage if `staged`, else in the end."""

    wanted: DeviceRounder
    x: np.ndarray
    staged: bool
    made: list[np.ndarray] = field(default_factory=list)
    error: BaseException | None = None
    done: bool = False

    @property
    def key(self) -> tuple:
        """Requests of equal keys can be served together."""
        wanted = self.wanted
        return wanted.type.name, wanted.n_cols, len(self.x), wanted.passes, self.staged

    @property
    def most_together(self) -> int:
        n = self.wanted.n_cols
        by_memory = min(_FACTOR_BYTES // (16 * n * n), MOST_ELEMENTS // max(1, self.x.size))
        return max(1, min(_MOST_MATRICES, by_memory))


class _Place:
    """Memory for one batch at a time on a GPU, and the rounder that was last made in it."""

    def __init__(self, device: Any):
        self.device, self.number = device, device.number
        self.held: DeviceRounder | None = None  # whose rounder was made last
        self._memory: Memory | None = None
        self._stream: Any = None
        self._rounder: BlockRounder | None = None

    def answer(self, batch: Sequence[_Request]) -> None:
        """Round the rows of requests of one key."""
        first = batch[0]
        if len(batch) > 1 or self.held is not first.wanted or self._rounder is None:
            self._make([one.wanted for one in batch])
        rounder, rows = self._rounder, len(first.x)
        if rounder is None:
            raise AssertionError("a rounder was made")
        if first.staged:
            stages = list(rounder.stages([one.x for one in batch]))
        elif len(batch) > 1:
            stages = [rounder.together([one.x for one in batch])]
        else:
            stages = [np.empty((rows, first.wanted.type.row_bytes(rounder.n_cols)), np.uint8)]
            rounder(first.x, stages[0])
        for index, one in enumerate(batch):
            one.made = [made[index * rows : (index + 1) * rows] for made in stages]

    def _make(self, wanted: Sequence[DeviceRounder]) -> None:
        self.held = self._rounder = None
        first, (memory, stream) = wanted[0], self._ready()
        given = [Wanted(one.moments, one.shrink, one.name) for one in wanted]
        factor = factored_there(given, self.number, memory, stream)
        made = rounder_there(first.type)
        if made is None:
            raise AssertionError(f"{first.type} has no kernels")
        self._rounder = made(first.type, first.n_cols, factor, first.passes, memory, stream)
        self.held = first if len(wanted) == 1 else None

    def factored(self, moments: MatrixMoments, shrink: float, name: str) -> DeviceFactor:
        """Return the factor of moments, in memory that the next one overwrites."""
        self.held = self._rounder = None
        return factored_there([Wanted(moments, shrink, name)], self.number, *self._ready())

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
        [out[...]] = self._rounders.answer(_Request(self, x, staged=False))

    def stages(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the bytes of rows after error feedback, and after each refinement."""
        yield from self._rounders.answer(_Request(self, x, staged=True))


class DeviceRounders:
    """`rounding.methods.Rounders` of GPUs (`run.cuda_device.CudaDevice`)."""

    large_pieces = True

    def __init__(self, devices: Sequence[Any]):
        self._free = [_Place(device) for _ in range(PLACES) for device in devices]
        self._waiting: list[_Request] = []
        self._running: Counter[tuple] = Counter()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def place(self) -> Iterator[_Place]:
        """Yield a place that nobody else uses meanwhile."""
        with self._changed:
            while not self._free:
                self._changed.wait()
            place = self._free.pop()
        try:
            with place.device.context():
                yield place
        finally:
            self._give_back(place)

    def _give_back(self, place: _Place) -> None:
        with self._changed:
            self._free.append(place)
            self._changed.notify_all()

    def answer(self, request: _Request) -> list[np.ndarray]:
        """Return the bytes that a request asks for. The threads that wait serve each other."""
        with self._changed:
            self._waiting.append(request)
        while True:
            with self._changed:
                taken = None
                while not request.done and (taken := self._taken()) is None:
                    self._changed.wait()
            if taken is None:
                break
            place, batch = taken
            try:
                self._serve(place, batch)
            finally:
                for one in batch:
                    one.done = True
                with self._changed:
                    self._running[batch[0].key] -= 1
                self._give_back(place)
        if request.error is not None:
            raise request.error
        return request.made

    def _taken(self) -> tuple[_Place, list[_Request]] | None:
        """Take requests of one key that wait, and a place for them; None if there is none."""
        if not self._free:
            return None
        for first in self._waiting:
            key, most = first.key, first.most_together
            if most > 1 and self._running[key] >= _OF_A_SIZE:
                continue  # they wait for more of their size
            batch = [one for one in self._waiting if one.key == key][:most]
            self._waiting = [one for one in self._waiting if not any(one is b for b in batch)]
            self._running[key] += 1
            held = [i for i, place in enumerate(self._free) if place.held is first.wanted]
            return self._free.pop(held[0] if held and len(batch) == 1 else -1), batch
        return None

    @staticmethod
    def _serve(place: _Place, batch: Sequence[_Request]) -> None:
        try:
            with place.device.context():
                place.answer(batch)
        except BaseException as error:
            if len(batch) == 1 or not isinstance(error, IqforgeError):
                for one in batch:
                    one.error = error
                return
            for one in batch:  # only one of them may be to blame
                DeviceRounders._serve(place, [one])

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
        if rounder_there(type) is None:
            raise UnsupportedTypeError(f"{type.name} cannot be rounded with second moments")
        return DeviceRounder(self, type, n_cols, moments, shrink, passes, name)

    def held_out_error(self, moments: MatrixMoments, rest: np.ndarray) -> float:
        """Return the error: on the GPU that has the moments, else on the CPU."""
        sums = moments.on_device(hold=True)
        if sums is None:
            return ON_CPU.held_out_error(moments, rest)
        with self.place() as place:
            return place.held_out_error(moments, rest)

    def for_many_types(self) -> DeviceRounders:
        """Return these rounders: factoring takes less than rounding to one type."""
        return self

    def search(
        self, type: GGMLType, n_cols: int, importance: np.ndarray | None
    ) -> Callable[[np.ndarray, np.ndarray], None]:
        """Return the search of a type, on a GPU if it is rounded there, too, and has the bytes of
        the CPU there: trellis types have not.
        """
        made = rounder_there(type)
        if importance is None or made is None or not made.searches:
            return ON_CPU.search(type, n_cols, importance)
        weights = prepare_weights(importance, n_cols)

        def run(x: np.ndarray, out: np.ndarray) -> None:
            with self.place() as place:
                place.search(type, np.ascontiguousarray(x, dtype=np.float32), weights, out)

        return run
