"""Tables of a type with a code per element, for the kernels of `cuda_kernels/sources/rounding`.

A code has the value (d * factor) * level + second * shift. `CodeLayout` gives factor times level;
they are taken apart so that all roundings are those of the decoder. As only a power of two can be
moved between them without changing a product, the factor is the largest number of which all levels
are multiples.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ....cuda_kernels.rounding import MOST_CODES, MOST_LEVELS
from ....formats.types import GGMLType
from ..layouts.codes import CodeLayout, code_layout

_CHOICE = 1 << 16  # in `fields`: bits of choices


@dataclass(frozen=True)
class CodeTables:
    """factors, shifts: float32[groups, choices]; patterns: uint8[groups, choices], into levels
    float32[patterns, codes]; near: uint16[choices, tried], none for types whose groups have no
    choice of their own; choice_bits: int16[groups, bits]; fields: int32[8 * block_bytes], what each
    bit of a block is of.
    """

    layout: CodeLayout
    factors: np.ndarray
    shifts: np.ndarray
    patterns: np.ndarray
    levels: np.ndarray
    near: np.ndarray
    choice_bits: np.ndarray
    fields: np.ndarray

    @property
    def type(self) -> GGMLType:
        """The type whose codes these are."""
        return self.layout.type

    @property
    def groups(self) -> int:
        """Groups of a block, each with a choice of scale."""
        return len(self.factors)

    @property
    def group(self) -> int:
        """Return the number of columns of a group."""
        return self.type.block_size // self.groups


@functools.cache
def code_tables(name: str) -> CodeTables | None:
    """Return the tables of a plain type, or None if no kernel rounds it."""
    layout = code_layout(name)
    if layout is None or layout.n_codes > MOST_CODES:
        return None
    bits = layout.group_bits
    settles = bits is not None
    if bits is None:
        bits = _bits_of_scale(layout)
    units, shifts = _values(layout, bits)
    factors, levels = _taken_apart(units)
    found, patterns = np.unique(levels.reshape(-1, layout.n_codes), axis=0, return_inverse=True)
    if len(found) > 255 or found.size > MOST_LEVELS:
        return None
    fields = np.full(8 * layout.type.block_bytes, -1, dtype=np.int32)
    element, bit = np.indices(layout.bits.shape)
    fields[layout.bits] = 8 * element + bit
    group, bit = np.indices(bits.shape)
    fields[bits] = _CHOICE + 16 * group + bit
    near = layout.near_choices if settles else np.empty((0, 0))
    return CodeTables(
        layout,
        factors,
        shifts,
        np.ascontiguousarray(patterns.reshape(factors.shape), dtype=np.uint8),
        np.ascontiguousarray(found, dtype=np.float32),
        np.ascontiguousarray(near, dtype=np.uint16),
        np.ascontiguousarray(bits, dtype=np.int16),
        fields,
    )


def _bits_of_scale(layout: CodeLayout) -> np.ndarray:
    """Return int64[1, bits], those of a block that are neither of codes nor of scales: of a scale
    that is no float, or none.
    """
    used = np.zeros(8 * layout.type.block_bytes, dtype=bool)
    used[layout.bits] = True
    if not layout.type.header_bytes:
        for scale in layout.scales:
            used[8 * scale.offset : 8 * (scale.offset + scale.n_bytes)] = True
    free = np.flatnonzero(~used)
    return free[None] if len(free) <= 8 else np.empty((1, 0), dtype=np.int64)


def _values(layout: CodeLayout, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (units float32[groups, choices, codes], shifts float32[groups, choices])."""
    given = CodeLayout(layout.type, layout.scales, layout.bits, bits)
    return given.choice_units, given.choice_shifts


def _taken_apart(units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (factors float32[...], levels float32[..., codes]) of their products."""
    size = np.abs(units).astype(np.float64)
    size[~np.isfinite(size)] = 0  # of scales that no search chooses
    least = np.where(size > 0, size, np.inf).min(axis=-1)
    # Integers, in units of the last bit of the smallest number.
    unit = np.where(np.isfinite(least), np.ldexp(1.0, np.frexp(least)[1] - 24), 1.0)
    whole = np.round(size / unit[..., None]).astype(np.int64)
    factors = np.gcd.reduce(whole, axis=-1) * unit
    divisors = np.where(factors > 0, factors, 1.0)
    return factors.astype(np.float32), (units / divisors[..., None]).astype(np.float32)
