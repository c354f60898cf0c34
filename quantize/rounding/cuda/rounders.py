"""`Rounders` of GPUs: rows are rounded with second moments on whichever GPU is free. The bytes are
the CPU's, whatever the number of GPUs.

Threads that wait for a GPU at the same time with matrices of one size, as those of experts, are
served together: what is rounded does not depend on what it is rounded with.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import IqforgeError, UnsupportedTypeError
from ....formats.types import GGMLType, ggml_type
from ...encode import prepare_weights
from ..methods import ON_CPU, RowRounder
from ..tensor_moments import MatrixMoments
from ..ternary_rounder import TWINS, TernaryRounder
from .place import Place, Request, Rounding, rounder_there

# Batches at a time on each GPU: one is copied while another is rounded, and trials of few rows
# leave most of a GPU free.
PLACES = 4
_OF_A_SIZE = 2  # batches at a time of matrices that could be in one batch


@dataclass(eq=False)
class DeviceRounder(Rounding):
    """Round rows of a matrix on the GPUs of `rounders`; see `rounding.methods.RowRounder`."""

    rounders: DeviceRounders

    def __call__(self, x: np.ndarray, out: np.ndarray) -> None:
        [out[...]] = self.rounders.answer(Request(self, x, staged=False))

    def stages(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the bytes of rows after error feedback, and after each refinement."""
        yield from self.rounders.answer(Request(self, x, staged=True))


class DeviceRounders:
    """`rounding.methods.Rounders` of GPUs (`run.cuda_device.CudaDevice`)."""

    large_pieces = True

    def __init__(self, devices: Sequence[Any]):
        self._free = [Place(device) for _ in range(PLACES) for device in devices]
        self._waiting: list[Request] = []
        self._running: Counter[tuple] = Counter()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def place(self) -> Iterator[Place]:
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

    def _give_back(self, place: Place) -> None:
        with self._changed:
            self._free.append(place)
            self._changed.notify_all()

    def answer(self, request: Request) -> list[np.ndarray]:
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

    def _taken(self) -> tuple[Place, list[Request]] | None:
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
    def _serve(place: Place, batch: Sequence[Request]) -> None:
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
        return DeviceRounder(type, n_cols, moments, shrink, passes, name, self)

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
