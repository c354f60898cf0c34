"""MXFP4 as gpt-oss stores it, converted to GGUF's blocks: the same 4-bit codes and exponents in
another order, without rounding.

Stored: `*_blocks` uint8[..., n_cols / 32, 16], byte k of a block has code 2k in its low half and
code 2k + 1 in its high half, and `*_scales` uint8[..., n_cols / 32], an exponent per block. GGUF's
block: the exponent, then 16 bytes of which byte j has code j in its low half and code j + 16 in its
high half.
"""

from __future__ import annotations

import numpy as np

from ...formats.types import TYPES
from .stored import TensorRows

BLOCK_CODES = TYPES["MXFP4"].block_size
BLOCK_BYTES = TYPES["MXFP4"].block_bytes


class MXFP4Rows:
    """Rows of MXFP4 blocks from rows of codes (16 bytes per block) and rows of exponents (1 byte
    per block).
    """

    def __init__(self, codes: TensorRows, exponents: TensorRows):
        self.n_rows, self.row_bytes = codes.n_rows, exponents.row_bytes * BLOCK_BYTES
        self._codes, self._exponents = codes, exponents

    def read(self, start: int, stop: int) -> np.ndarray:
        exponents = self._exponents.read(start, stop)
        pairs = self._codes.read(start, stop).reshape(*exponents.shape, BLOCK_CODES // 2)
        blocks = np.empty((*exponents.shape, BLOCK_BYTES), np.uint8)
        blocks[..., 0] = exponents
        first, second = pairs[..., :8], pairs[..., 8:]  # codes 0..15 and 16..31
        blocks[..., 1::2] = first & 15 | second << 4
        blocks[..., 2::2] = first >> 4 | second & 0xF0
        return blocks.reshape(stop - start, self.row_bytes)

    def release(self) -> None:
        self._codes.release()
        self._exponents.release()
