"""Weights in the dtype of activations: as they are stored, or decoded before the product that reads
them.
"""

from __future__ import annotations

import torch

from .....cuda_kernels.packed.decode import decode_matrix
from .....cuda_kernels.packed.matrix import PackedMatrix
from ...common.context import Context

_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16}


def as_stored(matrix: PackedMatrix, dtype: torch.dtype) -> torch.Tensor | None:
    """Return half[all rows, cols] where the file has this dtype, in the memory of the matrix, whose
    layout is that of the file; None for other matrices.
    """
    if _FLOATS.get(matrix.type.name) != dtype or matrix.scale != 1:
        return None
    size = matrix.total_rows * matrix.cols * dtype.itemsize
    return matrix.data[:size].view(dtype).view(matrix.total_rows, matrix.cols)


def stacked(matrices: list[PackedMatrix], context: Context, name: str = "weights") -> torch.Tensor:
    """Return half[all rows, cols], decoded in a buffer or, of one matrix, as it is stored; a stack
    of experts has the rows of all.
    """
    if len(matrices) == 1 and (found := as_stored(matrices[0], context.dtype)) is not None:
        return found
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
    if (found := as_stored(matrix, context.dtype)) is not None:
        return found[first:last]
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
