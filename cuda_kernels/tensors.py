"""Whole tensors packed from their bytes: also I2_S, whose one scale follows all rows.

On a device I2_S is IQ2_BN, the same two bits an element with a scale per row: each row gets the
tensor's.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ..errors import ShapeError, UnsupportedTypeError
from ..formats.codecs.ternary import check_i2_s
from ..formats.types import GGMLType, ggml_type
from .ops import PackedMatrix, pack_matrix

_PIECE_ELEMENTS = 1 << 24  # at a time


def pack_tensor(
    type: str | GGMLType,
    data: np.ndarray,
    shape: tuple[int, ...],
    device: torch.device | str = "cuda",
) -> PackedMatrix:
    """The bytes of a tensor with the numpy-order `shape`, uint8[bytes], on a device; axes before
    the last two count matrices.

    ShapeError for bytes that do not fit, UnsupportedTypeError for a type or row length that has no
    layout.
    """
    type = ggml_type(type)
    n_bytes, cols = type.tensor_bytes(shape), shape[-1]
    if data.dtype != np.uint8 or data.shape != (n_bytes,):
        raise ShapeError(
            f"a {type.name} tensor of shape {list(shape)} is uint8[{n_bytes}], got"
            f" {data.dtype}{list(data.shape)}"
        )
    rows, n_matrices = shape[-2] if len(shape) > 1 else 1, math.prod(shape[:-2])
    if not type.tail_bytes:
        return pack_matrix(
            type, [data.reshape(-1, type.row_bytes(cols))], rows, cols, n_matrices, device
        )
    plain = ggml_type("IQ2_BN")
    check_i2_s(shape)
    if cols % plain.block_size:
        raise UnsupportedTypeError(f"rows of {cols} elements of {type.name} cannot be packed")
    body, scale = data[: -type.tail_bytes], data[-type.tail_bytes :][:4]
    # Bytes of pairs of rows: two rows are whole groups of 128 elements.
    step = max(1, _PIECE_ELEMENTS // (2 * cols)) * 2 * cols // 4
    pieces = (
        _rows_of_iq2_bn(body[at : at + step], cols, scale) for at in range(0, len(body), step)
    )
    return pack_matrix(plain, pieces, rows, cols, n_matrices, device)


def _rows_of_iq2_bn(body: np.ndarray, cols: int, scale: np.ndarray) -> np.ndarray:
    """Rows of I2_S, whole groups of it, and the scale, uint8[4], as rows of IQ2_BN."""
    codes = (
        (body.reshape(-1, 1, 32) >> np.array([6, 4, 2, 0], dtype=np.uint8).reshape(1, 4, 1)) & 3
    ).reshape(-1, cols)
    four = codes.reshape(len(codes), -1, 4, 16) << np.array([0, 2, 4, 6], dtype=np.uint8).reshape(
        1, 1, 4, 1
    )
    packed = np.bitwise_or.reduce(four, axis=2).reshape(len(codes), -1)
    return np.concatenate([np.broadcast_to(scale, (len(codes), len(scale))), packed], axis=1)
