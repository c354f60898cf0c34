"""Kernels of latent attention in prompts at torch level: what is between its matrix products.

"half" is the activations' dtype, bfloat16 or float16; "stored" is that of the cache and of
attention. Nothing synchronizes; results repeat bit for bit.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .overlap import overlap

_HALVES = {torch.bfloat16: 0, torch.float16: 1}
_STORED = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_THREADS, _WARPS, _UNIT = 256, 8, 8
_FUNCTIONS = ("norm_rows", "latent_rows", "latent_heads", "latent_keys")


@functools.cache
def _spec(half: torch.dtype, stored: torch.dtype) -> KernelSpec:
    return KernelSpec(
        f"prompt_latent_{_SHORT[half]}_{_SHORT[stored]}",
        ("prompt/latent.cu",),
        (("HALF", str(_HALVES[half])), ("STORED", str(_STORED[stored]))),
        _FUNCTIONS,
    )


def specs() -> list[KernelSpec]:
    """Return all kernels of this module."""
    return [_spec(half, stored) for half in _HALVES for stored in _STORED]


def fits(nope: int, rope: int, rank: int, neox: bool = False) -> bool:
    """Return whether the kernels take heads and latent vectors of these sizes. neox: pairs are half
    of `rope` apart.
    """
    return nope % _UNIT == rope % (2 * _UNIT if neox else _UNIT) == rank % _UNIT == 0


def norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Compute out half[T, n] = x / sqrt(mean(x^2) + eps) * weight for columns x of half[T, ...]."""
    tokens, n = out.shape
    launch(
        function(_spec(out.dtype, out.dtype), "norm_rows", out.device),
        -(-tokens // _WARPS),
        _THREADS,
        x,
        np.int32(tokens),
        np.int32(n),
        np.int32(x.stride(0)),
        weight,
        np.float32(eps),
        out,
        pdl=overlap(len(x)),
    )


def latent_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor,
    first: int,
    neox: bool = False,
) -> None:
    """Write rows first .. first + T of stored[n, rope + rank]: the key, rotated, and the normed
    latent vector of columns x half[T, rank + rope], which have them the other way round.

    cos, sin: float32[n, rope / 2] for the positions of a sequence: T is a multiple of n. neox:
    pairs are half of `rope` apart.
    """
    rank, rope = len(weight), 2 * cos.shape[1]
    launch(
        function(_spec(x.dtype, rows.dtype), "latent_rows", x.device),
        -(-len(x) // _WARPS),
        _THREADS,
        x,
        np.int32(len(x)),
        np.int32(rank),
        np.int32(rope),
        np.int32(x.stride(0)),
        weight,
        np.float32(eps),
        cos,
        sin,
        np.int32(len(cos)),
        np.int32(neox),
        rows,
        np.int64(first),
        pdl=overlap(len(x)),
    )


def latent_heads(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    factors: torch.Tensor | None,
    out: torch.Tensor,
    neox: bool = False,
) -> None:
    """Write queries stored[T, heads, nope + rope] from columns q half[T, heads * (nope + rope)]:
    the last `rope` elements of each head rotated, all of it times factors float32[n] of the
    positions. neox: pairs are half of `rope` apart.
    """
    tokens, heads, size = out.shape
    rope = 2 * cos.shape[1]
    launch(
        function(_spec(q.dtype, out.dtype), "latent_heads", q.device),
        -(-out.numel() // (_UNIT * _THREADS)),
        _THREADS,
        q,
        np.int32(tokens),
        np.int32(heads),
        np.int32(size - rope),
        np.int32(rope),
        np.int32(q.stride(0)),
        cos,
        sin,
        np.int32(len(cos)),
        np.int32(neox),
        factors,
        out,
        pdl=overlap(tokens),
    )


def latent_keys(rows: torch.Tensor, rope: int, keys: torch.Tensor) -> None:
    """Write the last `rope` elements of every head of keys stored[N, heads, nope + rope]: the first
    ones of rows stored[N, rope + rank].
    """
    positions, heads, size = keys.shape
    launch(
        function(_spec(keys.dtype, keys.dtype), "latent_keys", keys.device),
        -(-positions * heads * rope // (_UNIT * _THREADS)),
        _THREADS,
        rows,
        np.int64(positions),
        np.int32(rows.shape[1]),
        np.int32(heads),
        np.int32(size - rope),
        np.int32(rope),
        keys,
        pdl=overlap(positions),
    )
