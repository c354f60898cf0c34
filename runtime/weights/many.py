"""The many matrices of one tensor, each made when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from .matrix import MatrixLike


class Matrices(Sequence[MatrixLike]):
    """n matrices, of which `make` makes the i-th one. A model of 700 billion parameters has 45,000
    matrices of experts; whoever only asks for its sizes, or runs it on GPUs, needs few of them.
    """

    def __init__(self, n: int, make: Callable[[int], MatrixLike]):
        self._made: list[MatrixLike | None] = [None] * n
        self._make = make

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, index: int) -> MatrixLike: ...
    @overload
    def __getitem__(self, index: slice) -> list[MatrixLike]: ...
    def __getitem__(self, index: int | slice) -> MatrixLike | list[MatrixLike]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        found = self._made[index]
        if found is None:
            i = range(len(self))[index]
            found = self._made[i] = self._make(i)
        return found
