"""Round rows to TQ1_0 and IQ1_BN, which pack five ternary digits into a byte: as TQ2_0 and IQ2_BN,
which have the same values, and then the digits are packed. Byte maps: `formats/codecs/ternary.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from ...formats.types import GGMLType, ggml_type
from .layouts.bits import block_bodies
from .layouts.codes import CodeLayout, code_layout

TWINS = {"TQ1_0": "TQ2_0", "IQ1_BN": "IQ2_BN"}


class PlainRounder(Protocol):
    """What rounds rows to the twin; see `rounder.Rounder`."""

    def __call__(self, x: np.ndarray, out: np.ndarray) -> None: ...

    def stages(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the bytes of rows x, float32[rows, n_cols], after each stage; see
        `rounder.Rounder`.
        """
        ...


class TernaryRounder:
    """Round rows to a type of ternary digits; used as `rounder.Rounder` is.

    rounder: of the type with the same values, TWINS.
    """

    def __init__(self, type: GGMLType, n_cols: int, rounder: PlainRounder):
        twin = ggml_type(TWINS[type.name])
        layout = code_layout(twin.name)
        if layout is None:
            raise RuntimeError(f"{twin.name} has no codes")
        self.type, self.n_cols = type, n_cols
        self._twin, self._layout, self._rounder = twin, layout, rounder

    def __call__(self, x: np.ndarray, out: np.ndarray) -> None:
        made = np.empty((len(x), self._twin.row_bytes(self.n_cols)), dtype=np.uint8)
        self._rounder(x, made)
        out[:] = self._packed(made)

    def stages(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the bytes of rows after error feedback, and after each refinement."""
        for made in self._rounder.stages(x):
            yield self._packed(made)

    def _packed(self, made: np.ndarray) -> np.ndarray:
        layout: CodeLayout = self._layout
        twin = self._twin
        codes = layout.codes(made).reshape(len(made), -1, self.type.block_size)
        d = layout.scales[0].read(layout.owners(made)).astype("<f2").view(np.uint8)
        if self.type.name == "IQ1_BN":
            return np.concatenate([d, _iq1_bn(codes).reshape(len(made), -1)], axis=1)
        d = block_bodies(twin, made)[:, :, -2:]
        return np.concatenate([_tq1_0(codes), d], axis=2).reshape(len(made), -1)


def _bytes(digits: np.ndarray) -> np.ndarray:
    """Return uint8[...] of ternary digits [..., 5], the most significant first: the number as a
    fraction of 256, rounded up.
    """
    number = digits.astype(np.int64) @ np.array([81, 27, 9, 3, 1])
    return ((number * 256 + 242) // 243).astype(np.uint8)


def _tq1_0(codes: np.ndarray) -> np.ndarray:
    """Return uint8[rows, blocks, 52] of codes [rows, blocks, 256]."""
    shape = codes.shape[:2]
    first = codes[:, :, :160].reshape(*shape, 5, 32).swapaxes(2, 3)
    second = codes[:, :, 160:240].reshape(*shape, 5, 16).swapaxes(2, 3)
    last = codes[:, :, 240:].reshape(*shape, 4, 4).swapaxes(2, 3)
    last = np.concatenate([last, np.zeros_like(last[..., :1])], axis=3)
    return np.concatenate([_bytes(first), _bytes(second), _bytes(last)], axis=2)


def _iq1_bn(codes: np.ndarray) -> np.ndarray:
    """Return uint8[rows, blocks, 13] of codes [rows, blocks, 64]."""
    runs = codes.reshape(*codes.shape[:2], 4, 16)
    fives = runs[..., :15].reshape(*codes.shape[:2], 12, 5)[..., ::-1]
    ends = runs[..., ::-1, 15]
    ends = np.concatenate([np.zeros_like(ends[..., :1]), ends], axis=2)[:, :, None]
    return np.concatenate([_bytes(fives), _bytes(ends)], axis=2)
