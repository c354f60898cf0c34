"""Fields of bits, and scales, in the rows of bytes of a type."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....formats.types import GGMLType


def block_bodies(type: GGMLType, rows: np.ndarray) -> np.ndarray:
    """Return the blocks uint8[rows, blocks, bytes] of rows of bytes, without a header."""
    return rows[:, type.header_bytes :].reshape(len(rows), -1, type.block_bytes)


def scale_owners(type: GGMLType, rows: np.ndarray) -> np.ndarray:
    """Return what scales are stored in, uint8[rows, owners, bytes]: the row's header, or where the
    type has none its blocks.
    """
    head = type.header_bytes
    return rows[:, None, :head] if head else block_bodies(type, rows)


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


@dataclass(frozen=True)
class Scale:
    """A scale of a block, or of a row where the type has a header: its byte, and whether it is a
    half or a float32.
    """

    offset: int
    half: bool = True

    @property
    def n_bytes(self) -> int:
        """Bytes of the scale as it is stored."""
        return 2 if self.half else 4

    def read(self, data: np.ndarray) -> np.ndarray:
        """Return float32[...] of bytes uint8[..., bytes of the block or header]."""
        part = np.ascontiguousarray(data[..., self.offset : self.offset + self.n_bytes])
        return part.view("<f2" if self.half else "<f4")[..., 0].astype(np.float32)

    def write(self, data: np.ndarray, values: np.ndarray | float) -> None:
        """Store values [...] in bytes uint8[..., bytes of the block or header]."""
        shape = data.shape[:-1]
        made = np.broadcast_to(values, shape).astype("<f2" if self.half else "<f4")
        data[..., self.offset : self.offset + self.n_bytes] = made[..., None].view(np.uint8)


@dataclass(frozen=True)
class NibbleScale:
    """The half of a block of IQ1_M, a nibble at the top of each of four numbers of 16 bits."""

    half: bool = True
    _PLACES = (49, 51, 53, 55)

    def read(self, data: np.ndarray) -> np.ndarray:
        """Return float32[...] of bytes uint8[..., bytes of the block]."""
        bits = np.zeros(data.shape[:-1], dtype=np.uint16)
        for i, at in enumerate(self._PLACES):
            bits |= (data[..., at] >> 4).astype(np.uint16) << (4 * i)
        return bits.view("<f2").astype(np.float32)

    def write(self, data: np.ndarray, values: np.ndarray | float) -> None:
        """Store values [...] in bytes uint8[..., bytes of the block]."""
        made = np.broadcast_to(values, data.shape[:-1]).astype("<f2").view(np.uint16)
        for i, at in enumerate(self._PLACES):
            nibble = (made >> (4 * i) & 15).astype(np.uint8)
            data[..., at] = data[..., at] & 15 | nibble << 4
