"""Four-bit floats (E2M1) with a one-byte scale. `FP4_VALUES` are doubled, so the scales here are
halved.

MXFP4  17 bytes  e (E8M0 exponent) | 16 bytes of nibbles as in Q4_0 (32 elements)
                 y = 2^(e-128) * FP4_VALUES[q]
                 e = 255 is 2^127 here, not NaN; e = 0 and 1 give subnormals
NVFP4  36 bytes  4 scales, one per 16 elements | 32 bytes of nibbles (64 elements)
                 y = scale/2 * FP4_VALUES[q]
                 the 8 nibble bytes of 16 elements hold r (low) and r+8 (high)
                 scale: UE4M3, 4 exponent bits (bias 7), 3 mantissa bits; 0 and 127 give 0, bit 7 is
                 ignored.
                 The scale that a model has per tensor is a separate tensor, not part of a block.
"""

from __future__ import annotations

import numpy as np

from ..kernel import device_function
from ..tables import FP4_VALUES
from .scalars import select


@device_function
def half_e8m0(e):
    """2^(e-128) as float32."""
    bits = select(e >= 2, (e - 1) << 23, 0x200000 << (e & 1))
    return np.uint32(bits).view(np.float32)


@device_function
def half_ue4m3(byte):
    """Half the value of a UE4M3 scale, as float32."""
    mantissa = byte & 7
    exponent = byte >> 3 & 15
    normal = np.uint32((exponent + 119) << 23 | mantissa << 20).view(np.float32)
    value = select(exponent == 0, np.float32(mantissa) * np.float32(2.0**-10), normal)
    return select(byte == 127, np.float32(0), value)


def mxfp4(block, out):
    """Decode an MXFP4 block, uint8[17], to float32[32]: y = 2^(e-128) * FP4_VALUES[q]."""
    scale = half_e8m0(np.int64(block[0]))
    for j in range(16):
        out[j] = scale * FP4_VALUES[block[1 + j] & 15]
        out[j + 16] = scale * FP4_VALUES[block[1 + j] >> 4]


def nvfp4(block, out):
    """Decode an NVFP4 block, uint8[36], to float32[64]: y = scale/2 * FP4_VALUES[q]."""
    for s in range(4):
        scale = half_ue4m3(np.int64(block[s]))
        for r in range(8):
            out[16 * s + r] = scale * FP4_VALUES[block[4 + 8 * s + r] & 15]
            out[16 * s + r + 8] = scale * FP4_VALUES[block[4 + 8 * s + r] >> 4]


BLOCK_DECODERS = {"MXFP4": mxfp4, "NVFP4": nvfp4}
