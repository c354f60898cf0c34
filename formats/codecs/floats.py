"""F32, F16 and BF16: plain arrays."""

from __future__ import annotations

import numpy as np


def decode_f32(data: np.ndarray, out: np.ndarray) -> None:
    out[...] = data.view("<f4")


def decode_f16(data: np.ndarray, out: np.ndarray) -> None:
    out[...] = data.view("<f2")


def decode_bf16(data: np.ndarray, out: np.ndarray) -> None:
    """A BF16 is the upper half of a float32."""
    np.left_shift(data.view("<u2"), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)


def encode_f32(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, dtype="<f4").view(np.uint8)


def encode_f16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # values beyond 65504 become infinity, as in ggml
        return x.astype("<f2").view(np.uint8)


def encode_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even on the bit pattern; a NaN keeps its upper bits and gets the quiet bit."""
    bits = np.ascontiguousarray(x, dtype="<f4").view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        rounded = np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
    return rounded.astype("<u2").view(np.uint8)
