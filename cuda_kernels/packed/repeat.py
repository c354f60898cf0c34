"""Make a packed matrix with repeating rows from its first rows, without reading the others: for
random weights.
"""

from __future__ import annotations

import torch

from .matrix import PackedMatrix, packed_bytes


def repeat_rows(first: PackedMatrix, rows: int, n_matrices: int = 1) -> PackedMatrix:
    """Return n_matrices matrices of `rows` rows: row r of all of them is row r modulo
    `first.total_rows` of `first`, bit by bit.
    """
    period, total = first.total_rows, rows * n_matrices
    data = torch.zeros(
        packed_bytes(first.type, rows, first.cols, n_matrices),
        dtype=torch.uint8,
        device=first.device,
    )
    layout, blocks = first.layout, first.cols // first.type.block_size
    sources, targets = (
        layout.offsets(period, first.cols)[:-1],
        layout.offsets(total, first.cols)[:-1],
    )
    for (_, n, per_row), source, target in zip(layout.planes, sources, targets, strict=True):
        n_bytes = n if per_row else n * blocks  # of a row
        plane = first.data[source : source + period * n_bytes]
        whole = total // period * period * n_bytes
        data[target : target + whole].view(-1, period * n_bytes).copy_(plane)
        data[target + whole : target + total * n_bytes].copy_(plane[: total * n_bytes - whole])
    return PackedMatrix(first.type, rows, first.cols, n_matrices, data)
