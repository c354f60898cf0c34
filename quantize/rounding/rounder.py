"""Round rows of weights with a factor of second moments, for types with a code per element.

The search of the type finds the scales of one block after another, on columns to which the errors
of the columns before were fed back; then each column's code is chosen, and its error goes to the
columns after it. Refinement moves single codes, and then scales, as long as tr(dW H dW^T) falls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np

from ...errors import UnsupportedTypeError
from ...formats.codecs.codec import decode
from ...formats.types import GGMLType
from ..encode import row_encoder
from .factor import Factor
from .kernels import codes as code_loops
from .kernels.feedback import compensate, product
from .layouts.bits import block_bodies
from .layouts.codes import CodeLayout, code_layout

_TILE_ELEMENTS = 1 << 18  # elements of the rows that are worked on together


class StagedRounder(ABC):
    """Rounds rows in stages: called with x float32[rows, n_cols] and out uint8[rows, row_bytes],
    some rows at a time.
    """

    n_cols: int

    def __call__(self, x: np.ndarray, out: np.ndarray) -> None:
        step = max(1, _TILE_ELEMENTS // self.n_cols)
        for start in range(0, len(x), step):
            rows = slice(start, min(start + step, len(x)))
            *_, out[rows] = self.stages(x[rows])

    @abstractmethod
    def stages(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the bytes uint8[rows, row_bytes] after error feedback, and after each
        refinement.
        """


class Rounder(StagedRounder):
    """Round rows to a plain type: called with x float32[rows, n] and out uint8[rows, row_bytes].
    Threads may share it.

    passes: how often codes and scales are refined.
    """

    def __init__(self, type: GGMLType, n_cols: int, factor: Factor, passes: int = 1):
        layout = code_layout(type.name)
        if layout is None:
            raise UnsupportedTypeError(f"{type.name} cannot be rounded with second moments")
        self.type, self.n_cols, self.factor, self.passes = type, n_cols, factor, passes
        self.layout: CodeLayout = layout
        self.weights = factor.weights.astype(np.float32)
        # A type with a scale per row is searched as a whole, the others block by block.
        width = n_cols if type.header_bytes else type.block_size
        self.searches: list[Callable[[np.ndarray, np.ndarray], None]] = [
            row_encoder(type, width, factor.weights[first : first + width])
            for first in range(0, n_cols, width)
        ]
        self.settles = layout.group_bits is not None

    def stages(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the bytes of rows after error feedback, and after each refinement."""
        w = np.ascontiguousarray(x, dtype=np.float32)
        made, codes = self._fed_back(w)
        yield made
        if not self.passes:
            return
        g = np.empty_like(w)
        product(w - self._values(made), self.factor.moments, g)
        for _ in range(self.passes):
            made = self._moved(made, codes, g)
            if self.layout.scales:
                made = self._moved(self._rescaled(made, g), codes, g)
            yield made

    def _values(self, made: np.ndarray) -> np.ndarray:
        return decode(self.type, made, self.n_cols, as_weights=True)

    def _fed_back(self, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes and codes of rows, each column with the errors of those before it."""
        rows, n = w.shape
        type, layout, size = self.type, self.layout, self.type.block_size
        codes = np.zeros((rows, n), dtype=np.uint8)
        delta = np.zeros((rows, n), dtype=np.float32)
        head = np.empty((rows, type.header_bytes), dtype=np.uint8)
        bodies = np.empty((rows, n // size, type.block_bytes), dtype=np.uint8)
        if type.header_bytes:
            made = np.empty((rows, type.row_bytes(n)), dtype=np.uint8)
            self.searches[0](w, made)
            head[:], bodies[:] = made[:, : type.header_bytes], block_bodies(type, made)
        for number, first in enumerate(range(0, n, size)):
            t = w[:, first : first + size].copy()
            compensate(delta, self.factor.feedback, t, first)
            if type.header_bytes:
                piece = np.concatenate([head, bodies[:, number]], axis=1)
            else:
                piece = np.empty((rows, type.block_bytes), dtype=np.uint8)
                self.searches[number](t, piece)
            piece = self._coded(w, t, piece, codes, delta, first)
            bodies[:, number] = piece[:, type.header_bytes :]
        made = np.concatenate([head, bodies.reshape(rows, -1)], axis=1)
        return layout.with_codes(made, codes), codes

    def _coded(
        self,
        w: np.ndarray,
        t: np.ndarray,
        piece: np.ndarray,
        codes: np.ndarray,
        delta: np.ndarray,
        first: int,
    ) -> np.ndarray:
        """Choose the codes of a block from column `first`, and where it helps its groups' scales.
        Return its bytes, with the scales.
        """
        layout, feedback = self.layout, self.factor.feedback
        if not self.settles:
            levels = layout.levels(piece, self.type.block_size)
            code_loops.round_block(w, t, feedback, levels, layout.ordered, codes, delta, first)
            return piece
        stored = [scale.read(layout.owners(piece))[:, 0] for scale in layout.scales]
        d = stored[0] if stored else np.ones(len(piece), dtype=np.float32)
        offsets = stored[1] if len(stored) > 1 else np.zeros(len(piece), dtype=np.float32)
        chosen = layout.choices(piece)
        code_loops.round_settled(
            w,
            t,
            feedback,
            d,
            layout.choice_units,
            offsets,
            layout.choice_shifts,
            layout.near_choices,
            layout.ordered,
            self.weights,
            codes,
            chosen,
            delta,
            first,
        )
        return layout.with_choices(piece, chosen)

    def _moved(self, made: np.ndarray, codes: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Return bytes with better codes. g: float32[rows, n], (weights - values) H, is kept up."""
        layout, q = self.layout, self._values(made)
        levels = layout.levels(made, self.n_cols)
        code_loops.descend(q, g, self.factor.moments, levels, layout.ordered, codes)
        return layout.with_codes(made, codes)

    def _rescaled(self, made: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Return bytes with better scales of blocks or rows; g as in `_moved`."""
        layout, q, made = self.layout, self._values(made), made.copy()
        scales = np.stack([s.read(layout.owners(made)) for s in layout.scales], axis=2)
        units = layout.units(made, self.n_cols)
        code_loops.refit(units, scales, q, g, self.factor.moments, layout.scales[0].half)
        for i, scale in enumerate(layout.scales):
            scale.write(layout.owners(made), scales[:, :, i])
        return made
