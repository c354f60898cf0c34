"""Tables of a type of vectors, for the kernels of `cuda_kernels/sources/rounding/vectors.cu`.

An element has the value (d * factor) * sign * entry. All of these products are exact: halves have
11 bits, factors at most 5 and entries at most 6.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ....cuda_kernels.rounding import MOST_COLUMNS, MOST_MAGNITUDES
from ..kernels.vectors import SIZE
from ..layouts.bits import put_bits
from ..layouts.vectors import VectorLayout, vector_layout

_SIGNS = 1 << 16  # in `fields`


@dataclass(frozen=True)
class VectorTables:
    """factors: float32[choices]; entries: float32[size, count]; choice_bits: int16[groups, bits];
    fields: int32[8 * block_bytes], what each bit of a block is of. even: see `VectorLayout`.
    """

    layout: VectorLayout
    factors: np.ndarray
    entries: np.ndarray
    choice_bits: np.ndarray
    fields: np.ndarray

    @property
    def size(self) -> int:
        """Return the elements of an entry: 4 or 8."""
        return self.entries.shape[0]

    @property
    def count(self) -> int:
        """Entries of the codebook."""
        return self.entries.shape[1]

    @property
    def even(self) -> bool:
        """Whether the sign of the last of eight elements follows from the others."""
        return self.layout.even

    @property
    def groups(self) -> int:
        """Groups of a block, each with a choice of scale."""
        return len(self.choice_bits)

    @property
    def group(self) -> int:
        """Return the number of columns of a group."""
        return self.layout.type.block_size // self.groups


@functools.cache
def vector_tables(name: str) -> VectorTables | None:
    """Return the tables of a plain type, or None if it has no vectors."""
    layout = vector_layout(name)
    if layout is None:
        return None
    type = layout.type
    if layout.table.size > MOST_MAGNITUDES or type.block_size > MOST_COLUMNS:
        return None
    bits = _choice_bits(layout)
    fields = np.full(8 * type.block_bytes, -1, dtype=np.int32)
    index, bit = np.indices(layout.index_bits.shape)
    fields[layout.index_bits] = 16 * index + bit
    vector, bit = np.indices(layout.sign_bits.shape)
    fields[layout.sign_bits] = _SIGNS + 8 * vector + bit
    choices = np.arange(1 << bits.shape[1])
    rows = np.zeros((len(choices), type.block_bytes), dtype=np.uint8)
    layout.scale.write(layout.owners(rows), 1.0)
    rows = put_bits(type, rows, bits, np.repeat(choices[:, None], len(bits), axis=1))
    factors = layout.scales(rows, type.block_size)
    if not (factors == factors[:, :1]).all():
        raise AssertionError(f"{name}: groups have different scales")
    return VectorTables(
        layout,
        np.ascontiguousarray(factors[:, 0]),
        np.ascontiguousarray(layout.table),
        bits.astype(np.int16),
        fields,
    )


def _choice_bits(layout: VectorLayout) -> np.ndarray:
    """Return int64[groups, bits], the bits of a block that are neither of indices nor of signs nor
    of its scale: each changes the scale of the vectors of one group.
    """
    type = layout.type
    used = np.zeros(8 * type.block_bytes, dtype=bool)
    used[layout.index_bits] = used[layout.sign_bits] = True
    used[8 * layout.scale.offset : 8 * (layout.scale.offset + layout.scale.n_bytes)] = True
    free = np.flatnonzero(~used)
    rows = np.zeros((len(free) + 1, type.block_bytes), dtype=np.uint8)
    rows[np.arange(len(free)), free // 8] = 1 << (free % 8)
    layout.scale.write(layout.owners(rows), 1.0)
    scales = layout.scales(rows, type.block_size)
    changed = scales[:-1] != scales[-1]
    width = int(changed.sum(axis=1).max())
    first = changed.argmax(axis=1) // width
    return np.stack([free[first == group] for group in range(type.block_size // SIZE // width)])
