"""Rows of quantized caches in prompts: `prompt/cached.cu`."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import ShapeError
from ...formats.types import ggml_type
from ..attention.shape import TYPES
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec

_WARPS, _THREADS, _UNIT = 8, 256, 8


def _spec(type: str, length: int, hadamard: int = 0) -> KernelSpec:
    return KernelSpec(
        f"prompt_cached_{type.lower()}_{length}_{hadamard}",
        ("prompt/cached.cu",),
        (("ROW_TYPE", str(TYPES[type])), ("LENGTH", str(length)), ("HADAMARD", str(hadamard))),
        ("store_rows", "read_rows"),
    )


def specs() -> list[KernelSpec]:
    """Return every type once. Other lengths are compiled on first use."""
    quantized = (name for name in TYPES if name not in ("F32", "F16", "BF16"))
    return [*(_spec(name, 128) for name in quantized), _spec("Q8_0", 192, 64)]


def _check(rows: torch.Tensor, cache: torch.Tensor, type: str) -> None:
    wanted = (*rows.shape[:2], ggml_type(type).row_bytes(rows.shape[2]))
    if tuple(cache.shape) != wanted or not (rows.is_contiguous() and cache.is_contiguous()):
        raise ShapeError(
            f"rows {list(rows.shape)} in a cache of {type} {list(cache.shape)}: expected contiguous"
            f" bytes {list(wanted)}"
        )


def store_rows(x: torch.Tensor, cache: torch.Tensor, type: str, hadamard: int = 0) -> None:
    """Encode x float32[rows, heads, length] to cache uint8[rows, heads, row_bytes] of a quantized
    type, with its fields together (`CacheType.by_fields`), after the Hadamard transform in blocks
    of `hadamard` where that is not 0.
    """
    _check(x, cache, type)
    n_rows, length = x.shape[0] * x.shape[1], x.shape[2]
    if n_rows:
        kernel = function(_spec(type, length, hadamard), "store_rows", x.device)
        launch(kernel, -(-n_rows // _WARPS), 32 * _WARPS, x, cache, np.int32(n_rows))


def read_rows(cache: torch.Tensor, out: torch.Tensor, type: str) -> None:
    """Decode what `store_rows` has written to out float16[rows, heads, length]; a transform is not
    undone.
    """
    _check(out, cache, type)
    units = out.numel() // _UNIT
    if units:
        kernel = function(_spec(type, out.shape[2]), "read_rows", out.device)
        launch(kernel, -(-units // _THREADS), _THREADS, cache, out, np.int64(units))
