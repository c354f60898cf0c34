"""Weights that are decoded before the product that reads them."""

from __future__ import annotations

import torch

from .....cuda_kernels.packed.decode import decode_matrix
from .....cuda_kernels.packed.matrix import PackedMatrix
from ...common.context import Context


def stacked(matrices: list[PackedMatrix], context: Context, name: str = "weights") -> torch.Tensor:
    """Decode to half[all rows, cols] in a buffer; a stack of experts has the rows of all."""
    cols, rows = matrices[0].cols, [m.rows * m.n_matrices for m in matrices]
    out = context.buffer(name, (sum(rows), cols), context.dtype)
    for matrix, part in zip(matrices, out.split(rows), strict=True):
        decode_matrix(matrix, context.dtype, out=part)
    return out


def decoded(
    matrices: list[PackedMatrix], context: Context, part: slice | None = None
) -> torch.Tensor:
    """Return what `stacked` does. part: only these rows, of one matrix."""
    if part is None:
        return stacked(matrices, context)
    [matrix] = matrices
    first, last, _ = part.indices(matrix.rows)
    out = context.buffer("weights", (last - first, matrix.cols), context.dtype)
    decode_matrix(matrix, context.dtype, first_row=first, n_rows=last - first, out=out)
    return out


def multiply(
    x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Compute out half[n, rows] = x half[n, cols] times weights half[rows, cols], plus bias
    half[rows].
    """
    if bias is None:
        torch.mm(x, weights.t(), out=out)
    else:
        torch.addmm(bias, x, weights.t(), out=out)
