"""Tables of a type of words, for the kernels of `cuda_kernels/sources/rounding/words.cu`.

An element has the value (d * factor) * entry, as `word_layout` divides it. Trellis types have
generators instead of tables, and no kernels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ....cuda_kernels.rounding import MOST_COLUMNS
from ..layouts.bits import NibbleScale
from ..layouts.words import ParityLayout, WordLayout, word_layout

_CHOICE = 1 << 16  # in `fields`: bits of choices
HALF, FLOAT, NIBBLES = 1, 0, 2  # how scales are stored


@dataclass(frozen=True)
class WordTables:
    """factors: float32[choices]; book_of: int32[choices], into books float32[books, dim, count]
    (IQ4_KSS: [books, 1, codes]); near: uint16[choices, tried]; choice_bits: int16[groups, bits];
    fields: int32[8 * block_bytes], what each bit of a block is of.
    """

    layout: WordLayout
    factors: np.ndarray
    book_of: np.ndarray
    books: np.ndarray
    near: np.ndarray
    choice_bits: np.ndarray
    fields: np.ndarray

    @property
    def count(self) -> int:
        """Words per book."""
        return self.books.shape[2]

    @property
    def in_codes(self) -> bool:
        """Return whether a word is a code for each element, with an even number of ones."""
        return isinstance(self.layout, ParityLayout)

    @property
    def stored(self) -> int:
        """How scales are stored: HALF, FLOAT or NIBBLES."""
        scale = self.layout.scale
        return NIBBLES if isinstance(scale, NibbleScale) else HALF if scale.half else FLOAT

    @property
    def groups(self) -> int:
        """Groups of a block, each with a choice of scale."""
        return len(self.choice_bits)

    @property
    def group(self) -> int:
        """Return the number of columns of a group."""
        return self.layout.type.block_size // self.groups


@functools.cache
def word_tables(name: str) -> WordTables | None:
    """Return the tables of a plain type, or None if it has no words in tables."""
    layout = word_layout(name)
    if layout is None or layout.is_trellis or layout.type.block_size > MOST_COLUMNS:
        return None
    type = layout.type
    fields = np.full(8 * type.block_bytes, -1, dtype=np.int32)
    if isinstance(layout, ParityLayout):  # the lowest bit of a word is one of its group's scale
        bits = np.arange(8 * type.block_bytes)
        fields[:] = bits
        choice_bits = bits[::16].reshape(-1, 8)
    else:
        choice_bits = layout.group_bits
        word, bit = np.indices(layout.index_bits.shape)
        fields[layout.index_bits] = 16 * word + bit
    group, bit = np.indices(choice_bits.shape)
    fields[choice_bits] = _CHOICE + 16 * group + bit
    return WordTables(
        layout,
        layout.factors,
        layout.book_of.astype(np.int32),
        np.ascontiguousarray(layout.tables[0], dtype=np.float32),
        np.ascontiguousarray(layout.near, dtype=np.uint16),
        choice_bits.astype(np.int16),
        fields,
    )
