"""NVFP4: four-bit floats, a UE4M3 scale per 16 elements of a row, and a float32 factor per matrix.

A checkpoint stores uint8[..., rows, cols / 2], element 2k in the low nibble of byte k, and
F8_E4M3[..., rows, cols / 16]. Rows of whole blocks of 64 keep codes and scales, in the order of
formats/codecs/fp4.py, and the factor becomes the tensor `.scale`. Other rows are decoded to F32,
factor included.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...errors import CheckpointError
from ...formats.tables import FP4_VALUES
from ...formats.types import TYPES
from ..checkpoint.folder import Checkpoint
from ..tensors.decoded import DecodedTensor, Factor, decoded
from ..tensors.stored import StoredTensor
from .scaled import CodeRows, ScaledRows, float_values, unfit

_GROUP, _BLOCK = 16, TYPES["NVFP4"].block_size
_VALUES = (FP4_VALUES / 2).astype(np.float32)


class NVFP4Rows:
    """Stored codes and scales as rows of NVFP4 blocks: four scales, then 8 bytes per 16 elements,
    element r in the low nibble and r + 8 in the high one.
    """

    def __init__(self, codes: CodeRows, scales: CodeRows):
        self.n_rows, self.row_bytes = codes.n_rows, codes.row_bytes + scales.row_bytes
        self._codes, self._scales = codes, scales

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = stop - start
        codes = self._codes.read(start, stop).reshape(rows, -1, _BLOCK // _GROUP, _GROUP // 2)
        # bytes 0..3 of a group hold its elements 0..7, bytes 4..7 its elements 8..15; even elements
        # are the low nibbles
        first, second = codes[..., :4], codes[..., 4:]
        blocks = np.empty((rows, codes.shape[1], TYPES["NVFP4"].block_bytes), np.uint8)
        blocks[..., :4] = self._scales.read(start, stop).reshape(rows, -1, 4) & 0x7F
        nibbles = blocks[..., 4:].reshape(*codes.shape)
        nibbles[..., 0::2] = first & 15 | second << 4
        nibbles[..., 1::2] = first >> 4 | second & 0xF0
        blocks[..., 4:] = nibbles.reshape(rows, codes.shape[1], -1)
        return blocks.reshape(rows, self.row_bytes)

    def release(self) -> None:
        self._codes.release()
        self._scales.release()


def nvfp4(
    checkpoint: Checkpoint,
    packed: StoredTensor,
    name: str,
    scale: StoredTensor,
    factors: dict[str, Factor],
) -> DecodedTensor:
    """Return the tensor `name` for packed codes and scales. `factors["scale"]` is the factor of the
    matrix, one per stacked matrix.

    Raise CheckpointError for dtypes and shapes that do not fit.
    """
    if packed.dtype != "U8" or len(packed.shape) < 2 or packed.n_elements == 0:
        raise CheckpointError(
            f"is {packed.dtype} of shape {list(packed.shape)}; NVFP4 codes are U8 matrices",
            file=packed.file,
            tensor=packed.name,
        )
    *matrices, n_rows, n_bytes = packed.shape
    n_cols = 2 * n_bytes
    shape, wanted = (*matrices, n_rows, n_cols), (*matrices, n_rows, n_cols // _GROUP)
    if scale.dtype != "F8_E4M3" or n_cols % _GROUP or scale.shape != wanted:
        raise unfit(scale, packed, f"F8_E4M3 of shape {list(wanted)}")
    all_rows = packed.n_elements // n_bytes
    codes = CodeRows(checkpoint, packed, all_rows)
    if n_cols % _BLOCK == 0:
        rows = NVFP4Rows(codes, CodeRows(checkpoint, scale, all_rows))
        return decoded(packed, name, shape, TYPES["NVFP4"], rows, factors)
    factor = factors["scale"]

    def scales() -> np.ndarray:
        per_matrix = np.repeat(np.broadcast_to(factor.values(), all_rows // n_rows), n_rows)[
            :, None
        ]
        return float_values(checkpoint, scale).reshape(all_rows, -1) * per_matrix

    return decoded(
        packed,
        name,
        shape,
        TYPES["F32"],
        ScaledRows(
            codes,
            n_cols,
            _code_values,
            scales,
            matrix_rows=all_rows,
            block_rows=1,
            block_cols=_GROUP,
        ),
    )


def _code_values(codes: np.ndarray) -> np.ndarray:
    values = np.empty((len(codes), 2 * codes.shape[1]), np.float32)
    values[:, 0::2], values[:, 1::2] = _VALUES[codes & 15], _VALUES[codes >> 4]
    return values


def factor_of(
    checkpoint: Checkpoint,
    tensor: StoredTensor,
    n_matrices: int,
    change: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Factor:
    """Return a stored factor, one for all matrices or one each. Raise CheckpointError for another
    shape.
    """
    if tensor.n_elements not in (1, n_matrices):
        raise CheckpointError(
            f"has shape {list(tensor.shape)}, expected one factor or {n_matrices}",
            file=tensor.file,
            tensor=tensor.name,
        )

    def values() -> np.ndarray:
        found = float_values(checkpoint, tensor).ravel()
        return found if change is None else change(found)

    return Factor(tensor.n_elements, values)
