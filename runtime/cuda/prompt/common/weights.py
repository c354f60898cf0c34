"""Weights of the prompt path: stored blocks are decoded to the activations' dtype right before the
product that reads them, or, for few tokens, within it. Those that have this dtype are read as they
are.

Matrices with the same input are decoded one after the other into one matrix, for one product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .....cuda_kernels.packed.decode import decode_matrix
from .....cuda_kernels.packed.matrix import PackedMatrix
from .....cuda_kernels.prompt import rounded as prompt_rounded
from ....weights.linear import Embedding, Linear
from ....weights.stacked_linear import ExpertLinear
from ...common.context import Context
from ...common.held import held
from ...common.registry import Slow
from .decoded import as_stored, decoded, multiply
from .few import FewTokens
from .rounded import rounded_product

SLICE_BYTES = 256 * 2**20  # of decoded rows of an output matrix at a time


def packed(
    linear: Linear | ExpertLinear | Embedding,
    context: Context,
    *,
    biased: bool = False,
    uneven: bool = False,
) -> PackedMatrix:
    """Return what `held` does. biased: the caller adds its bias. uneven: it takes any number of
    rows. `Slow` if nobody adds a bias, or if rows or columns are not multiples of 8.
    """
    if linear.bias is not None and not biased:
        raise Slow(f"{linear.role} has a bias")
    matrix = held(linear, context)
    if matrix.cols % 8 or (matrix.rows % 8 and not uneven):
        raise Slow(f"{linear.role} is {matrix.rows} x {matrix.cols}, not multiples of 8")
    return matrix


class Product:
    """x W^T for matrices stacked by rows: half[T, cols] to half[T, all rows], in buffer `name`.
    part: only these rows of the stack, for one matrix. exact: never in 8 bits. uneven: one matrix
    of any number of rows; columns of the product after these, up to a multiple of 8, are undefined.
    """

    def __init__(
        self,
        name: str,
        linears: list[Linear],
        context: Context,
        part: slice | None = None,
        *,
        exact: bool = False,
        uneven: bool = False,
    ):
        self.name, self.context = name, context
        self.matrices = [packed(linear, context, biased=True, uneven=uneven) for linear in linears]
        self.observed = [name for linear in linears for name in linear.observed]
        self.bias = _joined_bias(linears, context)
        self.cols, self.rows = self.matrices[0].cols, sum(m.rows for m in self.matrices)
        self._part = part
        self._rounds = (
            context.rounds
            and not exact
            and part is None
            and all(prompt_rounded.fits(m.rows, m.cols) for m in self.matrices)
        )
        if part is not None:
            [_] = linears
            first, last, _ = part.indices(self.rows)
            self.rows = last - first
            self.bias = None if self.bias is None else self.bias[part].contiguous()
            if first % 8 or self.rows % 8:
                raise Slow(f"rows {first} to {last} of {linears[0].role}, not multiples of 8")
        self._few = None
        if any(matrix.rows % 8 for matrix in self.matrices):
            if len(linears) > 1 or self.bias is not None:
                raise Slow(f"{self.rows} rows of several matrices, or with a bias")
            self.rows += -self.rows % 8
        else:
            self._few = FewTokens(self.matrices, self.bias, part, context)

    def _weights(self) -> list[tuple[slice, torch.Tensor]]:
        """Return matrices half[rows, cols], each with its columns of the product."""
        if self._few is None:
            [matrix] = self.matrices  # tensor cores want multiples of 8 rows
            out = self.context.buffer("weights", (self.rows, self.cols), self.context.dtype)
            decode_matrix(matrix, self.context.dtype, out=out[: matrix.rows])
            return [(slice(None), out)]
        stored = [as_stored(m, self.context.dtype) for m in self.matrices]
        found, first = [], 0
        for matrix in stored:
            if matrix is None or self._part is not None:
                return [(slice(None), decoded(self.matrices, self.context, self._part))]
            found.append((slice(first, first + len(matrix)), matrix))
            first += len(matrix)
        return found

    def out(self, rows: int) -> torch.Tensor:
        """The buffer for the product of so many rows of x."""
        return self.context.buffer(self.name, (rows, self.rows), self.context.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return half[n, rows], the product with x half[n, cols] and the bias, in a buffer that the
        next call overwrites.
        """
        self.context.taps.show(self.observed, x)
        out = self.out(len(x))
        if self._rounds and len(x) >= prompt_rounded.FEWEST_ROWS:
            rounded_product(self.matrices, x, out, self.bias, self.context)
        elif self._few is not None and self._few.takes(x):
            self._few(x, out)
        else:
            self._multiply(x, self._weights(), out)
        return out

    def _multiply(
        self, x: torch.Tensor, weights: list[tuple[slice, torch.Tensor]], out: torch.Tensor
    ) -> None:
        for columns, matrix in weights:
            bias = None if self.bias is None else self.bias[columns]
            multiply(x, matrix, out[:, columns], bias)

    def pieces(self, x: torch.Tensor, rows: int) -> Iterator[torch.Tensor]:
        """Compute the product `rows` rows at a time, and yield these rows of `out`. The weights are
        decoded once; in 8 bits, or if there are few, all rows are computed first.
        """
        if self._rounds or (self._few is not None and self._few.takes(x)):
            yield from self(x).split(rows)
            return
        weights, out = self._weights(), self.out(len(x))
        for part, result in zip(x.split(rows), out.split(rows), strict=True):
            self._multiply(part, weights, result)
            yield result


def _joined_bias(linears: list[Linear], context: Context) -> torch.Tensor | None:
    """Return the biases of all rows in half, 0 for matrices without one; None if none has one."""
    if all(linear.bias is None for linear in linears):
        return None
    parts = [
        torch.zeros(linear.rows, device=context.device)
        if linear.bias is None
        else linear.bias.to(context.device)
        for linear in linears
    ]
    return torch.cat(parts).to(context.dtype)


def rows_of_slice(cols: int, itemsize: int) -> int:
    """Return how many rows of an output matrix are decoded at a time."""
    return max(32, SLICE_BYTES // (cols * itemsize) // 32 * 32)


class PromptOutput:
    """Logits float32 of half[T, width]: the output matrix, decoded a slice of rows at a time."""

    def __init__(self, linear: Linear, context: Context):
        self.context, self.matrix = context, packed(linear, context, uneven=True)
        step = rows_of_slice(self.matrix.cols, context.dtype.itemsize)
        self.slices = [
            (first, min(step, self.matrix.rows - first))
            for first in range(0, self.matrix.rows, step)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits float32[n, vocabulary] of x half[n, width], in new memory."""
        out = torch.empty(len(x), self.matrix.rows, dtype=torch.float32, device=x.device)
        stored = as_stored(self.matrix, x.dtype)
        for first, n in self.slices:
            if stored is not None and n % 8 == 0:
                part = stored[first : first + n]
                out[:, first : first + n] = torch.mm(x, part.t(), out_dtype=torch.float32)
                continue
            # Tensor cores want multiples of 8. What is past the last row is not used.
            shape = -(-n // 8) * 8, self.matrix.cols
            part = self.context.buffer("weights", shape, x.dtype)
            decode_matrix(self.matrix, x.dtype, first_row=first, n_rows=n, out=part[:n])
            out[:, first : first + n] = torch.mm(x, part.t(), out_dtype=torch.float32)[:, :n]
        return out
