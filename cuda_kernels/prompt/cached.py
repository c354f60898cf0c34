"""Rows of quantized caches in prompts: `prompt/cached.cu`."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import ShapeError
from ...formats.types import ggml_type
from ..attention.shape import CACHE_TILE as TILE
from ..attention.shape import TYPES
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .overlap import overlap

_WARPS, _THREADS, _UNIT = 8, 256, 8


def _spec(type: str, length: int, hadamard: int = 0, alone: bool = False) -> KernelSpec:
    return KernelSpec(
        f"prompt_cached_{type.lower()}_{length}_{hadamard}{'_alone' if alone else ''}",
        ("prompt/cached.cu",),
        (
            ("ROW_TYPE", str(TYPES[type])),
            ("LENGTH", str(length)),
            ("HADAMARD", str(hadamard)),
            ("ALONE", str(int(alone))),
        ),
        ("store_rows", "read_rows"),
    )


def specs() -> list[KernelSpec]:
    """Return every type once. Other lengths are compiled on first use."""
    quantized = (name for name in TYPES if name not in ("F32", "F16", "BF16"))
    return [
        *(_spec(name, 128) for name in quantized),
        _spec("Q8_0", 192, 64),
        _spec("Q8_0", 576, alone=True),
    ]


def _check(rows: torch.Tensor, cache: torch.Tensor, first: int, type: str, alone: bool) -> None:
    (n, heads, length), together = rows.shape, 1 if alone else TILE
    row_bytes = ggml_type(type).row_bytes(length)
    tiles, wanted = -(-(first + n) // together), (heads, together * row_bytes)
    whole = rows.is_contiguous() and cache.is_contiguous()
    if first < 0 or len(cache) < tiles or tuple(cache.shape[1:]) != wanted or not whole:
        raise ShapeError(
            f"rows {list(rows.shape)} from position {first} in a cache of {type}"
            f" {list(cache.shape)}: expected contiguous bytes [{tiles} or more, {wanted[0]},"
            f" {wanted[1]}]"
        )


def store_rows(
    x: torch.Tensor,
    cache: torch.Tensor,
    first: int,
    type: str,
    hadamard: int = 0,
    alone: bool = False,
) -> None:
    """Encode x float32[n, heads, length] to positions from `first` of a cache of a quantized type,
    uint8[tiles, heads, TILE * row_bytes] (`runtime/state/cache_tiles.py`), after the Hadamard
    transform in blocks of `hadamard` where that is not 0. alone: the cache is uint8[positions,
    heads, row_bytes] instead, with the fields of a row together.
    """
    _check(x, cache, first, type, alone)
    n, heads, length = x.shape
    if n:
        kernel = function(_spec(type, length, hadamard, alone), "store_rows", x.device)
        blocks, numbers = -(-n * heads // _WARPS), map(np.int32, (first, heads, n * heads))
        launch(kernel, blocks, 32 * _WARPS, x, cache, *numbers, pdl=overlap(n))


def read_rows(
    cache: torch.Tensor, out: torch.Tensor, first: int, type: str, alone: bool = False
) -> None:
    """Decode what `store_rows` has written at positions from `first` to out float16[n, heads,
    length]; a transform is not undone.
    """
    _check(out, cache, first, type, alone)
    units = out.numel() // _UNIT
    if units:
        kernel = function(_spec(type, out.shape[2], alone=alone), "read_rows", out.device)
        at, heads = np.int32(first), np.int32(out.shape[1])
        launch(
            kernel,
            -(-units // _THREADS),
            _THREADS,
            cache,
            out,
            at,
            heads,
            np.int64(units),
            pdl=overlap(len(out)),
        )
