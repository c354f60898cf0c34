"""Round rows of weights with a factor of second moments, for types that store vectors of eight.

As in `rounder.py`: the search finds the scales of a block on compensated columns, then each vector
is chosen by the metric of its columns, and its error goes to the columns after it. Refinement moves
vectors, then scales of blocks, then vectors again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...errors import UnsupportedTypeError
from ...formats.codecs.codec import decode
from ...formats.types import GGMLType
from ..encode import row_encoder
from .factor import Factor, diagonal_blocks, inverses, metric_of_words
from .kernels.codes import refit
from .kernels.feedback import compensate, product
from .kernels.vectors import SIZE, descend_vectors, round_vectors
from .layouts.vectors import VectorLayout, vector_layout
from .rounder import StagedRounder


class VectorRounder(StagedRounder):
    """Round rows to a plain type of vectors; used as `rounder.Rounder` is."""

    def __init__(self, type: GGMLType, n_cols: int, factor: Factor, passes: int = 1):
        layout = vector_layout(type.name)
        if layout is None:
            raise UnsupportedTypeError(f"{type.name} cannot be rounded with second moments")
        self.type, self.n_cols, self.factor, self.passes = type, n_cols, factor, passes
        self.layout: VectorLayout = layout
        size = type.block_size
        self.searches = [
            row_encoder(type, size, factor.weights[first : first + size])
            for first in range(0, n_cols, size)
        ]
        self._inverse, self._metric = metric_of_words(factor, SIZE)
        blocks = diagonal_blocks(factor.moments.astype(np.float64), SIZE)
        self._inverse_moments = inverses(blocks)

    def stages(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the bytes of rows after error feedback, and after each refinement."""
        w = np.ascontiguousarray(x, dtype=np.float32)
        layout, n, size = self.layout, self.n_cols, self.type.block_size
        indices = np.zeros((len(w), n // len(layout.table)), dtype=np.int64)
        signs = np.zeros((len(w), n // SIZE), dtype=np.int64)
        delta = np.zeros(w.shape, dtype=np.float32)
        pieces = []
        for number, first in enumerate(range(0, n, size)):
            t = w[:, first : first + size].copy()
            compensate(delta, self.factor.feedback, t, first)
            piece = np.empty((len(w), self.type.block_bytes), dtype=np.uint8)
            self.searches[number](t, piece)
            round_vectors(
                w,
                t,
                self.factor.feedback,
                self._inverse,
                self._metric,
                layout.scales(piece, size),
                layout.table,
                layout.even,
                indices,
                signs,
                delta,
                first,
            )
            pieces.append(piece)
        made = layout.with_vectors(np.concatenate(pieces, axis=1), indices, signs)
        yield made
        if not self.passes:
            return
        g = np.empty_like(w)
        product(w - self._values(made), self.factor.moments, g)
        for _ in range(self.passes):
            made = self._moved(made, indices, signs, g)
            made = self._moved(self._rescaled(made, g), indices, signs, g)
            yield made

    def _values(self, made: np.ndarray) -> np.ndarray:
        return decode(self.type, made, self.n_cols, as_weights=True)

    def _moved(
        self, made: np.ndarray, indices: np.ndarray, signs: np.ndarray, g: np.ndarray
    ) -> np.ndarray:
        """Return bytes with better vectors. g: float32[rows, n], (weights - values) H, is kept
        up.
        """
        layout = self.layout
        descend_vectors(
            self._values(made),
            g,
            self.factor.moments,
            self._inverse_moments,
            layout.scales(made, self.n_cols),
            layout.table,
            layout.even,
            indices,
            signs,
        )
        return layout.with_vectors(made, indices, signs)

    def _rescaled(self, made: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Return bytes with better scales of blocks; g as in `_moved`."""
        layout, q, made = self.layout, self._values(made), made.copy()
        scales = layout.scale.read(layout.owners(made))[:, :, None]
        unit = made.copy()
        layout.scale.write(layout.owners(unit), 1.0)
        refit(self._values(unit)[None], scales, q, g, self.factor.moments, True)
        layout.scale.write(layout.owners(made), scales[:, :, 0])
        return made
