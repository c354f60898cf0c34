"""A place on a GPU: memory in which one batch of matrices at a time is rounded, and what threads
ask of it.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....formats.types import GGMLType
from ..tensor_moments import MatrixMoments
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


@dataclass(eq=False)  # one is found again by its identity
class Rounding:
    """How rows of a matrix are rounded: to which type, with which second moments, `passes`
    refinements; name: of the tensor.
    """

    type: GGMLType
    n_cols: int
    moments: MatrixMoments
    shrink: float
    passes: int
    name: str


@dataclass
class Request:
    """Rows that a thread waits for: the bytes after every stage if `staged`, else in the end."""

    wanted: Rounding
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
        """How many requests of this key one batch may have."""
        n = self.wanted.n_cols
        by_memory = min(_FACTOR_BYTES // (16 * n * n), MOST_ELEMENTS // max(1, self.x.size))
        return max(1, min(_MOST_MATRICES, by_memory))


class Place:
    """Memory for one batch at a time on a GPU, and the rounder that was last made in it."""

    def __init__(self, device: Any):
        self.device, self.number = device, device.number
        self.held: Rounding | None = None  # whose rounder was made last
        self._memory: Memory | None = None
        self._stream: Any = None
        self._rounder: BlockRounder | None = None

    def answer(self, batch: Sequence[Request]) -> None:
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

    def _make(self, wanted: Sequence[Rounding]) -> None:
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
        arrays = encoder.arrays(len(x), memory.numbered("searched"))
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
        """Return the error on held-out text of errors `rest`, float64[rows, n_cols]."""
        return held_out_error_there(moments, rest, self.number, *self._ready())

    def _ready(self) -> tuple[Memory, Any]:
        if self._memory is None:
            self._memory, self._stream = Memory(self.device), self.device.stream()
        return self._memory, self._stream
