"""Measure the errors of types on GPUs: the rows of `stats`, quantized and compared as a run with
devices does it.

Rows that share their importances are gathered into pieces, as a GPU needs many rows at a time.
Pieces depend on the model and the options alone, so the figures are the same for any number of GPUs
and threads. Sums are in another order than on the CPU and agree with it to about 1e-6, except for
trellis types, whose search differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...errors import NonFiniteError
from ...formats.source import Source, TensorInfo, WrappedSource
from ...formats.types import GGMLType
from ..plan.plan import PlannedTensor
from ..plan.type_errors import ErrorSums
from ..run.cuda_worker import DeviceWorkers
from ..run.piece import OutputTensor, Piece, PieceTask, plain_type
from .row_errors import Span, encoders_of, measure_span

# Every slot of a GPU keeps the results of all types for one piece.
PIECE_ELEMENTS = 1 << 21


class GatheredRows(WrappedSource):
    """Rows of one tensor, gathered into a tensor of the same name."""

    def __init__(self, source: Source, tensor: TensorInfo, spans: Sequence[Span]):
        super().__init__(source)
        self.spans, self.whole = tuple(spans), tensor
        rows = sum(stop - start for start, stop in spans)
        self.tensors = (TensorInfo(tensor.name, (rows, tensor.n_cols), tensor.type),)

    def stored(self, tensor: TensorInfo) -> TensorInfo:
        return self.whole

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return all rows: they are read at once."""
        assert (start, stop) == (0, tensor.n_rows)
        found = [self.inner.read_rows(self.whole, *span) for span in self.spans]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def close(self) -> None:
        """Leave the source open: its owner closes it."""


class DeviceMeasurements:
    """Measurements of one call of `stats.collect_stats` on GPUs."""

    def __init__(self, workers: DeviceWorkers):
        self.workers, self._numbers = workers, itertools.count()

    def works(
        self,
        source: Source,
        tensor: TensorInfo,
        spans: Sequence[Span],
        types: Sequence[GGMLType],
        weights: np.ndarray | None,
    ) -> Iterator[tuple[int, Callable[[], list[ErrorSums]]]]:
        """Yield (number of elements, function that measures them) for each piece."""
        here = [type for type in types if plain_type(type).is_float]
        there = [type for type in types if not plain_type(type).is_float]
        for own in groups(tensor, spans, weights is not None):
            matrix = own[0][0] * tensor.n_matrices // tensor.n_rows
            importance = None if weights is None else weights[matrix]
            rows = GatheredRows(source, tensor, own)
            piece = self._piece(rows.tensors[0], there, importance)

            def work(own=own, rows=rows, piece=piece, importance=importance) -> list[ErrorSums]:
                if not there:
                    return _on_cpu(source, tensor, own, here, importance)
                try:
                    results = self.workers.work(rows, piece)
                except NonFiniteError:  # the CPU names the row, or shows how large the error is
                    return _on_cpu(source, tensor, own, types, importance)
                found = _on_cpu(source, tensor, own, here, importance) if here else []
                return [*found, *map(_sums, piece.tasks, results)]

            yield piece.n_elements, work

    def _piece(
        self, info: TensorInfo, types: Sequence[GGMLType], importance: np.ndarray | None
    ) -> Piece:
        weights = None if importance is None else importance[None]
        tasks = tuple(
            PieceTask(OutputTensor(0, 0, PlannedTensor(info, info.with_type(type))), weights)
            for type in types
        )
        return Piece(info, 0, info.n_rows, tasks, True, next(self._numbers) if tasks else None)


def groups(tensor: TensorInfo, spans: Sequence[Span], weighted: bool) -> Iterator[list[Span]]:
    """Yield the spans of each piece: of one matrix if the columns have importances, and at most
    PIECE_ELEMENTS unless a single span has more.
    """
    matrix_rows = tensor.n_rows // tensor.n_matrices
    own: list[Span] = []
    filled = 0
    for start, stop in spans:
        n_elements = (stop - start) * tensor.n_cols
        other = weighted and own and own[0][0] // matrix_rows != start // matrix_rows
        if own and (other or filled + n_elements > PIECE_ELEMENTS):
            yield own
            own, filled = [], 0
        own.append((start, stop))
        filled += n_elements
    if own:
        yield own


def _on_cpu(
    source: Source,
    tensor: TensorInfo,
    spans: Sequence[Span],
    types: Sequence[GGMLType],
    importance: np.ndarray | None,
) -> list[ErrorSums]:
    encoders = encoders_of(source, tensor, types, importance)
    return [
        sums
        for start, stop in spans
        for sums in measure_span(source, tensor, start, stop, encoders, importance)
    ]


def _sums(task: PieceTask, result: tuple[np.ndarray, np.ndarray | None]) -> ErrorSums:
    data, sums = result
    assert sums is not None  # GPUs always measure
    e2, x2, we2, wx2, largest = (float(value) for value in sums[:5])
    info, type = task.planned.source, task.planned.target.type
    return ErrorSums(type, info.n_elements, data.nbytes, e2, x2, we2, wx2, largest)
