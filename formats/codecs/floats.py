"""F32, F16 and BF16: plain arrays.

Large arrays are encoded by compiled loops, `f16_of` and `bf16_of`; the numpy expressions beside
them say the same and serve small ones, for which compiled code need not be loaded.
"""

from __future__ import annotations

import numpy as np

from ..kernel import over_blocks

_COMPILED_FROM = 1 << 18  # elements
_U1, _U16 = np.uint32(1), np.uint32(16)


def decode_f32(data: np.ndarray, out: np.ndarray) -> None:
    """Decode rows of F32: data uint8[rows, 4*n_cols] to out float32[rows, n_cols]."""
    out[...] = data.view("<f4")


def decode_f16(data: np.ndarray, out: np.ndarray) -> None:
    """Decode rows of F16: data uint8[rows, 2*n_cols] to out float32[rows, n_cols]."""
    out[...] = data.view("<f2")


def decode_bf16(data: np.ndarray, out: np.ndarray) -> None:
    """A BF16 is the upper half of a float32."""
    np.left_shift(data.view("<u2"), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)


def encode_f32(x: np.ndarray) -> np.ndarray:
    """Encode float32[rows, n_cols] to the bytes of F32, uint8[rows, 4*n_cols]."""
    return np.ascontiguousarray(x, dtype="<f4").view(np.uint8)


def f16_of(bits, out):
    """Float32 patterns to F16 patterns, to nearest even. Below 2^-14 an F16 counts in steps of
    2^-24: the significand with its leading bit is shifted by as much as its exponent asks for.
    """
    for i in range(bits.size):
        b = bits[i]
        sign, a = (b >> _U16) & np.uint32(0x8000), b & np.uint32(0x7FFFFFFF)
        normal = (
            a + np.uint32(0xFFF) + ((a >> np.uint32(13)) & _U1) - np.uint32(0x38000000)
        ) >> np.uint32(13)
        significand, shift = (
            (a & np.uint32(0x7FFFFF)) | np.uint32(0x800000),
            min(np.uint32(126) - min(a >> np.uint32(23), np.uint32(112)), np.uint32(25)),
        )
        whole = significand >> shift
        small = (significand + (_U1 << (shift - _U1)) - _U1 + (whole & _U1)) >> shift
        value = small if a < np.uint32(0x38800000) else min(normal, np.uint32(0x7C00))
        nan = max(np.uint32(0x7C00) + ((a >> np.uint32(13)) & np.uint32(0x3FF)), np.uint32(0x7C01))
        out[i] = sign | (nan if a > np.uint32(0x7F800000) else value)


def bf16_of(bits, out):
    """Float32 patterns to BF16 patterns as `encode_bf16` says."""
    for i in range(bits.size):
        b = bits[i]
        rounded = (b + np.uint32(0x7FFF) + ((b >> _U16) & _U1)) >> _U16
        out[i] = (
            (b >> _U16) | np.uint32(0x40)
            if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            else rounded
        )


def _compiled(function, x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, dtype="<f4").view(np.uint32)
    out = np.empty(x.shape, "<u2")
    over_blocks(function)(bits.reshape(1, 1, -1), out.reshape(1, 1, -1))
    return out.view(np.uint8)


def encode_f16(x: np.ndarray) -> np.ndarray:
    """Encode float32[rows, n_cols] to the bytes of F16, uint8[rows, 2*n_cols], rounded to nearest
    even. Values beyond 65504 become infinity, as in ggml.
    """
    if x.size >= _COMPILED_FROM:
        return _compiled(f16_of, x)
    with np.errstate(over="ignore"):  # values beyond 65504 become infinity, as in ggml
        return x.astype("<f2").view(np.uint8)


def encode_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even on the bit pattern. A NaN keeps its upper bits and becomes quiet."""
    if x.size >= _COMPILED_FROM:
        return _compiled(bf16_of, x)
    bits = np.ascontiguousarray(x, dtype="<f4").view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        rounded = np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
    return rounded.astype("<u2").view(np.uint8)
