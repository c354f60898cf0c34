"""The tensors of one rank, as a source: row ranges, column ranges at block boundaries, or whole
matrices of a stack, read from the mapped file when they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...errors import ShapeError
from ...formats.source import Source, TensorInfo, WrappedSource
from ...formats.tensor_names import OUTPUT
from ...formats.types import GGMLType
from .split_plan import Range, SplitPlan, TensorSplit, length


class ShardSource(WrappedSource):
    """What rank `rank` of a plan holds of `inner`: tensors of local shapes, without those of which
    the rank holds nothing. An output that is the embedding is an `output.weight` here.
    """

    def __init__(self, inner: Source, plan: SplitPlan, rank: int):
        super().__init__(inner)
        self.plan, self.rank = plan, rank
        self.whole = {tensor.name: tensor for tensor in inner.tensors}
        if (split := plan.tensors.get(OUTPUT)) is not None and split.tied:
            self.whole[OUTPUT] = replace(self.whole[split.tied], name=OUTPUT)
        found = (local_tensor(t, plan.of(t.name), rank) for t in self.whole.values())
        self.tensors = tuple(tensor for tensor in found if tensor is not None)

    def stored(self, tensor: TensorInfo) -> TensorInfo:
        """Return the whole tensor of `inner`."""
        tied = self.plan.of(tensor.name).tied
        whole = self.whole[tensor.name]
        return replace(whole, name=tied) if tied else whole

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return uint8[stop - start, row_bytes]: local rows, read-only views where they are rows of
        the file.
        """
        split, whole = self.plan.of(tensor.name), self.stored(tensor)
        if split.kind in ("copy", "one"):
            return self.inner.read_rows(whole, start, stop)
        axis = split.axis % len(whole.shape)
        ranges = split.ranges[self.rank]
        if axis == len(whole.shape) - 1:
            rows = self.inner.read_rows(whole, start, stop)
            return cut_columns(whole.type, rows, whole.n_cols, ranges)
        runs = list(row_runs(whole, axis, ranges, start, stop)) or [(0, 0)]
        pieces = [self.inner.read_rows(whole, *run) for run in runs]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def read_bytes(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return uint8[stop - start]: any bytes of the local tensor."""
        return Source.read_bytes(self, tensor, start, stop)

    def period(self, tensor: TensorInfo) -> int:
        """Return the number of local rows after which the local tensor repeats itself."""
        split, whole = self.plan.of(tensor.name), self.stored(tensor)
        period = self.inner.period(whole)
        if period >= whole.n_rows:
            return tensor.n_rows
        axis = split.axis % len(whole.shape)
        if split.kind in ("copy", "one") or axis == len(whole.shape) - 1:
            return period
        ranges = split.ranges[self.rank]
        n_stacks, rows = math.prod(whole.shape[:axis]), math.prod(whole.shape[axis:-1])
        if n_stacks == 1:
            return min(period, tensor.n_rows) if len(ranges) == 1 else tensor.n_rows
        # Matrix i begins with the row of matrix i + n if n matrices are a multiple of the period.
        n = period // math.gcd(period, rows)
        return min(tensor.n_rows, n * (tensor.n_rows // n_stacks))


def local_tensor(whole: TensorInfo, split: TensorSplit, rank: int) -> TensorInfo | None:
    """Return the part of a tensor that a rank holds; None for nothing. ShapeError for cuts that its
    type does not allow.
    """
    axis = split.axis % len(whole.shape)
    ranges = split.of(rank, whole.shape[axis])
    if not (size := sum(map(length, ranges))):
        return None
    if split.kind not in ("copy", "one"):
        unit = unit_of(whole, axis)
        for cut in {end for both in ranges for end in both}:
            if cut % unit or not 0 <= cut <= whole.shape[axis]:
                raise ShapeError(
                    f"dimension {axis} of {list(whole.shape)} cannot be cut at {cut}: {whole.type}"
                    f" allows multiples of {unit}",
                    tensor=whole.name,
                )
    shape = (*whole.shape[:axis], size, *whole.shape[axis + 1 :])
    return TensorInfo(whole.name, shape, whole.type)


def unit_of(tensor: TensorInfo, axis: int) -> int:
    """Return what cuts of dimension `axis` of a tensor have to be multiples of: blocks of columns,
    groups of interleaved rows.
    """
    axis %= len(tensor.shape)
    if axis == len(tensor.shape) - 1:
        return tensor.type.row_multiple
    return tensor.type.group_rows if axis == len(tensor.shape) - 2 else 1


def cut_columns(
    type: GGMLType, rows: np.ndarray, n_cols: int, ranges: Sequence[Range]
) -> np.ndarray:
    """Return the columns in `ranges` of rows uint8[n, row_bytes] of n_cols columns, with the row
    headers. Interleaved rows are whole groups: the headers of the group, then blocks of all its
    rows for each block of columns.
    """
    group, step = type.group_rows, type.row_multiple
    merged = rows.reshape(len(rows) // group, -1)
    head = group * type.header_bytes
    step_bytes = group * (step // type.block_size) * type.block_bytes
    blocks = merged[:, head:].reshape(len(merged), n_cols // step, step_bytes)
    pieces = [merged[:, :head]] if head else []
    pieces += [
        blocks[:, start // step : stop // step].reshape(len(merged), -1) for start, stop in ranges
    ]
    cut = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
    return np.ascontiguousarray(cut).reshape(len(rows), -1)


def row_runs(
    whole: TensorInfo, axis: int, ranges: Sequence[Range], start: int, stop: int
) -> Iterator[Range]:
    """Return the runs of rows of the whole tensor that local rows start..stop are, in their order.
    ranges: of dimension `axis`, which is not that of columns.
    """
    inner = math.prod(whole.shape[axis + 1 : -1])  # rows for each element of the dimension
    rows = whole.shape[axis] * inner
    scaled = [(first * inner, last * inner) for first, last in ranges]
    local = sum(map(length, scaled))
    run: Range | None = None
    for stack in range(start // local, -(-stop // local)):
        at = stack * local
        for first, last in scaled:
            low, high = max(start, at), min(stop, at + last - first)
            if low < high:
                begin = stack * rows + first + low - at
                if run is not None and run[1] == begin:
                    run = run[0], begin + high - low
                else:
                    if run is not None:
                        yield run
                    run = begin, begin + high - low
            at += last - first
    if run is not None:
        yield run
