"""Stretch rounded rows, which are shorter than the rows they stand for.

The codes and scales that leave the least squared error leave errors E that point against the
weights W: tr(E H W^T) > 0 for E = W - Q. At two bits the products of Q are 1 to 5 % smaller than
those of W, at one bit up to 30 %. Errors of other kinds cancel out over the inputs and the layers
of a model, but this one has the same sign everywhere, and three times in the product of gate, up
and down. So the scales of blocks or rows are multiplied by 1 + `SHARE` s after all refinements,
where s is the part of the products that is missing on held-out text. Searches do the same by
constants of each type.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...formats.types import GGMLType
from .layouts.bits import NibbleScale, Scale, block_bodies
from .layouts.codes import code_layout
from .layouts.vectors import vector_layout
from .layouts.words import word_layout
from .methods import Encoder

SHARE = 0.6
_STEP = 1 / 512  # of factors, so that the last digits of sums do not matter
# Types that are rounded as others.
_TWINS = {"TQ1_0": (Scale(52),), "IQ1_BN": (Scale(0),)}


def stretched(type: GGMLType, run: Encoder, factor: float) -> Encoder:
    """Return what rounds rows to a plain type by `run`, and multiplies their scales by `factor`."""
    if factor == 1:
        return run

    def run_and_stretch(x: np.ndarray, out: np.ndarray) -> None:
        run(x, out)
        stretch(type, out, factor)

    return run_and_stretch


def stretch(type: GGMLType, rows: np.ndarray, factor: float) -> None:
    """Multiply the scales of rows uint8[rows, row_bytes] of a plain type by `factor`, in place.
    Scales that would not be finite stay.
    """
    head = type.header_bytes
    owners = rows[:, None, :head] if head else block_bodies(type, rows)
    for scale in scales_of(type):
        found = scale.read(owners)
        with np.errstate(over="ignore", invalid="ignore"):
            made = found * np.float32(factor)
        limit = np.finfo(np.float16 if scale.half else np.float32).max
        scale.write(owners, np.where(np.abs(made) <= limit, made, found))
    if not np.shares_memory(owners, rows):  # rows with gaps between them
        rows[:] = owners.reshape(len(rows), -1)


def scales_of(type: GGMLType) -> Sequence[Scale | NibbleScale]:
    """Return the scales that all values of a plain type are proportional to; none for MXFP4 and
    NVFP4, whose scales are coarse.
    """
    if type.name in _TWINS:
        return _TWINS[type.name]
    if (codes := code_layout(type.name)) is not None:
        return codes.scales
    if (vectors := vector_layout(type.name)) is not None:
        return (vectors.scale,)
    words = word_layout(type.name)
    return () if words is None else (words.scale,)


def factor_for(type: GGMLType, missing: Sequence[float]) -> float:
    """Return what the scales of tensors are multiplied by, where these parts of the products of
    some of their matrices are missing.
    """
    if not missing or not scales_of(type):
        return 1.0
    return 1 + round(SHARE * max(0.0, float(np.mean(missing))) / _STEP) * _STEP
