"""What rounding needs of second moments, whoever collected them; how a tensor is rounded."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...formats.source import TensorInfo
from ...formats.types import GGMLType
from .methods import ON_CPU, Encoder, Rounders
from .row_metric import CoupledRounder
from .rows import RowMetrics
from .stretch import stretched
from .tensor_moments import MatrixMoments, TensorMoments

# moments(name, shape) -> moments of a tensor, or None for a tensor that has none
MomentsLookup = Callable[[str, tuple[int, ...]], TensorMoments | None]


class TensorRounding(Protocol):
    """How the rows of a tensor are rounded. large_pieces: see `methods.Rounders`. whole_matrices:
    all rows of a matrix are rounded in one call.
    """

    @property
    def large_pieces(self) -> bool:
        """See `methods.Rounders`."""
        ...

    @property
    def whole_matrices(self) -> bool:
        """Whether all rows of a matrix are needed in one call."""
        ...

    def encoder(
        self, type: GGMLType, n_cols: int, index: int
    ) -> Callable[[np.ndarray, np.ndarray], None]:
        """Return run(x float32[rows, n_cols], out uint8[rows, row_bytes]) for rows of matrix
        `index` and the plain `type`.
        """
        ...


@dataclass(frozen=True)
class Rounding:
    """How a tensor is rounded: with these moments, shrunk by `shrink`, and refined `passes` times.

    name: the tensor's, for messages. rounders: where. info: the tensor of the source, and rows: the
    metrics of rows of that source; without them rows are rounded on their own. stretch: what scales
    are multiplied by in the end.
    """

    name: str
    moments: TensorMoments
    shrink: float
    passes: int
    rounders: Rounders = ON_CPU
    info: TensorInfo | None = None
    rows: RowMetrics | None = None
    stretch: float = 1.0

    @property
    def large_pieces(self) -> bool:
        """See `methods.Rounders`."""
        return self.rounders.large_pieces

    @property
    def whole_matrices(self) -> bool:
        """Whether rows are rounded together, so that all rows of a matrix are needed in one
        call.
        """
        return self.rows is not None and self.info is not None and self.rows.couples(self.info)

    def encoder(
        self, type: GGMLType, n_cols: int, index: int
    ) -> Callable[[np.ndarray, np.ndarray], None]:
        """Return run(x float32[rows, n_cols], out uint8[rows, row_bytes]) for rows of matrix
        `index` and the plain `type`. The moments are factored when it is first called.
        """
        return _LazyRounder(self, type, n_cols, index)


class LazyEncoder(ABC):
    """An encoder, run(x, out), that is made when it is first called. Threads may share it."""

    def __init__(self) -> None:
        self._made: Encoder | None = None
        self._lock = threading.Lock()

    def __call__(self, x: np.ndarray, out: np.ndarray) -> None:
        with self._lock:
            if self._made is None:
                self._made = self._make()
        self._made(x, out)

    @abstractmethod
    def _make(self) -> Encoder: ...


class _LazyRounder(LazyEncoder):
    def __init__(self, rounding: Rounding, type: GGMLType, n_cols: int, index: int):
        super().__init__()
        self._rounding, self._type, self._n_cols, self._index = rounding, type, n_cols, index

    def _make(self) -> Encoder:
        r, type, n_cols = self._rounding, self._type, self._n_cols
        moments = MatrixMoments(r.moments, self._index)
        rounder = r.rounders.rounder(type, n_cols, moments, r.shrink, r.passes, r.name)
        run = stretched(type, rounder, r.stretch)
        metric = None if r.rows is None or r.info is None else r.rows.of(r.info)
        return run if metric is None else CoupledRounder(type, n_cols, run, metric)
