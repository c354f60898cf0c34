"""Where a type of vectors stores its indices and signs, and the vectors of its table.

As in `layout.py` the decoder says it: a bit that only changes signs is one of a vector's signs, and
other bits that change no more than eight elements are of an index.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ....formats.codecs.codec import decode
from ....formats.types import GGMLType, ggml_type
from ..kernels.vectors import SIZE
from .bits import Scale, block_bodies, put_bits

_TRIES = 24
VECTORS = {
    "IQ2_XXS": Scale(0),
    "IQ2_XS": Scale(0),
    "IQ2_S": Scale(0),
    "IQ3_XXS": Scale(0),
    "IQ3_S": Scale(0),
}


@dataclass(frozen=True)
class VectorLayout:
    """The bits of a type's block: `index_bits` int64[indices, bits], `sign_bits` int64[vectors,
    bits]; `table` float32[elements of an index, entries], magnitudes; `even`: the sign of the last
    of eight elements makes the number of negative ones even.
    """

    type: GGMLType
    scale: Scale
    index_bits: np.ndarray
    sign_bits: np.ndarray
    table: np.ndarray
    even: bool

    def owners(self, rows: np.ndarray) -> np.ndarray:
        """Return the bytes uint8[rows, blocks, bytes] that scales are in."""
        return block_bodies(self.type, rows)

    def with_vectors(self, rows: np.ndarray, indices: np.ndarray, signs: np.ndarray) -> np.ndarray:
        """Return rows of bytes with other indices int64[rows, ..] and sign bits int64[rows, ..]."""
        made = put_bits(self.type, rows, self.index_bits, indices)
        return put_bits(self.type, made, self.sign_bits, signs)

    def scales(self, rows: np.ndarray, n_cols: int) -> np.ndarray:
        """Return float32[rows, n_cols / 8], what the table is multiplied by in each vector."""
        vectors = n_cols // SIZE
        none = np.zeros((len(rows), vectors * (SIZE // len(self.table))), dtype=np.int64)
        plain = self.with_vectors(rows, none, none[:, :vectors])
        values = decode(self.type, plain, n_cols, as_weights=True)
        return np.ascontiguousarray(values[:, ::SIZE] / self.table[0, 0])


@functools.cache
def vector_layout(name: str) -> VectorLayout | None:
    """Return the layout of a plain type, or None for other types than those of VECTORS."""
    if name not in VECTORS:
        return None
    type, scale = ggml_type(name), VECTORS[name]
    size, n_bits = type.block_size, 8 * type.block_bytes
    generator, at = np.random.default_rng(0), np.arange(8 * type.block_bytes)
    touched, only_signs = np.zeros((n_bits, size), dtype=bool), np.ones(n_bits, dtype=bool)
    for _ in range(_TRIES):
        base = generator.integers(0, 256, (1, type.block_bytes), dtype=np.uint8)
        scale.write(base[:, None], 1.0)
        flipped = np.repeat(base, n_bits, axis=0)
        flipped[at, at // 8] ^= (1 << (at % 8)).astype(np.uint8)
        before = decode(type, base, size, as_weights=True)
        after = decode(type, flipped, size, as_weights=True)
        touched |= after != before
        only_signs &= (np.abs(after) == np.abs(before)).all(axis=1)
    counts = touched.sum(axis=1)
    first = touched.argmax(axis=1)
    of_sign = only_signs & (counts > 0) & (counts <= 2)
    of_index = ~only_signs & (counts > 0) & (counts <= SIZE)
    width = int(counts[of_index].max())
    index_bits = np.stack(
        [np.flatnonzero(of_index & (first // width == i)) for i in range(size // width)]
    )
    sign_bits = np.stack(
        [np.flatnonzero(of_sign & (first // SIZE == i)) for i in range(size // SIZE)]
    )
    return VectorLayout(
        type,
        scale,
        index_bits,
        sign_bits,
        _table(type, scale, index_bits, width),
        even=sign_bits.shape[1] == SIZE - 1,
    )


def _table(type: GGMLType, scale: Scale, index_bits: np.ndarray, width: int) -> np.ndarray:
    count = 1 << index_bits.shape[1]
    rows = np.zeros((count, type.block_bytes), dtype=np.uint8)
    scale.write(rows[:, None], 1.0)
    indices = np.repeat(np.arange(count)[:, None], len(index_bits), axis=1)
    values = decode(
        type, put_bits(type, rows, index_bits, indices), type.block_size, as_weights=True
    )
    return np.ascontiguousarray(values[:, :width].T)
