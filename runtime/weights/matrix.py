"""What a product needs of a weight matrix, and products on the reference path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from ...formats.types import GGMLType

if TYPE_CHECKING:
    from ...cuda_kernels.packed.matrix import PackedMatrix
    from .rounded import RoundedRows


# Up to so many rows, products with the matrix as it is stored take less time than decoding it, if
# decoded matrices stay in memory, and if they are decoded for every product.
FEW_ROWS, FEW_ROWS_ONCE = 4, 16


class MatrixLike(Protocol):
    """What a product needs of a weight matrix: `encoded.Matrix` or `resident.ResidentMatrix`."""

    @property
    def rows(self) -> int:
        """Elements of the output."""
        ...

    @property
    def cols(self) -> int:
        """Elements of the input."""
        ...

    @property
    def device(self) -> torch.device:
        """Return the device on which products with it are computed."""
        ...

    @property
    def type(self) -> GGMLType:
        """Return the type in the file."""
        ...

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of the matrix in the file."""
        ...

    @property
    def packed(self) -> PackedMatrix | None:
        """The matrix in the memory of a GPU, with all others of its tensor; None on the CPU, and if
        no kernel reads it.
        """
        ...

    def parts(self) -> Iterable[tuple[int, torch.Tensor]]:
        """Pieces that cover the matrix: the first row and float32[rows, cols] of each."""
        ...

    @property
    def stacked(self) -> Sequence[MatrixLike]:
        """Return the matrices that this one consists of, the rows of each after those of the one
        before, if products are with one after the other.
        """
        ...

    def is_few(self, n: int) -> bool:
        """Return whether `few` takes less time than decoding for n rows, if it can multiply."""
        ...

    def few_of_each(
        self, matrices: Sequence[MatrixLike], counts: Sequence[int], x: torch.Tensor
    ) -> torch.Tensor | None:
        """Products of `counts[i]` rows of x float32[rows, cols] with matrix i, one after the other,
        as `few`; None if these matrices cannot do that together.
        """
        ...

    def few(self, x: torch.Tensor) -> torch.Tensor | None:
        """Products with few rows x float32[rows, cols], as `product`, without decoding the matrix
        first; None if this matrix cannot do that.
        """
        ...

    def rounded(self) -> torch.Tensor | None:
        """The matrix in 8 bits, for `RoundedRows.products`; None if products with many rows are in
        float32.
        """
        ...

    def round_rows(self, x: torch.Tensor) -> RoundedRows:
        """Return x float32[rows, cols] in 8 bits, if the matrix can be."""
        ...

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """float32[len(rows), cols]: the rows with these indices."""
        ...


def product(matrix: MatrixLike, x: torch.Tensor) -> torch.Tensor:
    """x float32[rows, cols] times the transposed matrix, on the device of x; computed on the device
    of the matrix.
    """
    return proven_product(matrix, x)[0]


def proven_product(matrix: MatrixLike, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `product` returns, and what is not finite if that is not, to be checked in its
    place.
    """
    many = x.device == matrix.device and not matrix.is_few(len(x))
    if many and (packed := matrix.rounded()) is not None:
        return matrix.round_rows(x).products([(packed, 0, len(x))], matrix.rows)
    y = _product(matrix, x)
    return y, y


def grouped_products(
    matrices: Sequence[MatrixLike], x: torch.Tensor, counts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products of x float32[rows, cols] with matrix e for `counts[e]` rows, one after
    the other; and what is not finite if they are not.
    """
    if matrices[0].stacked:
        columns = zip(*(matrix.stacked for matrix in matrices), strict=True)
        parts = [grouped_products(column, x, counts) for column in columns]
        y = torch.cat([y for y, _ in parts], dim=1)
        return y, torch.cat([proof.flatten() for _, proof in parts])
    start, here = 0, x.device == matrices[0].device
    few, many = list[_Group](), list[_Group]()
    for matrix, n in zip(matrices, counts, strict=True):
        if n:
            (few if here and matrix.is_few(n) else many).append(_Group(matrix, start, n))
            start += n
    packed = [(g.matrix.rounded() if here else None, g.first, g.n) for g in many]
    known = [(memory, first, n) for memory, first, n in packed if memory is not None]
    if many and len(known) == len(many):
        y, proof = matrices[0].round_rows(x).products(known, matrices[0].rows)
        proofs = [proof, *_add_few(few, x, y)]
        return y, proof if len(proofs) == 1 else torch.cat([p.flatten() for p in proofs])
    y = x.new_empty(len(x), matrices[0].rows)
    for matrix, first, n in many:
        y[first : first + n] = _product(matrix, x[first : first + n])
    _add_few(few, x, y)
    return y, y


class _Group(NamedTuple):
    """Rows first..first + n of x, which are multiplied with a matrix."""

    matrix: MatrixLike
    first: int
    n: int


def _add_few(groups: Sequence[_Group], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Write products of few rows each to y, and return them."""
    if not groups:
        return []
    matrices, _, counts = zip(*groups, strict=True)
    rows = torch.cat([torch.arange(g.first, g.first + g.n) for g in groups])
    found = matrices[0].few_of_each(matrices, counts, x if len(rows) == len(x) else x[rows])
    if found is None:
        found = torch.cat([_product(m, x[f : f + n]) for m, f, n in groups])
    y[rows] = found
    return [found]


def _product(matrix: MatrixLike, x: torch.Tensor) -> torch.Tensor:
    if x.device != matrix.device:
        return _product(matrix, x.to(matrix.device)).to(x.device)
    if matrix.is_few(len(x)) and (found := matrix.few(x)) is not None:
        return found
    y: torch.Tensor | None = None
    for start, part in matrix.parts():
        if len(part) == matrix.rows:
            return F.linear(x, part)
        if y is None:
            y = x.new_empty(len(x), matrix.rows)
        y[:, start : start + len(part)] = F.linear(x, part)
    return x.new_empty(len(x), 0) if y is None else y


def transposed_product(matrix: MatrixLike, x: torch.Tensor) -> torch.Tensor:
    """x float32[rows, matrix.rows] times the matrix, on the device of x."""
    if x.device != matrix.device:
        return transposed_product(matrix, x.to(matrix.device)).to(x.device)
    y = x.new_zeros(len(x), matrix.cols)
    for start, part in matrix.parts():
        y += x[:, start : start + len(part)] @ part
    return y
