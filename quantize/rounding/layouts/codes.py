"""Where a type stores the code of each element, and what its codes are worth.

The decoder says it: a bit that changes exactly one element is a bit of that element's code. Scales
are found by `SCALES`, the only thing about formats that is said here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ....formats.codecs.codec import decode
from ....formats.types import GGMLType, ggml_type
from .bits import Scale, get_bits, put_bits, scale_owners

GROUP = 16  # elements that share the values of their codes, in every type
_TRIES = 12
_MOST_BITS = 12  # of a group's scale and shift
_ALL_TRIED = 128  # choices up to which all are tried for every group
_STEPS = (-8, -4, -2, -1, 0, 1, 2, 4, 8)  # of scale and minimum, for types with both
_TRIED = 64  # choices that are tried otherwise, those with the most similar values


# The scales that each element is proportional to, or a sum of two such terms.
SCALES = {
    "Q4_0": (Scale(0),),
    "Q4_1": (Scale(0), Scale(2)),
    "Q5_0": (Scale(0),),
    "Q5_1": (Scale(0), Scale(2)),
    "Q6_0": (Scale(0),),
    "IQ4_NL": (Scale(0),),
    "Q2_K": (Scale(80), Scale(82)),
    "Q3_K": (Scale(108),),
    "Q4_K": (Scale(0), Scale(2)),
    "Q5_K": (Scale(0), Scale(2)),
    "Q6_K": (Scale(208),),
    "IQ2_K": (Scale(0),),
    "IQ3_K": (Scale(0),),
    "IQ4_K": (Scale(0),),
    "IQ5_K": (Scale(0),),
    "IQ6_K": (Scale(0),),
    "IQ4_XS": (Scale(0),),
    "IQ2_KS": (Scale(0),),
    "IQ3_KS": (Scale(0),),
    "IQ4_KS": (Scale(0, half=False),),
    "IQ5_KS": (Scale(0, half=False),),
    "MXFP4": (),  # powers of two, which are not refitted
    "NVFP4": (),  # one in 8 bits for each group, of which all are tried
    "Q1_0_G128": (Scale(0),),
    "Q2_0": (Scale(0),),
    "TQ2_0": (Scale(64),),
    "IQ2_BN": (Scale(0, half=False),),
}
# Types whose last codes are not used: encoders write three values only.
CODES: dict[str, int] = {"TQ2_0": 3, "IQ2_BN": 3}


@dataclass(frozen=True)
class CodeLayout:
    """The bits of the codes of a type's block: `bits` int64[elements, bits of a code], as positions
    in the block's bytes, those that change values least first. `group_bits` int64[groups, bits],
    those of each group's scale and shift; None where that is too many to try.
    """

    type: GGMLType
    scales: tuple[Scale, ...]
    bits: np.ndarray
    group_bits: np.ndarray | None = None

    @property
    def n_codes(self) -> int:
        """How many values a code has."""
        n_bits = int(self.bits.shape[1])
        return CODES.get(self.type.name, 1 << n_bits)

    def owners(self, rows: np.ndarray) -> np.ndarray:
        """Return the bytes uint8[rows, owners, bytes] that scales are in: headers, or blocks."""
        return scale_owners(self.type, rows)

    def with_codes(self, rows: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Return rows of bytes with other codes uint8[rows, n]."""
        return put_bits(self.type, rows, self.bits, codes)

    def codes(self, rows: np.ndarray) -> np.ndarray:
        """Return int64[rows, n], the codes of rows of bytes."""
        return get_bits(self.type, rows, self.bits)

    def with_choices(self, rows: np.ndarray, choices: np.ndarray) -> np.ndarray:
        """Return rows of bytes with other scales and shifts int64[rows, groups]."""
        return (
            rows if self.group_bits is None else put_bits(self.type, rows, self.group_bits, choices)
        )

    def choices(self, rows: np.ndarray) -> np.ndarray:
        """Return int64[rows, groups], the scale and shift of each group as a number."""
        assert self.group_bits is not None
        return get_bits(self.type, rows, self.group_bits)

    @functools.cached_property
    def choice_units(self) -> np.ndarray:
        """Return float32[groups of a block, choices, codes]: the values of codes by the scale and
        shift of the group, for a scale of 1 of the block or row.
        """
        return self._by_choice(self.scales[:1])

    @functools.cached_property
    def choice_shifts(self) -> np.ndarray:
        """Return float32[groups of a block, choices]: what is added to all codes for a second scale
        of 1; zeros for types without one.
        """
        if len(self.scales) < 2:
            return np.zeros(self.choice_units.shape[:2], dtype=np.float32)
        return np.ascontiguousarray(self._by_choice(self.scales[1:])[:, :, 0])

    def _by_choice(self, ones: tuple[Scale, ...]) -> np.ndarray:
        """Return the values of codes with these scales 1 and others 0."""
        positions, size = self.group_bits, self.type.block_size
        assert positions is not None
        n, groups = 1 << positions.shape[1], len(positions)
        rows = np.zeros((n, self.type.row_bytes(size)), dtype=np.uint8)
        for scale in ones:
            scale.write(self.owners(rows), 1.0)
        rows = self.with_choices(rows, np.repeat(np.arange(n)[:, None], groups, axis=1))
        levels = self.levels(rows, size)  # [n, size / GROUP, codes]
        return np.ascontiguousarray(levels[:, :: size // GROUP // groups].transpose(1, 0, 2))

    def levels(self, rows: np.ndarray, n_cols: int) -> np.ndarray:
        """Return float32[rows, n_cols / GROUP, n_codes], the value of every code in every group."""
        n_codes, groups = self.n_codes, n_cols // GROUP
        found = np.empty((len(rows), groups, n_codes), dtype=np.float32)
        local = np.arange(n_cols) % GROUP
        for start in range(0, n_codes, GROUP):
            shown = ((local + start) % n_codes).astype(np.uint8)
            codes = np.broadcast_to(shown, (len(rows), n_cols))
            values = decode(self.type, self.with_codes(rows, codes), n_cols, as_weights=True)
            n = min(GROUP, n_codes)
            found[:, :, start : start + n] = values.reshape(len(rows), groups, GROUP)[:, :, :n]
        return found

    def units(self, rows: np.ndarray, n_cols: int) -> np.ndarray:
        """Return float32[scales, rows, n_cols], what a scale of 1 adds to each element."""
        found = []
        for shown in self.scales:
            made = rows.copy()
            for scale in self.scales:
                scale.write(self.owners(made), 1.0 if scale is shown else 0.0)
            found.append(decode(self.type, made, n_cols, as_weights=True))
        return np.stack(found)

    @functools.cached_property
    def near_choices(self) -> np.ndarray:
        """Return int64[choices, n]: the choices to try for a group whose choice is known, itself
        first, then by how similar their values are.

        Where the scale belongs to the row it was searched before errors were fed back, and all
        choices are tried.
        """
        if len(self.scales) > 1:
            return self._near_pairs()
        units = self.choice_units[0].astype(np.float64)
        n = len(units)
        distance = ((units[:, None] - units[None]) ** 2).sum(axis=2)
        order = np.argsort(distance, axis=1, kind="stable")
        itself = np.arange(n)[:, None]
        order = np.concatenate([itself, order[order != itself].reshape(n, n - 1)], axis=1)
        tried = n if n <= _ALL_TRIED or self.type.header_bytes else _TRIED
        return np.ascontiguousarray(order[:, :tried], dtype=np.int64)

    def _near_pairs(self) -> np.ndarray:
        """Return the choices whose scale and minimum are one of _STEPS away."""
        scale = np.unique(self.choice_units[0, :, -1], return_inverse=True)[1]
        shift = np.unique(self.choice_shifts[0], return_inverse=True)[1]
        by_pair = {pair: choice for choice, pair in enumerate(zip(scale, shift))}
        found = [
            [choice, *(by_pair.get((s + i, m + j), choice) for i in _STEPS for j in _STEPS)]
            for choice, (s, m) in enumerate(zip(scale, shift))
        ]
        return np.array(found, dtype=np.int64)

    @functools.cached_property
    def ordered(self) -> bool:
        """Return whether the values of codes rise or fall with the code, in every group."""
        size = self.type.block_size
        rows = np.random.default_rng(1).integers(
            0, 256, (64, self.type.row_bytes(size)), dtype=np.uint8
        )
        for scale in self.scales:
            scale.write(self.owners(rows), 1.0)
        levels = self.levels(rows, size)
        steps = np.diff(levels[np.isfinite(levels).all(axis=2)], axis=1)
        return bool(((steps >= 0).all(axis=1) | (steps <= 0).all(axis=1)).all())


@functools.cache
def code_layout(name: str) -> CodeLayout | None:
    """Return the layout of a plain type, or None for a type whose elements have no codes of their
    own, or whose scales are not known here.
    """
    if name not in SCALES:
        return None
    type, scales = ggml_type(name), SCALES[name]
    generator, size, head = np.random.default_rng(0), type.block_size, type.header_bytes
    n_bits = 8 * type.block_bytes
    most, owner = np.zeros(n_bits, dtype=np.int64), np.full(n_bits, -1)
    touched, effect = np.zeros((n_bits, size), dtype=bool), np.zeros(n_bits)
    for _ in range(_TRIES):
        base = generator.integers(0, 256, (1, type.row_bytes(size)), dtype=np.uint8)
        probe = CodeLayout(type, scales, np.empty((size, 0), dtype=np.int64))
        for scale in scales:
            scale.write(probe.owners(base), 1.0)
        flipped = np.repeat(base, n_bits, axis=0)
        at = np.arange(n_bits)
        flipped[at, head + at // 8] ^= (1 << (at % 8)).astype(np.uint8)
        before = decode(type, base, size, as_weights=True)
        after = decode(type, flipped, size, as_weights=True)
        changed = after.view(np.uint32) != before.view(np.uint32)
        with np.errstate(invalid="ignore", over="ignore"):
            moved = np.abs(after.astype(np.float64) - before).max(axis=1)
        effect += np.where(np.isfinite(moved), moved, 0)
        count = changed.sum(axis=1)
        most = np.maximum(most, count)
        touched |= changed
        owner = np.where(count == 1, changed.argmax(axis=1), owner)
    alone = most == 1
    of_element = [np.flatnonzero(alone & (owner == i)) for i in range(size)]
    n = {len(bits) for bits in of_element}
    if len(n) != 1 or 0 in n:
        return None
    bits = np.stack(of_element)
    bits = bits[:, np.argsort(effect[bits].sum(axis=0), kind="stable")]
    return CodeLayout(type, scales, bits, _group_bits(touched, alone, scales))


def _group_bits(
    touched: np.ndarray, alone: np.ndarray, scales: tuple[Scale, ...]
) -> np.ndarray | None:
    """Return int64[groups, bits], or None for types whose groups have no scale.

    touched: bool[bits, elements], which elements a bit can change; alone: bool[bits], whether it is
    of a code.
    """
    size = touched.shape[1]
    counts = touched.sum(axis=1)
    of_group = (counts > 1) & (counts < size) & ~alone
    if not of_group.any():
        return None
    group = int(counts[of_group].max())
    members = [
        np.flatnonzero(of_group & touched[:, first : first + group].any(axis=1))
        for first in range(0, size, group)
    ]
    n = {len(bits) for bits in members}
    if len(n) != 1 or sum(map(len, members)) != of_group.sum() or max(n) > _MOST_BITS:
        return None
    return np.stack(members)
