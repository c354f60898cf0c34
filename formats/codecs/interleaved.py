"""Row-interleaved types: K rows stored as one unit, block by block, so that a CPU kernel reads K
rows at once.

A group of K rows begins with their K row headers (if the type has any); then, for each block
position, the blocks of all rows are merged into one. The layouts are in `interleaved_*.py`, one
function per type: for row k and element i of a block it lists where each field's bits are in the
row's own block and where in the merged one. `bit_moves.py` makes both directions of it.
"""

from __future__ import annotations

import functools

import numpy as np

from ...errors import ShapeError
from ..types import GGMLType
from . import interleaved_grid, interleaved_iq_k, interleaved_k, interleaved_legacy
from .bit_moves import Interleaving

# Layouts by type name.
INTERLEAVERS = (
    interleaved_legacy.LAYOUTS
    | interleaved_k.LAYOUTS
    | interleaved_grid.LAYOUTS
    | interleaved_iq_k.LAYOUTS
)

_LEAST_ELEMENTS = 2  # BF16_R16 merges pairs of elements, though a block of BF16 is a single one


@functools.cache
def interleaving(type: GGMLType) -> Interleaving:
    """Return the tables of the interleaved `type`, made on first use. Its row blocks are those of
    its plain type if it has one.
    """
    elements = max(type.block_size, _LEAST_ELEMENTS)
    row_bytes = elements // type.block_size * type.block_bytes
    return Interleaving(INTERLEAVERS[type.name], type.group_rows, elements, row_bytes)


def pack_rows(type: GGMLType, rows: np.ndarray, n_cols: int) -> np.ndarray:
    """Turn rows of the plain type, uint8[n, bytes], n a multiple of K, into as many rows of
    `type`.
    """
    tables = _tables(type, n_cols)
    wide, head = row_head(type), type.header_bytes
    if not len(rows):
        return np.empty((0, type.row_bytes(n_cols)), dtype=np.uint8)
    rows = rows.reshape(len(rows) // type.group_rows, type.group_rows, rows.shape[1])
    merged = np.empty((len(rows), type.group_rows * type.row_bytes(n_cols)), dtype=np.uint8)
    # Q8_KV_R8 leaves the row's sum out.
    merged[:, : type.group_rows * head] = rows[..., :head].reshape(
        len(rows), type.group_rows * head
    )
    tables.pack(rows, wide, merged, type.group_rows * head)
    return merged.reshape(len(merged) * type.group_rows, type.row_bytes(n_cols))


def unpack_rows(type: GGMLType, merged: np.ndarray, n_cols: int) -> np.ndarray:
    """Undo `pack_rows`. A type without a plain type gives rows in the form that its decoder
    reads.
    """
    tables = _tables(type, n_cols)
    wide, head = row_head(type), type.header_bytes
    if not len(merged):
        return np.empty((0, wide + type.row_bytes(n_cols) - head), dtype=np.uint8)
    merged = merged.reshape(
        len(merged) // type.group_rows, type.group_rows * type.row_bytes(n_cols)
    )
    n_bytes = wide + type.row_bytes(n_cols) - head
    rows = np.empty((len(merged), type.group_rows, n_bytes), dtype=np.uint8)
    rows[..., :head] = merged[:, : type.group_rows * head].reshape(
        len(merged), type.group_rows, head
    )
    tables.unpack(merged, type.group_rows * head, rows, wide)
    if wide > head:
        sums = rows[..., wide:].view(np.int8).sum(axis=2, dtype="<i4")
        rows[..., head:wide] = sums[..., None].view(np.uint8)
    return rows.reshape(len(rows) * type.group_rows, n_bytes)


def row_head(type: GGMLType) -> int:
    """Return the bytes of a row's header once the interleaving is undone: that of the plain type if
    there is one.
    """
    return type.plain.header_bytes


def _tables(type: GGMLType, n_cols: int) -> Interleaving:
    tables = interleaving(type)
    if n_cols % tables.elements:
        raise ShapeError(
            f"row length {n_cols} is not a multiple of {tables.elements}, which {type.name} needs"
        )
    return tables
