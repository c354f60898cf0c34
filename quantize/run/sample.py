"""A `Source` of some rows of a model, on which a run can be tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...formats.source import Source, TensorInfo, WrappedSource
from .piece import ImportanceLookup


@dataclass(frozen=True)
class RowSample:
    """Rows start..stop of a tensor: part of one of its matrices, or several whole ones."""

    tensor: TensorInfo
    start: int
    stop: int

    @property
    def n_elements(self) -> int:
        """Elements of the rows."""
        return (self.stop - self.start) * self.tensor.n_cols

    @property
    def matrix_rows(self) -> int:
        """Rows of one matrix of the tensor."""
        return self.tensor.n_rows // self.tensor.n_matrices

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the sample: [rows, n_cols], or [matrices, matrix_rows, n_cols] of several
        matrices.
        """
        rows = self.stop - self.start
        return (
            (rows, self.tensor.n_cols)
            if rows <= self.matrix_rows
            else (rows // self.matrix_rows, self.matrix_rows, self.tensor.n_cols)
        )


class SampledSource(WrappedSource):
    """Some rows of `source`. The n-th sample is the tensor named `n`."""

    def __init__(self, source: Source, rows: Sequence[RowSample]):
        super().__init__(source)
        self.rows = tuple(rows)
        self.tensors = tuple(
            TensorInfo(str(number), own.shape, own.tensor.type)
            for number, own in enumerate(self.rows)
        )

    def stored(self, tensor: TensorInfo) -> TensorInfo:
        return self.rows[int(tensor.name)].tensor

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        own = self.rows[int(tensor.name)]
        return self.inner.read_rows(own.tensor, own.start + start, own.start + stop)

    def read_bytes(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        return Source.read_bytes(self, tensor, start, stop)

    def close(self) -> None:
        """Leave the source open: its owner closes it."""

    def importance(self, lookup: ImportanceLookup | None) -> ImportanceLookup | None:
        """Return `lookup` for the tensors of this source."""
        return (
            None
            if lookup is None
            else lambda name, shape: self._weights(lookup, self.rows[int(name)])
        )

    @staticmethod
    def _weights(lookup: ImportanceLookup, own: RowSample) -> np.ndarray | None:
        weights = lookup(own.tensor.name, own.tensor.shape)
        return (
            None
            if weights is None
            else weights[own.start // own.matrix_rows : -(-own.stop // own.matrix_rows)]
        )


def spread(
    tensors: Sequence[TensorInfo],
    count: int,
    n_elements: int,
    group: int,
    offset: float = 0.5,
    whole: bool = False,
) -> list[RowSample]:
    """Return `count` samples of about `n_elements` each, evenly spaced over all rows of `tensors`,
    in whole groups of `group` rows.

    offset: 0 to 1, the position of each sample in its share of the rows. whole: a sample may span
    matrices.
    """
    ends = np.cumsum([tensor.n_elements for tensor in tensors])
    samples = []
    for index in range(count):
        at = int((index + offset) / count * int(ends[-1]))
        number = min(int(np.searchsorted(ends, at, side="right")), len(tensors) - 1)
        tensor = tensors[number]
        row = (at - int(ends[number]) + tensor.n_elements) // tensor.n_cols
        matrix_rows = tensor.n_rows // tensor.n_matrices
        if (
            whole
            and (matrices := min(n_elements // (matrix_rows * tensor.n_cols), tensor.n_matrices))
            > 1
        ):
            first = min(row // matrix_rows, tensor.n_matrices - matrices)
            samples.append(RowSample(tensor, first * matrix_rows, (first + matrices) * matrix_rows))
            continue
        rows = min(matrix_rows, max(1, n_elements // tensor.n_cols // group) * group)
        inside = min(row % matrix_rows // group * group, (matrix_rows - rows) // group * group)
        start = row // matrix_rows * matrix_rows + inside
        samples.append(RowSample(tensor, start, start + rows))
    return samples
