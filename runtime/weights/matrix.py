"""What a product needs of a weight matrix, and products on the reference path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from ...cuda_kernels.ops import PackedMatrix


FEW_ROWS = 4  # from there on, decoding once and a product of float32 take less time


class MatrixLike(Protocol):
    """What a product needs of a weight matrix: `encoded.Matrix` or `resident.ResidentMatrix`."""

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """Return the device on which products with it are computed."""
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

    def few(self, x: torch.Tensor) -> torch.Tensor | None:
        """Products with few rows x float32[rows, cols], as `product`, without decoding the matrix
        first; None if this matrix cannot do that.
        """
        ...

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """float32[len(rows), cols]: the rows with these indices."""
        ...


def product(matrix: MatrixLike, x: torch.Tensor) -> torch.Tensor:
    """x float32[rows, cols] times the transposed matrix, on the device of x; computed on the device
    of the matrix.
    """
    if x.device != matrix.device:
        return product(matrix, x.to(matrix.device)).to(x.device)
    if len(x) <= FEW_ROWS and (found := matrix.few(x)) is not None:
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
