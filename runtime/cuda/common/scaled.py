"""Scales of tensors: `<name>.scale` beside `<name>.weight`."""

from __future__ import annotations

from dataclasses import replace

from ....cuda_kernels.packed.matrix import PackedMatrix
from ...weights.linear import Embedding, Linear


def scaled(matrix: PackedMatrix, linear: Linear | Embedding) -> PackedMatrix:
    """Return the packed matrix of `linear` with its scale."""
    return matrix if linear.scale is None else replace(matrix, scale=float(linear.scale))
