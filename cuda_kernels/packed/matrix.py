"""Packed matrices: what they are, and which rows can be packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...formats.codecs.interleaved import interleaving
from ...formats.types import GGMLType, ggml_type
from ..layouts.layout import UNIT
from ..layouts.table import PackedLayout, packed_layout, packed_types, plain_type


@dataclass(frozen=True)
class PackedMatrix:
    """`n_matrices` matrices [rows, cols] of one type below each other, in planes (see
    `layouts/table.py`): `data` uint8[bytes].

    `type` is the one whose units the bytes are: the plain type of an interleaved one. Decoded
    values and products are multiplied by `scale`.
    """

    type: GGMLType
    rows: int
    cols: int
    n_matrices: int
    data: torch.Tensor
    scale: float = 1.0

    @property
    def nbytes(self) -> int:
        """Return the bytes of `data`, all matrices and paddings included."""
        return self.data.nbytes

    @property
    def total_rows(self) -> int:
        """Return the rows of all matrices."""
        return self.rows * self.n_matrices

    @property
    def layout(self) -> PackedLayout:
        """Return where the planes are."""
        return packed_layout(self.type)

    @property
    def device(self) -> torch.device:
        """Return the device of `data`."""
        return self.data.device


def packable(type: str | GGMLType, cols: int) -> bool:
    """Return whether matrices of the type with rows of `cols` elements can be packed."""
    type = ggml_type(type)
    plain = plain_type(type)
    whole = cols % (interleaving(type).elements if type.is_interleaved else 1) == 0
    return (
        plain.name in packed_types()
        and cols > 0
        and cols % UNIT == 0
        and cols % plain.block_size == 0
        and whole
    )


def packed_bytes(type: str | GGMLType, rows: int, cols: int, n_matrices: int = 1) -> int:
    """Return how many bytes such a packed matrix takes on the device."""
    return packed_layout(plain_type(type)).offsets(rows * n_matrices, cols)[-1]


def placed(matrix: PackedMatrix) -> Iterator[tuple[tuple[str, int, bool], int]]:
    """Yield the planes, each with where it begins."""
    return zip(
        matrix.layout.planes,
        matrix.layout.offsets(matrix.total_rows, matrix.cols)[:-1],
        strict=True,
    )
