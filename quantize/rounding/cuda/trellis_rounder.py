"""Round rows with second moments on a GPU, for trellis types: the steps of
`rounding/word_rounder.py` with the same search in a tree, and the same bytes. The scales that rows
begin with come from the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....cuda_kernels.rounding import WARPS
from ....formats.codecs.trellis import PRODUCT_FACTORS
from ....formats.types import GGMLType
from ...search.trellis import SETTINGS
from ...search.trellis.tree import CODEBOOKS, LEAF
from ..layouts.words import WordLayout, word_layout
from ..word_rounder import REACH, row_scales
from .block_rounder import BlockRounder, required
from .factor import DeviceFactor
from .memory import Memory

_GROUP = 32  # columns that share a scale
_CHOICE, _SIGNS = 1 << 16, 1 << 17  # in `fields`


@dataclass(frozen=True)
class TrellisTables:
    """words, leaf_boxes, node_boxes, index_of: see `search_tree`; factors, book_of, near: see
    `WordLayout`; multiple_of: float32[scales], factors without the type's `PRODUCT_FACTORS`;
    multiples: float32, those that can be tried, positive ones first; numbers: float32[4], reach,
    size, spread, product; fields: int32[8 * block_bytes], what each bit of a block is of.
    """

    layout: WordLayout
    words: np.ndarray
    leaf_boxes: np.ndarray
    node_boxes: np.ndarray
    index_of: np.ndarray
    factors: np.ndarray
    multiple_of: np.ndarray
    book_of: np.ndarray
    near: np.ndarray
    multiples: np.ndarray
    numbers: np.ndarray
    fields: np.ndarray

    @property
    def nodes(self) -> int:
        """Nodes per book of the tree of code words."""
        return CODEBOOKS[self.layout.type.name].nodes(LEAF)


@functools.cache
def trellis_tables(name: str) -> TrellisTables | None:
    """Return the tables of a plain type, or None if it is no trellis type."""
    if name not in CODEBOOKS:
        return None
    layout = word_layout(name)
    if layout is None:
        return None
    words, indices, leaf_boxes, node_boxes = layout.tables
    settings, type = SETTINGS[name], layout.type
    names: dict[str, Any] = settings.names(name)
    fields = np.full(8 * type.block_bytes, -1, dtype=np.int32)
    word, bit = np.indices(layout.index_bits.shape)
    fields[layout.index_bits] = 16 * word + bit
    group, bit = np.indices(layout.group_bits.shape)
    fields[layout.group_bits] = _CHOICE + 16 * group + bit
    if layout.sign_bits is not None:
        word, bit = np.indices(layout.sign_bits.shape)
        fields[layout.sign_bits] = _SIGNS + 8 * word + bit
    product = PRODUCT_FACTORS.get(name, 1.0)
    return TrellisTables(
        layout,
        words,
        leaf_boxes,
        node_boxes,
        indices.reshape(len(indices), -1),
        layout.factors,
        _multiples(layout, product),
        layout.book_of.astype(np.int32),
        np.ascontiguousarray(layout.near, dtype=np.uint16),
        np.concatenate([names["POSITIVE"], names["NEGATIVE"]]),
        np.array([REACH, names["SIZE"], names["SPREAD"], product], dtype=np.float32),
        fields,
    )


def _multiples(layout: WordLayout, product: float) -> np.ndarray:
    """Return float32[scales], the integers whose products with `product` the factors are."""
    return np.round(layout.factors.astype(np.float64) / product).astype(np.float32)


class DeviceTrellisRounder(BlockRounder):
    """`BlockRounder` of trellis types."""

    searches = False

    def __init__(
        self,
        type: GGMLType,
        n_cols: int,
        factor: DeviceFactor,
        passes: int,
        memory: Memory,
        stream: Any,
    ):
        self._tables = tables = required(trellis_tables(type.name), type)
        super().__init__(type, n_cols, factor, passes, memory, stream, 1)
        self._give(
            tables, "words", "leaf_boxes", "node_boxes", "index_of", "factors", "multiple_of"
        )
        self._give(tables, "book_of", "near", "multiples", "numbers", "fields")
        self._invert_blocks(tables.layout.dim)

    @property
    def _scale_is_half(self) -> bool:
        return False

    def _begin(self, x: Sequence[np.ndarray]) -> None:
        rows, n, name = self._rows, self.n_cols, self.type.name
        dim, stream = self._tables.layout.dim, self._stream
        self._found = self._memory.array("places", (rows, n // dim), np.uint16)
        self._signs = self._memory.array("signs", (rows, n // dim), np.uint8)
        self._choices = self._memory.filled(
            "choices", np.zeros((rows, n // _GROUP), dtype=np.uint16), stream
        )
        scales = [
            row_scales(name, np.ascontiguousarray(one, dtype=np.float32), weights)
            for one, weights in zip(x, self._factor.weights.astype(np.float32), strict=True)
        ]
        found = np.concatenate(scales).reshape(rows, 1, 1)
        self._scales = self._memory.filled("scales", found, stream)

    def _read_block(self, number: int, bytes_of_block: Any) -> None:
        pass  # scales are those of `_begin`

    def _round_block(self, number: int, piece: Any, delta: Any) -> None:
        tables, size = self._tables, self.type.block_size
        settings = SETTINGS[self.type.name]
        magnitudes, books = CODEBOOKS[self.type.name].magnitudes, len(tables.words)
        self._start(
            "round_trellis",
            self._rows,
            WARPS,
            *self._of("words", "leaf_boxes", "node_boxes"),
            self._w,
            piece,
            self._factor.feedback,
            self._inverse,
            self._metric,
            self._weights,
            delta,
            self._found,
            self._signs,
            self._choices,
            self._scales,
            *self._of("factors", "book_of", "near", "multiples", "numbers"),
            *map(np.int32, (self._rows, self._matrix_rows, self.n_cols, number * size, size)),
            *map(np.int32, (tables.nodes, magnitudes, books)),
            *map(np.int32, (len(settings.positive), len(settings.negative), settings.trials)),
            np.int32(tables.layout.dim),
        )

    def _errors(self, out: Any) -> None:
        self._elements(self._w, out)

    def _units(self, out: Any, first: int, which: int) -> None:
        self._elements(None, out)

    def _elements(self, w: Any, out: Any) -> None:
        magnitudes = CODEBOOKS[self.type.name].magnitudes
        leaves = self._tables.words.shape[1]
        self._over(
            "errors_of_trellis",
            self._rows * self.n_cols,
            self._given["words"],
            w,
            out,
            self._found,
            self._signs,
            self._choices,
            self._scales,
            *self._of("multiple_of", "book_of", "numbers"),
            np.int64(self._rows),
            *map(np.int32, (self.n_cols, leaves, magnitudes, self._tables.layout.dim)),
        )

    def _descend_chunk(self, steps: Any, first: int, width: int) -> None:
        tables, magnitudes = self._tables, CODEBOOKS[self.type.name].magnitudes
        self._start(
            "descend_trellis",
            self._rows,
            WARPS,
            *self._of("words", "leaf_boxes", "node_boxes"),
            self._factor.moments,
            self._g,
            self._inverse_moments,
            steps,
            self._found,
            self._signs,
            self._choices,
            self._scales,
            *self._of("factors", "multiple_of", "book_of", "numbers"),
            *map(np.int32, (self._rows, self._matrix_rows, self.n_cols, first, width)),
            *map(np.int32, (tables.nodes, magnitudes, tables.layout.dim)),
        )

    def _write(self, there: Any) -> None:
        type, tables = self.type, self._tables
        self._over(
            "write_trellis",
            there.size,
            there,
            self._found,
            self._signs,
            self._choices,
            self._scales,
            *self._of("index_of", "book_of", "fields"),
            np.int64(self._rows),
            *map(np.int32, (self.n_cols, type.block_bytes, self._blocks, type.block_size)),
            *map(np.int32, (tables.index_of.shape[1], tables.layout.dim)),
        )
