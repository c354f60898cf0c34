"""Read and write fields of bits in rows of blocks."""

from __future__ import annotations

import numpy as np

from ...formats.types import GGMLType


def block_bodies(type: GGMLType, rows: np.ndarray) -> np.ndarray:
    """Return the blocks uint8[rows, blocks, bytes] of rows of bytes, without a header."""
    return rows[:, type.header_bytes :].reshape(len(rows), -1, type.block_bytes)


def put_bits(
    type: GGMLType, rows: np.ndarray, positions: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Return rows of bytes with other values [rows, fields]. positions: int64[fields of a block,
    bits], where the bits of a field are in the block, the least significant first.
    """
    bits = np.unpackbits(block_bodies(type, rows), axis=2, bitorder="little")
    by_block = values.reshape(len(rows), -1, len(positions))
    for b in range(positions.shape[1]):
        bits[:, :, positions[:, b]] = (by_block >> b) & 1
    packed = np.packbits(bits, axis=2, bitorder="little").reshape(len(rows), -1)
    return np.concatenate([rows[:, : type.header_bytes], packed], axis=1)


def get_bits(type: GGMLType, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return int64[rows, fields], the values that `put_bits` writes."""
    bits = np.unpackbits(block_bodies(type, rows), axis=2, bitorder="little")
    found = np.zeros((len(rows), bits.shape[1], len(positions)), dtype=np.int64)
    for b in range(positions.shape[1]):
        found |= bits[:, :, positions[:, b]].astype(np.int64) << b
    return found.reshape(len(rows), -1)
