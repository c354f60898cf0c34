"""Row-interleaved types: K rows stored as one unit, block by block, so that a CPU kernel reads K rows at once.

Every map here is a permutation of bits and undoes exactly. Arrays: `plain` uint8[groups, K, blocks, block_bytes],
`packed` uint8[groups, blocks, K * block_bytes] (row headers, where a type has them, are handled by the caller).

IQ4_K_R4  576 bytes  4 d f16 | extra 8 bytes | scale high bits 16 | scale nibbles 32 | nibbles 512 (pattern N4)
          k = row of the group, b = 32-group, e = element of the 32-group, n = 8b + 4*(e//16) + k the number of a scale
          extra: byte k (first halves of the 32-groups) and 4+k (second halves), bit b
          scale: low nibble in byte n%32, nibble n//32; high two bits in byte n%16, bits 2*(n//16)
"""

from __future__ import annotations

import numpy as np


def pack_n4(codes: np.ndarray) -> np.ndarray:
    """Four-bit codes uint8[groups, 4, n, 32] of four rows to uint8[groups, n, 64], pattern N4.

    With e = 16a + 8h + 4c + j, row k's code e goes to byte 32c + 16a + 4k + j, nibble h.
    """
    groups, rows, n, _ = codes.shape
    split = codes.reshape(groups, rows, n, 2, 2, 2, 4)  # g k n a h c j
    ordered = split.transpose(0, 2, 5, 3, 1, 6, 4)  # g n c a k j h
    return (ordered[..., 0] | ordered[..., 1] << 4).reshape(groups, n, 64)


def unpack_n4(packed: np.ndarray) -> np.ndarray:
    """Inverse of `pack_n4`: uint8[groups, n, 64] to uint8[groups, 4, n, 32]."""
    groups, n, _ = packed.shape
    split = packed.reshape(groups, n, 2, 2, 4, 4)  # g n c a k j
    both = np.stack([split & 15, split >> 4], axis=-1)  # g n c a k j h
    return both.transpose(0, 4, 1, 3, 6, 2, 5).reshape(groups, 4, n, 32)


def _nibbles_of_32(bytes_: np.ndarray) -> np.ndarray:
    """uint8[..., 16] (element j low, j+16 high) to codes uint8[..., 32]."""
    return np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1)


def _bytes_of_32(codes: np.ndarray) -> np.ndarray:
    return codes[..., :16] | codes[..., 16:] << 4


def interleave_iq4_k(plain: np.ndarray) -> np.ndarray:
    groups, _, blocks, _ = plain.shape
    packed = np.empty((groups, blocks, 576), dtype=np.uint8)
    by_block = plain.swapaxes(1, 2)  # g blocks k bytes
    packed[..., 0:8] = by_block[..., 0:2].reshape(groups, blocks, 8)

    halves = np.unpackbits(by_block[..., 2:4], axis=-1, bitorder="little")  # bit 2b + e//16 of row k
    halves = halves.reshape(groups, blocks, 4, 8, 2).transpose(0, 1, 4, 2, 3)  # e//16, k, b
    packed[..., 8:16] = np.packbits(halves, axis=-1, bitorder="little").reshape(groups, blocks, 8)

    low = np.stack([by_block[..., 8:16] & 15, by_block[..., 8:16] >> 4], axis=-1)  # k, b, e//16
    low = low.transpose(0, 1, 3, 4, 2).reshape(groups, blocks, 64)  # n = 8b + 4*(e//16) + k
    packed[..., 32:64] = low[..., :32] | low[..., 32:] << 4
    high = np.stack([by_block[..., 4:8] >> s & 3 for s in (0, 2, 4, 6)], axis=-1)  # k, g//4, g%4
    high = high.reshape(groups, blocks, 4, 8, 2).transpose(0, 1, 3, 4, 2).reshape(groups, blocks, 4, 16)
    packed[..., 16:32] = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6

    codes = _nibbles_of_32(plain[..., 16:].reshape(groups, 4, blocks * 8, 16))
    packed[..., 64:] = pack_n4(codes).reshape(groups, blocks, 512)
    return packed


def deinterleave_iq4_k(packed: np.ndarray) -> np.ndarray:
    groups, blocks, _ = packed.shape
    plain = np.empty((groups, 4, blocks, 144), dtype=np.uint8)
    by_block = plain.swapaxes(1, 2)
    by_block[..., 0:2] = packed[..., 0:8].reshape(groups, blocks, 4, 2)

    halves = np.unpackbits(packed[..., 8:16].reshape(groups, blocks, 2, 4, 1), axis=-1, bitorder="little")  # e//16, k, b
    halves = halves.transpose(0, 1, 3, 4, 2).reshape(groups, blocks, 4, 16)
    by_block[..., 2:4] = np.packbits(halves, axis=-1, bitorder="little")

    low = np.concatenate([packed[..., 32:64] & 15, packed[..., 32:64] >> 4], axis=-1)
    low = low.reshape(groups, blocks, 8, 2, 4).transpose(0, 1, 4, 2, 3)  # k, b, e//16
    by_block[..., 8:16] = low[..., 0] | low[..., 1] << 4
    high = np.stack([packed[..., 16:32] >> s & 3 for s in (0, 2, 4, 6)], axis=2)
    high = high.reshape(groups, blocks, 8, 2, 4).transpose(0, 1, 4, 2, 3).reshape(groups, blocks, 4, 4, 4)
    by_block[..., 4:8] = high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6

    codes = unpack_n4(packed[..., 64:].reshape(groups, blocks * 8, 64))
    plain[..., 16:] = _bytes_of_32(codes).reshape(groups, 4, blocks, 128)
    return plain


INTERLEAVERS = {"IQ4_K_R4": (interleave_iq4_k, deinterleave_iq4_k)}
