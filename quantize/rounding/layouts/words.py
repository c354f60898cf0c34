"""Where a type of words stores its indices and the scales of its groups, and what its words are.

For types with a table the decoder says it: bits that change no more elements than a word has are of
its index, other bits that change no more than a group has are of its scale. Trellis types have
indices that only the generator understands; their bits are said here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ....formats.codecs.codec import decode_plain
from ....formats.codecs.trellis import PRODUCT_FACTORS
from ....formats.tables import IQ4K_VALUES, IQ4NL_VALUES
from ....formats.types import GGMLType, ggml_type
from ...search.trellis.tree import search_tree
from .bits import NibbleScale, Scale, get_bits, put_bits, scale_owners

_TRIES = 24
_LARGEST_GROUP = 64


# Types with a table: the elements of a word, the scale of the block or row, and how many scales of
# a group are tried, those most like the one that the search chose first.
TABLES = {
    "IQ2_KL": (2, Scale(0), 64),
    "IQ1_S": (8, Scale(0), 6),
    "IQ1_M": (8, NibbleScale(), 3),
    "IQ1_S_R4": (8, Scale(0), 6),
    "IQ1_M_R4": (8, Scale(0), 4),
}


@dataclass(frozen=True)
class WordLayout:
    """The bits of a type's block: `index_bits` int64[words, bits], `group_bits` int64[groups,
    bits], `sign_bits` int64[words, dim] or None.

    dim: elements of a word; factors: float32[scales], what d is multiplied by, and book_of:
    int64[scales], for each number that group_bits can have; near: int64[scales, n], the ones to try
    after each; tables: the four arrays of the search for a word.
    """

    type: GGMLType
    scale: Scale | NibbleScale
    dim: int
    index_bits: np.ndarray
    group_bits: np.ndarray
    sign_bits: np.ndarray | None
    factors: np.ndarray
    book_of: np.ndarray
    near: np.ndarray
    tables: tuple[np.ndarray, ...]

    @property
    def is_trellis(self) -> bool:
        """Whether words come from a generator and not from a table."""
        return self.tables[0].dtype == np.int8

    def order_of(self, n_cols: int) -> np.ndarray | None:
        """Return int64[n_cols], the columns in the order of words, or None if it is theirs."""
        return None

    def owners(self, rows: np.ndarray) -> np.ndarray:
        """Return the bytes uint8[rows, owners, bytes] that scales are in: headers, or blocks."""
        return scale_owners(self.type, rows)

    def chosen(self, rows: np.ndarray) -> np.ndarray:
        """Return int64[rows, groups], the numbers of the groups' scales."""
        return get_bits(self.type, rows, self.group_bits)

    def with_words(
        self, rows: np.ndarray, chosen: np.ndarray, found: np.ndarray, signs: np.ndarray
    ) -> np.ndarray:
        """Return rows of bytes with other scales of groups, words and signs, int64[rows, ...]."""
        if self.is_trellis:
            per_group = len(self.index_bits) // len(self.group_bits)
            books = np.repeat(self.book_of[chosen], per_group, axis=1)
            indices = self.tables[1]
            found = indices.reshape(len(indices), -1)[books, found]
        made = put_bits(self.type, rows, self.group_bits, chosen)
        made = put_bits(self.type, made, self.index_bits, found)
        if self.sign_bits is None:
            return made
        bits = (signs[:, :, None] >> np.arange(self.dim)) & 1
        return put_bits(self.type, made, self.sign_bits.reshape(-1, 1), bits.reshape(len(rows), -1))


class ParityLayout(WordLayout):
    """IQ4_KSS: the codes of four elements have an even number of ones together, and are stored with
    a bit of the group's scale in 16 bits. See `quantize/search/iq4_kss.py`.
    """

    def order_of(self, n_cols: int) -> np.ndarray | None:
        within = np.array([2 * n + e for n in range(8) for e in (0, 16, 1, 17)])
        return (np.arange(0, n_cols, 32)[:, None] + within).reshape(-1)

    def chosen(self, rows: np.ndarray) -> np.ndarray:
        words = self._stored(rows)
        ones = (words & 1).reshape(len(rows), -1, 8).astype(np.int64)
        return (ones << np.arange(8)).sum(axis=2)

    def with_words(
        self, rows: np.ndarray, chosen: np.ndarray, found: np.ndarray, signs: np.ndarray
    ) -> np.ndarray:
        words = found.astype(np.uint16)
        for shift in (1, 2, 4, 8):
            words ^= words >> shift
        ones = (chosen[:, :, None] >> np.arange(8)) & 1
        words = words & 0xFFFE | ones.reshape(found.shape).astype(np.uint16)
        head = rows[:, : self.type.header_bytes]
        return np.concatenate([head, words.astype("<u2").view(np.uint8)], axis=1)

    def _stored(self, rows: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(rows[:, self.type.header_bytes :]).view("<u2")


def _parity_layout() -> ParityLayout:
    numbers, nothing = np.arange(256), np.zeros((1, 1, 1), dtype=np.float32)
    factors, books = ((numbers & 254) - 127).astype(np.float32), numbers & 1
    tables = IQ4K_VALUES.reshape(2, 1, 16).astype(np.float32)
    values = factors[:, None] * tables[books, 0]
    distance = ((values[:, None] - values[None]) ** 2).sum(axis=2)
    near = np.argsort(distance, axis=1, kind="stable")[:, :32].astype(np.int64)
    return ParityLayout(
        ggml_type("IQ4_KSS"),
        Scale(0, half=False),
        4,
        np.zeros((64, 0), dtype=np.int64),
        np.zeros((8, 0), dtype=np.int64),
        None,
        factors,
        books,
        near,
        (tables, np.zeros((1, 1, 1), dtype=np.int32), nothing, nothing),
    )


@functools.cache
def word_layout(name: str) -> WordLayout | None:
    """Return the layout of a plain type, or None for a type without words."""
    if name in TABLES:
        return _table_layout(name)
    if name in _TRELLIS:
        return _trellis_layout(name)
    return _parity_layout() if name == "IQ4_KSS" else None


def _table_layout(name: str) -> WordLayout:
    type, (dim, scale, tried) = ggml_type(name), TABLES[name]
    size, n_bits, head = type.block_size, 8 * type.block_bytes, type.header_bytes
    generator, at = np.random.default_rng(0), np.arange(8 * type.block_bytes)
    touched = np.zeros((n_bits, size), dtype=bool)
    for _ in range(_TRIES):
        base = generator.integers(0, 256, (1, type.row_bytes(size)), dtype=np.uint8)
        scale.write(base[:, None, :head] if head else base[:, None], 1.0)
        flipped = np.repeat(base, n_bits, axis=0)
        flipped[at, head + at // 8] ^= (1 << (at % 8)).astype(np.uint8)
        with np.errstate(invalid="ignore", over="ignore"):
            touched |= decode_plain(type, flipped, size) != decode_plain(type, base, size)
    counts, first = touched.sum(axis=1), touched.argmax(axis=1)
    of_word = (counts > 0) & (counts <= dim)
    of_group = (counts > dim) & (counts <= _LARGEST_GROUP) & (counts < max(size, dim + 1) + 1)
    if not head:
        of_group &= counts < size
    group = int(counts[of_group].max())
    index_bits = np.stack(
        [np.flatnonzero(of_word & (first // dim == i)) for i in range(size // dim)]
    )
    group_bits = np.stack(
        [np.flatnonzero(of_group & (first // group == i)) for i in range(size // group)]
    )
    values = _values(type, scale, index_bits, group_bits, dim)
    factors, book_of, books = _divided(values)
    distance = np.array([[((a - b) ** 2).sum() for b in values] for a in values])
    near = np.argsort(distance, axis=1, kind="stable")[:, :tried].astype(np.int64)
    nothing = np.zeros((1, 1, 1), dtype=np.float32)
    tables = books, np.zeros((1, 1, 1), dtype=np.int32), nothing, nothing
    return WordLayout(
        type, scale, dim, index_bits, group_bits, None, factors, book_of, near, tables
    )


def _values(
    type: GGMLType,
    scale: Scale | NibbleScale,
    index_bits: np.ndarray,
    group_bits: np.ndarray,
    dim: int,
) -> np.ndarray:
    """Return float64[scales, words, dim], the values of every word with every scale and d = 1."""
    entries, head = 1 << index_bits.shape[1], type.header_bytes
    found = []
    for number in range(1 << group_bits.shape[1]):
        rows = np.zeros((entries, type.row_bytes(type.block_size)), dtype=np.uint8)
        scale.write(rows[:, None, :head] if head else rows[:, None], 1.0)
        rows = put_bits(type, rows, group_bits, np.full((entries, len(group_bits)), number))
        indices = np.repeat(np.arange(entries)[:, None], len(index_bits), axis=1)
        rows = put_bits(type, rows, index_bits, indices)
        found.append(decode_plain(type, rows, type.block_size)[:, :dim].astype(np.float64))
    return np.stack(found)


def _divided(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (factors float32[scales], book_of int64[scales], books float32[books, dim, words])
    whose products are `values`.
    """
    sizes = np.abs(values).max(axis=(1, 2))
    unit = sizes[sizes > 0].min()
    factors = (sizes / unit).astype(np.float32)
    books: list[np.ndarray] = []
    book_of = np.zeros(len(values), dtype=np.int64)
    for number, (factor, one) in enumerate(zip(factors, values, strict=True)):
        if factor == 0:
            continue
        book = (one / factor).astype(np.float32).T
        same = [i for i, other in enumerate(books) if np.array_equal(book, other)]
        if not same:
            books.append(np.ascontiguousarray(book))
        book_of[number] = same[0] if same else len(books) - 1
    return factors, book_of, np.stack(books)


def _bits(*starts_and_counts: tuple[int, int]) -> list[int]:
    return [start + k for start, count in starts_and_counts for k in range(count)]


def _nibbles(b: int) -> list[int]:
    return _bits((8 * (b & 3) + 4 * (b >> 2), 4))


# The bits of words and groups, from `formats/codecs/trellis.py`.
_TRELLIS = {
    "IQ1_KT": (
        [
            _bits(
                (64 + 8 * m, 8),
                (320 + 8 * (m & 15) + 4 * (m >> 4), 4),
                (8 * (m // 4) + 4 + m % 4, 1),
            )
            for m in range(32)
        ],
        [_bits((8 * b, 4)) for b in range(8)],
    ),
    "IQ2_KT": ([_bits((32 + 16 * m, 16)) for m in range(32)], [_nibbles(b) for b in range(8)]),
    "IQ3_KT": ([_bits((32 + 16 * m, 16)) for m in range(32)], [_nibbles(b) for b in range(8)]),
    "IQ4_KT": (
        [
            _bits(
                (256 + 8 * m, 8),
                (768 + 8 * (m & 31) + 4 * (m >> 5), 4),
                (32 * (m // 8) + 8 + 3 * (m & 7), 3),
            )
            for m in range(64)
        ],
        [_bits((32 * b, 8)) for b in range(8)],
    ),
}
_SIGNS = 8 * 68 + 8 * (np.arange(256) % 32) + np.arange(256) // 32  # of IQ3_KT


def _trellis_layout(name: str) -> WordLayout:
    words, groups = _TRELLIS[name]
    numbers = np.arange(1 << len(groups[0]))
    multiples, books = numbers, np.zeros(len(numbers), dtype=np.int64)
    if name == "IQ4_KT":
        multiples, books = (numbers >> 1) - 64, numbers & 1
    elif name != "IQ3_KT":
        multiples = IQ4NL_VALUES.astype(np.int64)
    near = np.zeros((books.max() + 1, 256), dtype=np.int64)
    near[books, multiples + 128] = numbers
    return WordLayout(
        ggml_type(name),
        Scale(0, half=False),
        4 if name == "IQ4_KT" else 8,
        np.array(words),
        np.array(groups),
        _SIGNS.reshape(32, 8) if name == "IQ3_KT" else None,
        (multiples * PRODUCT_FACTORS.get(name, 1.0)).astype(np.float32),
        books,
        near,
        search_tree(name),
    )
