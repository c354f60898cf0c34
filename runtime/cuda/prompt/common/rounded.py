"""Products of prompts in 8 bits (`--precision int8`): packed weights are rounded some rows at a
time, and both factors have one scale per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .....cuda_kernels.packed.matrix import PackedMatrix
from .....cuda_kernels.prompt import rounded as prompt_rounded
from ...common.context import Context

ROWS = 4096  # of weights in one product


def rounded_product(
    matrices: Sequence[PackedMatrix],
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    context: Context,
) -> None:
    """Compute out half[T, rows of all matrices] = x W^T + bias; see `prompt_rounded.fits`."""
    rows, cols = x.shape
    of_x = context.buffer("rounded rows", (rows, cols), torch.int8)
    row_scales = context.buffer("scales of rows", (rows,), torch.float32)
    prompt_rounded.rounded_rows(x, of_x, row_scales)
    at = 0
    for piece in _pieces(matrices):
        sizes = [few for _, _, few in piece]
        n = sum(sizes)
        of_weights = context.buffer("rounded weights", (n, cols), torch.int8)
        scales = context.buffer("scales of weights", (n,), torch.float32)
        for (matrix, first, _), *to in zip(
            piece, of_weights.split(sizes), scales.split(sizes), strict=True
        ):
            prompt_rounded.rounded_weights(matrix, first, *to)
        sums = context.buffer("sums of bytes", (rows, n), torch.int32)
        torch.ops.aten._int_mm(of_x, of_weights.t(), out=sums)
        part = slice(at, at + n)
        own_bias = None if bias is None else bias[part]
        prompt_rounded.scaled_sums(sums, row_scales, scales, out[:, part], own_bias)
        at += n


def _pieces(
    matrices: Sequence[PackedMatrix],
) -> Iterator[list[tuple[PackedMatrix, int, int]]]:
    """Yield lists of (matrix, first row, rows) with ROWS rows together, the last with the rest."""
    piece: list[tuple[PackedMatrix, int, int]] = []
    left = ROWS
    for matrix in matrices:
        first = 0
        while first < matrix.rows:
            n = min(left, matrix.rows - first)
            piece.append((matrix, first, n))
            first, left = first + n, left - n
            if not left:
                yield piece
                piece, left = [], ROWS
    if piece:
        yield piece


def buffer_bytes(rows: int, shapes: Sequence[tuple[int, int]]) -> int:
    """Return the bytes of the buffers that products of `rows` rows with matrices of these shapes
    need, besides those of other products.
    """
    n = min(ROWS, 3 * max((n for n, _ in shapes), default=0))  # matrices that see the same rows
    cols = max((cols for _, cols in shapes), default=0)
    return rows * (cols + 4) + n * (cols + 4) + rows * n * 4
