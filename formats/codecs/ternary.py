"""One- and two-bit types whose codes are multiplied by one scale and nothing else.

Q1_0_G128  18 bytes  d f16 | 128 bits, bit i%8 of byte i//8 (128 elements)
                     y = d * (2*q - 1)
Q2_0       18 bytes  d f16 | 16 bytes: byte i//4, bits 2*(i%4) (64 elements)
                     y = d * (q - 1)
TQ1_0      54 bytes  48 bytes of five ternary digits | 4 bytes of four | d f16 (256 elements)
                     y = d * (t - 1)
                     elements 0..159: byte i%32, digit i//32; 160..239: byte 32 + i%16, digit
                     (i-160)//16;
                     240..255: byte 48 + i%4, digit (i-240)//4. Digit n of a byte v: ((v * 3^n) %
                     256 * 3) // 256
TQ2_0      66 bytes  64 bytes: byte 32*(i//128) + i%32, bits 2*((i%128)//32) | d f16 (256 elements)
                     y = d * (q - 1)
IQ1_BN     13 bytes  (d f16 in the row header) 12 bytes of five ternary digits
                     | 1 byte (64 elements)
                     y = d * (t - 1)
                     run r of 16 elements: the first 15 in bytes 3r, 3r+1, 3r+2, the last one is
                     digit r of byte 12
IQ2_BN     16 bytes  (d f32 in the row header) byte i%16, bits 2*(i//16) (64 elements)
                     y = d * (q - 1)
I2_S       no rows   a quarter byte per element, then 32 bytes that begin with d f32 (whole tensor)
                     y = d * (q - 1)
                     of 128 elements, element i is in byte i%32, bits 6 - 2*(i//32)
"""

from __future__ import annotations

import math

import numpy as np

from ...errors import ShapeError
from ..kernel import device_function
from .scalars import read_float, read_half


@device_function
def q1_0_g128(block, out):
    """Decode a Q1_0_G128 block, uint8[18], to float32[128]: y = d*(2*q - 1)."""
    d = read_half(block, 0)
    for i in range(128):
        out[i] = d * np.float32(2 * (np.int64(block[2 + (i >> 3)]) >> (i & 7) & 1) - 1)


def q2_0(block, out):
    """Decode a Q2_0 block, uint8[18], to float32[64]: y = d*(q - 1)."""
    d = read_half(block, 0)
    for i in range(64):
        out[i] = d * np.float32((np.int64(block[2 + (i >> 2)]) >> (2 * (i & 3)) & 3) - 1)


@device_function
def ternary_digit(byte, power):
    """Digit 0, 1 or 2 of a byte that holds five of them as a fraction of 256; `power` is 3 to the
    digit's number.
    """
    return (np.int64(byte) * power & 255) * 3 >> 8


def tq1_0(block, out):
    """Decode a TQ1_0 block, uint8[54], to float32[256]: y = d*(t - 1)."""
    d = read_half(block, 52)
    power = 1
    for digit in range(5):
        for j in range(32):
            out[32 * digit + j] = d * np.float32(ternary_digit(block[j], power) - 1)
        for j in range(16):
            out[160 + 16 * digit + j] = d * np.float32(ternary_digit(block[32 + j], power) - 1)
        if digit < 4:
            for j in range(4):
                out[240 + 4 * digit + j] = d * np.float32(ternary_digit(block[48 + j], power) - 1)
        power *= 3


@device_function
def tq2_0(block, out):
    """Decode a TQ2_0 block, uint8[66], to float32[256]: y = d*(q - 1)."""
    d = read_half(block, 64)
    for i in range(256):
        out[i] = d * np.float32(
            (np.int64(block[32 * (i >> 7) + (i & 31)]) >> (2 * (i >> 5 & 3)) & 3) - 1
        )


def iq1_bn(block, head, out):
    """Decode an IQ1_BN block, uint8[13], and its row header, uint8[2], to float32[64]: y = d*(t -
    1).
    """
    d = read_half(head, 0)
    last = 81
    for run in range(4):
        for third in range(3):
            power = 81
            for digit in range(5):
                out[16 * run + 5 * third + digit] = d * np.float32(
                    ternary_digit(block[3 * run + third], power) - 1
                )
                power //= 3
        out[16 * run + 15] = d * np.float32(ternary_digit(block[12], last) - 1)
        last //= 3


def iq2_bn(block, head, out):
    """Decode an IQ2_BN block, uint8[16], and its row header, uint8[4], to float32[64]: y = d*(q -
    1).
    """
    d = read_float(head, 0)
    for i in range(64):
        out[i] = d * np.float32((np.int64(block[i & 15]) >> (2 * (i >> 4)) & 3) - 1)


def check_i2_s(shape: tuple[int, ...]) -> None:
    """ShapeError unless a tensor of I2_S can have the shape."""
    if (n := math.prod(shape)) % 128:
        raise ShapeError(f"{n} elements are not a multiple of 128, which I2_S needs")


def decode_i2_s(data: np.ndarray, out: np.ndarray) -> None:
    """The bytes of a whole tensor, uint8[n/4 + 32], to float32[n]; n is a multiple of 128."""
    scale = data[-32:-28].view("<f4")[0]
    codes = (
        data[:-32].reshape(-1, 1, 32) >> np.array([6, 4, 2, 0], dtype=np.uint8).reshape(1, 4, 1) & 3
    )
    np.multiply(codes.astype(np.float32) - np.float32(1), scale, out=out.reshape(-1, 4, 32))


BLOCK_DECODERS = {
    "Q1_0_G128": q1_0_g128,
    "Q2_0": q2_0,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
    "IQ1_BN": iq1_bn,
    "IQ2_BN": iq2_bn,
}
TENSOR_DECODERS = {"I2_S": decode_i2_s}
