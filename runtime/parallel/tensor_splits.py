"""The splits of tensors that a plan collects, and what the types of tensors allow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ...formats.source import TensorInfo
from ...formats.tensor_names import TensorName
from ..weights.shard import local_tensor, unit_of
from ..weights.split_plan import NOTHING, Range, TensorSplit
from .apportion import Apportion

COLUMN_STEPS = (256, 128, 64, 32, 16)  # units of hidden columns that products like
Ranges = Sequence[Sequence[Range]]
"""For each rank the ranges of a dimension that it holds."""


class TensorSplits:
    """The tensors of a model by name, and the splits `found` so far. Bytes are reported to
    `apportion`. column_steps: units of hidden columns, from the best on.
    """

    def __init__(
        self,
        tensors: Iterable[TensorInfo],
        apportion: Apportion,
        n_ranks: int,
        column_steps: Sequence[int] = COLUMN_STEPS,
    ):
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.apportion, self.n_ranks, self.column_steps = apportion, n_ranks, column_steps
        self.found: dict[str, TensorSplit] = {}

    def copy(self, name: str) -> None:
        """Every rank has the tensor `name`, if there is one."""
        if name in self.tensors:
            self.found[name] = TensorSplit("copy")
            self.count(name)

    def rows(self, name: str, ranges: Ranges, more: Sequence[str] = ("bias",)) -> None:
        """Split the rows of each matrix of `<name>.weight`, and the elements of `more`, vectors of
        the product.
        """
        self._add(f"{name}.weight", "rows", ranges, -2)
        for suffix in more:
            self.vector(f"{name}.{suffix}", ranges)

    def vector(self, name: str, ranges: Ranges) -> None:
        """Split the elements of a vector, or of each of a stack of vectors, if there is one."""
        if name in self.tensors:
            self._add(name, "rows", ranges, -1)

    def whole_rows(self, name: str, ranges: Ranges) -> None:
        """Split the rows of a matrix that is no matrix of products. It may have a dimension of 1
        between rows and columns.
        """
        shape = self.tensors[name].shape
        self._add(name, "rows", ranges, -3 if len(shape) > 2 and shape[-1] > 1 else -2)

    def columns(self, name: str, ranges: Ranges) -> None:
        """Split the columns of each matrix of `<name>.weight`. Its bias belongs to the first rank
        that has any.
        """
        self._add(f"{name}.weight", "columns", ranges, -1, sum_after=True)
        if (bias := f"{name}.bias") in self.tensors:
            owner = next(rank for rank, found in enumerate(ranges) if clean(found))
            self.found[bias] = TensorSplit("one", owner=owner)
            self.count(bias)

    def experts(self, name: str, ranges: Ranges, *, sum_after: bool) -> None:
        """Split the stack `<name>.weight` by whole matrices, and what there is for each of them."""
        self._add(f"{name}.weight", "experts", ranges, 0, sum_after=sum_after)
        for suffix in ("bias", "scale"):
            if f"{name}.{suffix}" in self.tensors:
                self._add(f"{name}.{suffix}", "experts", ranges, 0)

    def single(self, name: str, ranges: Ranges, index: int) -> None:
        """A tensor that is expert `index` alone, of which the ranges of experts are split."""
        for rank, held in enumerate(ranges):
            if any(start <= index < stop for start, stop in held):
                self.found[name] = TensorSplit("one", owner=rank)

    def count(self, name: str) -> None:
        """Report the bytes of each rank."""
        self.apportion.count(
            [
                0
                if (local := local_tensor(self.tensors[name], self.found[name], rank)) is None
                else local.n_bytes
                for rank in range(self.n_ranks)
            ]
        )

    def row_unit(self, *names: str) -> int:
        """Return what row cuts of all these tensors have to be multiples of."""
        return least_common(*(unit_of(self.tensors[name], -2) for name in names))

    def column_unit(self, *names: str) -> int:
        """Return what column cuts of all these tensors have to be multiples of."""
        return least_common(*(unit_of(self.tensors[name], -1) for name in names))

    def _add(
        self, name: str, kind: Any, ranges: Ranges, axis: int, *, sum_after: bool = False
    ) -> None:
        held = tuple(clean(found) for found in ranges)
        self.found[name] = TensorSplit(kind, held, axis, sum_after)
        self.count(name)


def clean(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Return the ranges without empty ones, neighbours joined."""
    found: list[Range] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def scaled(range: Range, factor: int, offset: int = 0) -> Range:
    """Return the range of rows that a range of heads is: `factor` rows each, from `offset` on."""
    if range == NOTHING:
        return NOTHING
    return offset + range[0] * factor, offset + range[1] * factor


def stem(name: str) -> str:
    """Return the name of a tensor without `.weight`."""
    parsed = TensorName.parse(name)
    return name.removesuffix(f".{parsed.suffix}") if parsed.is_weight else name


def least_common(*units: int) -> int:
    """Return the least common multiple."""
    return math.lcm(*units)


def fitting(unit: int, n: int) -> int:
    """Return the unit, or n, all in one, if the unit does not divide it."""
    return unit if n % unit == 0 else n


def multiple(size: int, unit: int) -> int:
    """Return of how many pieces of `size` elements the least multiple of `unit` is."""
    return unit // math.gcd(unit, size)
