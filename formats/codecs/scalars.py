"""Little-endian scalars in blocks, and the float formats, for compiled codecs and searches."""

from __future__ import annotations

import numpy as np

from ..kernel import device_function


@device_function
def select(condition, yes, no):
    """Return `yes` where the condition is not zero, else `no`. Both are evaluated. Decoders use
    only this for data-dependent choices and branch on constants alone, so that `torch_decode.py`
    can run them on all blocks at once.
    """
    return yes if condition else no


@device_function
def half_to_float(bits):
    """float32 value of an IEEE half given as an integer. Exact, also for subnormals and NaN."""
    exponent = (bits >> 10) & 31
    mantissa = bits & 1023
    biased = select(exponent == 31, 255, exponent + 112)
    normal = np.uint32((biased << 23) | (mantissa << 13)).view(np.float32)
    value = select(exponent == 0, np.float32(mantissa) * np.float32(2.0**-24), normal)
    return select(bits & 0x8000, -value, value)


@device_function
def float_to_half(x):
    """Bits of the IEEE half nearest to the float32 `x`, ties to even, subnormals kept; what is too
    large becomes +-65504.

    For scales: an infinite one would turn a whole block into infinities and NaN.
    """
    bits = np.int64(np.float32(x).view(np.uint32))
    sign = (bits >> 16) & 0x8000
    magnitude = bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return sign | 0x7E00
    if magnitude >= 0x477FF000:  # 65520 and above would round to infinity
        return sign | 0x7BFF
    if magnitude < 0x38800000:  # below 2^-14: subnormal half, unit 2^-24
        if magnitude < 0x33000000:
            return sign
        shift = 126 - (magnitude >> 23)
        mantissa = (magnitude & 0x7FFFFF) | 0x800000
        rest = mantissa & ((1 << shift) - 1)
        result = mantissa >> shift
        middle = 1 << (shift - 1)
        if rest > middle or (rest == middle and result & 1):
            result += 1
        return sign | result
    rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1)
    return sign | ((rounded - 0x38000000) >> 13)


@device_function
def nearest_half(x):
    """The value of the half nearest to the float32 `x`, ties to even, +-65504 beyond:
    `float_to_half` and back, without branches, so that loops over it become vector instructions.
    """
    a = min(np.float32(65504), abs(x))
    bits = np.float32(a).view(np.uint32)
    rounded = np.uint32(
        (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    ).view(np.float32)
    # Halves below 2^-14 and floats from 1/2 to 1 have the same spacing, 2^-24.
    small = (a + np.float32(0.5)) - np.float32(0.5)
    value = small if a < np.float32(2.0**-14) else rounded
    return -value if x < 0 else value


@device_function
def read_u16(block, at):
    """Return the little-endian uint16 at byte `at` of a block, uint8[...], as int64."""
    return np.int64(block[at]) | np.int64(block[at + 1]) << 8


@device_function
def write_u16(block, at, value):
    """Write the low 16 bits of `value` to a block, uint8[...], from byte `at` on, little-endian."""
    block[at] = value & 255
    block[at + 1] = value >> 8


@device_function
def read_half(block, at):
    """Return the float16 at byte `at` of a block, uint8[...], as float32."""
    return half_to_float(read_u16(block, at))


@device_function
def write_half(block, at, x):
    """Store x as a half and return the float32 value that a decoder will read back."""
    bits = float_to_half(x)
    write_u16(block, at, bits)
    return half_to_float(bits)


@device_function
def read_float(block, at):
    """Return the little-endian float32 at byte `at` of a block, uint8[...]."""
    bits = read_u16(block, at) | read_u16(block, at + 2) << 16
    return np.uint32(bits).view(np.float32)


@device_function
def write_float(block, at, x):
    """Write x as a little-endian float32 to a block, uint8[...], from byte `at` on."""
    bits = np.int64(np.float32(x).view(np.uint32))
    write_u16(block, at, bits & 0xFFFF)
    write_u16(block, at + 2, bits >> 16)
