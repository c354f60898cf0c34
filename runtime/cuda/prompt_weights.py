"""Weights of the prompt path: stored blocks are decoded to the activations' dtype right before the
product that reads them.

Matrices that see the same rows are decoded below one another and multiplied at once.
"""

from __future__ import annotations

import torch

from ...cuda_kernels import ops
from ..linear import Embedding, ExpertLinear, Linear
from .context import Context
from .registry import Slow

SLICE_BYTES = 256 * 2**20  # of decoded rows of an output matrix at a time


def packed(linear: Linear | ExpertLinear | Embedding, context: Context) -> ops.PackedMatrix:
    """The matrix as it lies on the device. `Slow` if it lies elsewhere, or its product adds a bias."""
    held = getattr(linear if isinstance(linear, ExpertLinear) else linear.matrix, "packed", None)
    if held is None or held.data.device != context.device:
        raise Slow(f"the weights of {linear.role} are not on {context.device}")
    if getattr(linear, "bias", None) is not None:
        raise Slow(f"{linear.role} has a bias")
    if held.cols % 8 or held.rows % 8:
        raise Slow(f"{linear.role} is {held.rows} x {held.cols}, not multiples of 8")
    return held


class Product:
    """x W^T for matrices that lie below one another: half[T, cols] to half[T, all rows], in buffer
    `name`.
    """

    def __init__(self, name: str, linears: list[Linear], context: Context):
        self.name, self.context = name, context
        self.matrices = [packed(linear, context) for linear in linears]
        self.cols, self.rows = self.matrices[0].cols, sum(m.rows for m in self.matrices)

    def weights(self) -> torch.Tensor:
        """half[rows, cols], decoded now."""
        return stacked(self.matrices, self.context)

    def out(self, rows: int) -> torch.Tensor:
        """Where the product of so many rows of x is put."""
        return self.context.buffer(self.name, (rows, self.rows), self.context.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weights().t(), out=self.out(len(x)))


def stacked(
    matrices: list[ops.PackedMatrix], context: Context, name: str = "weights"
) -> torch.Tensor:
    """Decoded to half[all rows, cols] in a buffer. A stack of experts counts with the rows of all
    of them.
    """
    cols, rows = matrices[0].cols, [m.rows * m.n_matrices for m in matrices]
    out = context.buffer(name, (sum(rows), cols), context.dtype)
    for matrix, part in zip(matrices, out.split(rows), strict=True):
        ops.decode_matrix(matrix, context.dtype, out=part)
    return out


class Output:
    """Logits float32 of half[T, width]: the output matrix, decoded a slice of rows at a time."""

    def __init__(self, linear: Linear, context: Context):
        self.context, self.matrix = context, packed(linear, context)
        step = max(8, SLICE_BYTES // (self.matrix.cols * context.dtype.itemsize) // 32 * 32)
        self.slices = [
            (first, min(step, self.matrix.rows - first))
            for first in range(0, self.matrix.rows, step)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), self.matrix.rows, dtype=torch.float32, device=x.device)
        for first, n in self.slices:
            part = self.context.buffer("weights", (n, self.matrix.cols), self.context.dtype)
            ops.decode_matrix(self.matrix, self.context.dtype, first_row=first, n_rows=n, out=part)
            out[:, first : first + n] = torch.mm(x, part.t(), out_dtype=torch.float32)
        return out
