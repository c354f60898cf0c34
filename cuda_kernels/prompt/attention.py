"""Kernels of attention in prompts at torch level: heads, and softmax of scores."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from ...errors import ShapeError
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .overlap import overlap
from .rows import HALVES, UNIT, short

_STORED = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_HEAD_UNITS = (8, 16, 32, 64)  # of a head, at most, for the kernels for heads
_ROPE_WARPS, _ROPE_ROUNDS = 8, 4


class OwnAmong(NamedTuple):
    """Heads among more, `n_queries` and `n_keys` of them. heads: int32, the number of each head of
    queries, then of each of keys.
    """

    n_queries: int
    n_keys: int
    heads: torch.Tensor


@functools.cache
def _heads_spec(half: torch.dtype, stored: torch.dtype, norms_last: bool) -> KernelSpec:
    names = tuple(f"heads_{style}_{n}" for style in ("norm", "neox") for n in _HEAD_UNITS)
    return KernelSpec(
        f"prompt_heads_{short(half)}_{short(stored)}{'_norms_last' * norms_last}",
        ("prompt/rope.cu",),
        (
            ("HALF", str(HALVES[half])),
            ("STORED", str(_STORED[stored])),
            ("NORMS_LAST", str(int(norms_last))),
        ),
        names,
    )


@functools.cache
def _scores_spec(half: torch.dtype) -> KernelSpec:
    return KernelSpec(
        f"prompt_scores_{short(half)}",
        ("prompt/scores.cu",),
        (("HALF", str(HALVES[half])),),
        ("softmax_scores",),
    )


def specs() -> list[KernelSpec]:
    """Return all kernels of this module."""
    heads = (_heads_spec(h, s, last) for h in HALVES for s in _STORED for last in (False, True))
    return [*heads, *map(_scores_spec, HALVES)]


def heads_fit(size: int, n_rot: int) -> bool:
    """Return whether `rotate_heads` takes heads of this size with n_rot rotated elements."""
    return size % UNIT == 0 and size <= UNIT * _HEAD_UNITS[-1] and n_rot % (2 * UNIT) == 0


def rotate_heads(
    qkv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    neox: bool,
    gated: bool = False,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    value_eps: float | None = None,
    norms_last: bool = False,
    factors: torch.Tensor | None = None,
    own: OwnAmong | None = None,
) -> None:
    """Norm the joined products of a prompt by head (if there are weights), rotate them (first of
    all with `norms_last`), and write them to where attention reads them.

    qkv: half[T, (heads + kv) * size + kv * value_size], or [T, (heads + kv) * size] where values
    are keys before norm and rotation; q: [T, heads, size]; k: [rows, kv, size] and v: [rows, kv,
    value_size], of which rows first .. first + T are written; q, k and v of one dtype (float16,
    bfloat16 or float32). cos, sin: float32[n, n_rot / 2] for the positions of a sequence: T is a
    multiple of n. gated: a gate of `size` elements follows every head of queries and is left out.
    value_eps: values are divided by their root mean square. factors: float32[T, 2], what queries
    and keys are multiplied by besides weights, which then are those of all heads. own: queries and
    keys of qkv are more than those of q and k. Raise ValueError for rows that do not fit the heads.
    """
    tokens, n_heads, size = q.shape
    n_kv, value_size, given = k.shape[1], v.shape[2], qkv.shape[1]
    query_step = 2 * size if gated else size
    of_queries, of_keys = (n_heads, n_kv) if own is None else (own.n_queries, own.n_keys)
    key_at = of_queries * query_step
    value_at = key_at + of_keys * size
    if given == value_at and value_size == size:  # values are keys
        value_at = key_at
    elif given != value_at + n_kv * value_size:
        raise ValueError(
            f"rows of {given} elements for {of_queries} heads of queries{' with gates' * gated} and"
            f" {of_keys} of keys of {size}, and values of {value_size}"
        )
    units = next(n for n in _HEAD_UNITS if UNIT * n >= max(size, value_size))
    jobs = tokens * -(-(n_heads + 2 * n_kv) // (32 // min(units, 32) * _ROPE_ROUNDS))
    launch(
        function(
            _heads_spec(qkv.dtype, q.dtype, norms_last),
            f"heads_{'neox' if neox else 'norm'}_{units}",
            qkv.device,
        ),
        -(-jobs // _ROPE_WARPS),
        32 * _ROPE_WARPS,
        qkv,
        np.int32(tokens),
        np.int32(n_heads),
        np.int32(n_kv),
        np.int32(given // UNIT),
        np.int32(query_step // UNIT),
        np.int32(key_at // UNIT),
        np.int32(value_at // UNIT),
        np.int32(size),
        np.int32(value_size),
        np.int32(2 * cos.shape[1]),
        cos,
        sin,
        np.int32(len(cos)),
        q_norm,
        k_norm,
        np.float32(eps),
        np.float32(-1 if value_eps is None else value_eps),
        factors,
        None if own is None else own.heads,
        q,
        k,
        v,
        np.int64(first),
        pdl=overlap(tokens),
    )


def softmax_scores(
    scores: torch.Tensor,
    out: torch.Tensor,
    queries: int,
    first: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute out = softmax(scale * scores) for contiguous float32 and half[..., rows, keys], with
    scores that become softcap * tanh(scores / softcap) first if that is not 0. Row r is that of
    query r % queries, which sees keys up to first + r % queries, with a window only so many of
    them. sinks: float32[heads], a further score for all `queries` rows of a head, whose share is
    left out. `scores` is overwritten. Raise ShapeError for another number of sinks.
    """
    keys = scores.shape[-1]
    if sinks is not None and sinks.numel() * queries * keys != scores.numel():
        raise ShapeError(
            f"{sinks.numel()} sinks for scores {list(scores.shape)} of {queries} rows a head"
        )
    launch(
        function(_scores_spec(out.dtype), "softmax_scores", out.device),
        scores.numel() // keys,
        256,
        scores,
        out,
        np.int32(keys),
        np.int32(queries),
        np.int32(first),
        np.int32(window),
        np.float32(scale),
        np.float32(softcap),
        sinks,
        pdl=overlap(queries),
    )
