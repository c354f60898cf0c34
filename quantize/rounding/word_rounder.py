"""Round rows of weights with a factor of second moments, for types that store words: IQ1_S, IQ1_M,
IQ2_KL and trellis types.

For every group of a block, the scales that may be best are tried: the words of the group are chosen
one after another by the metric of their columns, each with the errors before it, and the scale with
the least error is kept. Refinement moves words, then scales of blocks or rows, then words again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import UnsupportedTypeError
from ...formats.codecs.codec import decode_plain
from ...formats.codecs.trellis import PRODUCT_FACTORS
from ...formats.kernel import CompiledLoop, specialize, specialized_loop, unbound
from ...formats.types import GGMLType
from ..encode import row_encoder
from ..search.lanes import largest_magnitude
from ..search.trellis import SETTINGS
from ..search.trellis.scales import scale_calls
from ..search.trellis.tree import CODEBOOKS, FAN, LEAF
from .factor import Factor, diagonal_blocks, inverses, metric_of_words
from .kernels import even_words, word_search, words
from .kernels.codes import refit
from .kernels.feedback import compensate, product
from .layouts.words import ParityLayout, WordLayout, word_layout
from .rounder import StagedRounder

# The part of the best error beyond which boxes are skipped: from 0.3 on, the held-out error of
# mini-llama is that of an exact search within 0.5 %.
REACH = 0.3

guess_scale = choose_d = unbound


def row_scales(name: str, w: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return float32[rows], the scales of rows of a trellis type as they are stored. weights:
    float32[n]. Raise UnsupportedTypeError for a type without a trellis.
    """
    scales = _loops(name, CODEBOOKS[name].dim, False)[2]
    if scales is None:
        raise UnsupportedTypeError(f"{name} has no trellis")
    d = np.empty(len(w), dtype=np.float32)
    scales(w, weights, d)
    d /= np.float32(PRODUCT_FACTORS.get(name, 1.0))
    return d


def _row_scales(w, weights, d):
    """d float32[rows] = what the search of a trellis type starts with."""
    groups = np.empty((w.shape[1] // 32, 2), dtype=np.float32)
    own = np.empty(w.shape[1], dtype=np.float32)
    for r in range(len(w)):
        top = largest_magnitude(w[r])
        d[r] = np.float32(0)
        if top == 0:
            continue
        for b in range(len(groups)):
            energy = np.float32(0)
            for i in range(32 * b, 32 * b + 32):
                own[i] = abs(w[r, i]) / top
                energy += (weights[i] * own[i]) * own[i]
            groups[b, 0] = guess_scale(own[32 * b : 32 * b + 32], weights[32 * b : 32 * b + 32])
            groups[b, 1] = energy
        d[r] = choose_d(groups) * top


@functools.cache
def _loops(
    name: str, dim: int, parity: bool
) -> tuple[CompiledLoop, CompiledLoop, CompiledLoop | None]:
    """Return the compiled loops of a type: rounding, refinement, and the scales of rows."""
    trellis = name in CODEBOOKS
    names: dict[str, Any] = {"DIM": dim, "LEAF": LEAF if trellis else 0, "MAGNITUDES": False}
    if trellis:
        book, settings = CODEBOOKS[name], SETTINGS[name]
        names |= settings.names(name) | {
            "NODES": book.nodes(LEAF),
            "FAN": FAN,
            "REACH": REACH,
            "MAGNITUDES": book.magnitudes,
        }
        for one, template in scale_calls(settings.spread > 0).items():
            names[one] = specialize(template, **names)
        names["score_one"] = specialize(word_search._score_one, **names)
    names["prepare"] = specialize(word_search._prepare, **names)
    if parity:
        names["conditional"] = specialize(even_words._conditional, **names)
        names["codes_in_turn"] = specialize(even_words._codes_in_turn, **names)
    put = even_words._put_codes if parity else word_search._put_word
    names["put_word"] = specialize(put, **names)
    in_books = word_search._nearest_in_tree if trellis else word_search._nearest_in_table
    find = even_words._nearest_even if parity else in_books
    names["nearest"] = specialize(find, **names)
    names["candidates"] = specialize(
        words._candidates_by_norm if trellis else words._candidates_near, **names
    )
    return (
        specialized_loop(words._round_words, **names),
        specialized_loop(words._descend_words, **names),
        specialized_loop(_row_scales, **names) if trellis else None,
    )


class WordRounder(StagedRounder):
    """Round rows to a plain type of words; used as `rounder.Rounder` is."""

    def __init__(self, type: GGMLType, n_cols: int, factor: Factor, passes: int = 1):
        layout = word_layout(type.name)
        if layout is None:
            raise UnsupportedTypeError(f"{type.name} cannot be rounded with second moments")
        self.type, self.n_cols, self.factor, self.passes = type, n_cols, factor, passes
        self.layout: WordLayout = layout
        self.order = layout.order_of(n_cols)
        if self.order is not None:
            original, factor = factor, factor.ordered(self.order)
            self.factor = factor
        else:
            original = factor
        self.weights = factor.weights.astype(np.float32)
        width = n_cols if type.header_bytes else type.block_size
        self.searches = (
            []
            if layout.is_trellis
            else [
                row_encoder(type, width, original.weights[first : first + width])
                for first in range(0, n_cols, width)
            ]
        )
        self._inverse, self._metric = metric_of_words(factor, layout.dim)
        blocks = diagonal_blocks(factor.moments.astype(np.float64), layout.dim)
        self._inverse_moments = inverses(blocks)
        parity = isinstance(layout, ParityLayout)
        self._round, self._descend, _ = _loops(type.name, layout.dim, parity)

    def stages(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the bytes of rows after error feedback, and after each refinement."""
        searched = np.ascontiguousarray(x, dtype=np.float32)
        w = searched if self.order is None else np.ascontiguousarray(searched[:, self.order])
        layout, n, size = self.layout, self.n_cols, self.type.block_size
        found = np.zeros((len(w), n // layout.dim), dtype=np.int64)
        signs = np.zeros_like(found)
        delta = np.zeros(w.shape, dtype=np.float32)
        made = self._searched_rows(searched)
        d = self._scales_of(made)
        chosen = layout.chosen(made)
        per_block = len(layout.group_bits)
        for number, first in enumerate(range(0, n, size)):
            t = w[:, first : first + size].copy()
            compensate(delta, self.factor.feedback, t, first)
            blocks = slice(number * per_block, (number + 1) * per_block)
            if not self.type.header_bytes:
                at = slice(number * self.type.block_bytes, (number + 1) * self.type.block_bytes)
                piece = np.empty((len(w), self.type.block_bytes), dtype=np.uint8)
                self.searches[number](t, piece)
                made[:, at] = piece
                d = self._scales_of(piece)
                chosen[:, blocks] = layout.chosen(piece)
            of_block = np.ascontiguousarray(chosen[:, blocks])
            self._round(
                w,
                t,
                self.factor.feedback,
                self._inverse,
                self._metric,
                self.weights,
                np.ascontiguousarray(d[:, 0]),
                layout.factors,
                layout.book_of,
                layout.near,
                *layout.tables,
                of_block,
                found,
                signs,
                delta,
                first,
            )
            chosen[:, blocks] = of_block
        made = layout.with_words(made, chosen, found, signs)
        if layout.is_trellis:  # its scale is a guess until now
            g = self._errors(w, made)
            made = self._rescaled(made, g)
            yield made
        else:
            yield made
            if not self.passes:
                return
            g = self._errors(w, made)
        for _ in range(self.passes):
            made = self._moved(made, chosen, found, signs, g)
            made = self._moved(self._rescaled(made, g), chosen, found, signs, g)
            yield made

    def _searched_rows(self, w: np.ndarray) -> np.ndarray:
        """Return the bytes of rows with the scales of a type that has one for a row."""
        made = np.zeros((len(w), self.type.row_bytes(self.n_cols)), dtype=np.uint8)
        if self.layout.is_trellis:
            d = row_scales(self.type.name, w, self.weights)
            self.layout.scale.write(self.layout.owners(made), d[:, None])
        elif self.type.header_bytes:
            self.searches[0](w, made)
        return made

    def _scales_of(self, made: np.ndarray) -> np.ndarray:
        return self.layout.scale.read(self.layout.owners(made))

    def _values(self, made: np.ndarray) -> np.ndarray:
        values = decode_plain(self.type, made, self.n_cols)
        return values if self.order is None else np.ascontiguousarray(values[:, self.order])

    def _errors(self, w: np.ndarray, made: np.ndarray) -> np.ndarray:
        g = np.empty_like(w)
        product(w - self._values(made), self.factor.moments, g)
        return g

    def _moved(
        self,
        made: np.ndarray,
        chosen: np.ndarray,
        found: np.ndarray,
        signs: np.ndarray,
        g: np.ndarray,
    ) -> np.ndarray:
        """Return bytes with better words. g: float32[rows, n], (weights - values) H, is kept up."""
        layout = self.layout
        d = self._scales_of(made)
        scales = np.repeat(d, chosen.shape[1] // d.shape[1], axis=1) * layout.factors[chosen]
        self._descend(
            self._values(made),
            g,
            self.factor.moments,
            self._inverse_moments,
            np.ascontiguousarray(scales, dtype=np.float32),
            layout.book_of[chosen],
            *layout.tables,
            found,
            signs,
        )
        return layout.with_words(made, chosen, found, signs)

    def _rescaled(self, made: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Return bytes with better scales of blocks or rows; g as in `_moved`."""
        layout, q, made = self.layout, self._values(made), made.copy()
        scales = self._scales_of(made)[:, :, None]
        unit = made.copy()
        layout.scale.write(layout.owners(unit), 1.0)
        half = layout.scale.half
        refit(self._values(unit)[None], scales, q, g, self.factor.moments, half)
        layout.scale.write(layout.owners(made), scales[:, :, 0])
        return made
