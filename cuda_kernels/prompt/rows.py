"""Kernels of the prompt path at torch level: the operations between matrix products for many rows.

h is float32[T, width]. "half" is the activations' dtype, bfloat16 or float16. Nothing synchronizes;
results repeat bit for bit. Callers check first with the `*_fits` functions whether a kernel takes
the shape.
"""

from __future__ import annotations

import numpy as np
import torch

from ...errors import ShapeError
from ..common.gating import ACTIVATIONS, Gating
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from ..step.router import Routing

_HALVES = {torch.bfloat16: 0, torch.float16: 1}
_STORED = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_NORM_UNITS, _NORM_THREADS, _UNIT = (1, 2, 4, 8), 256, 8
_PER_LANE = (1, 2, 4, 8, 16)
_HEAD_UNITS = (8, 16, 32, 64)  # of a head, at most, for the kernels for heads
_ROPE_WARPS, _ROPE_ROUNDS, _ROUTE_WARPS = 8, 4, 4
_GROUP_THREADS = 1024


def _rows_spec(half: torch.dtype) -> KernelSpec:
    names = (
        *(f"add_norm_{n}" for n in _NORM_UNITS),
        *(f"add_layer_norm_{n}" for n in _NORM_UNITS),
        *(f"add_post_norm_{n}" for n in _NORM_UNITS),
        *(f"{activation}_gate" for activation in ACTIVATIONS),
        "gather_rows",
        "take_sinks",
        "from_other",
    )
    return KernelSpec(
        f"prompt_{_short(half)}", ("prompt/prompt.cu",), (("HALF", str(_HALVES[half])),), names
    )


def _heads_spec(half: torch.dtype, stored: torch.dtype) -> KernelSpec:
    names = tuple(f"heads_{style}_{n}" for style in ("norm", "neox") for n in _HEAD_UNITS)
    return KernelSpec(
        f"prompt_heads_{_short(half)}_{_short(stored)}",
        ("prompt/rope.cu",),
        (("HALF", str(_HALVES[half])), ("STORED", str(_STORED[stored]))),
        names,
    )


_EXPERTS_SPEC = KernelSpec(
    "prompt_experts", ("prompt/experts.cu",), (), (*(f"route_{n}" for n in _PER_LANE), "group_rows")
)


def _scores_spec(half: torch.dtype) -> KernelSpec:
    return KernelSpec(
        f"prompt_scores_{_short(half)}",
        ("prompt/scores.cu",),
        (("HALF", str(_HALVES[half])),),
        ("softmax_scores",),
    )


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]


def specs() -> list[KernelSpec]:
    """Return all kernels of this module."""
    return [
        *map(_rows_spec, _HALVES),
        *(_heads_spec(h, s) for h in _HALVES for s in _STORED),
        *map(_scores_spec, _HALVES),
        _EXPERTS_SPEC,
    ]


def norm_fits(width: int) -> bool:
    """Return whether `add_norm` takes rows of this width."""
    return width % _UNIT == 0 and width <= _NORM_UNITS[-1] * _NORM_THREADS * _UNIT


def add_norm(
    h: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
    *,
    delta: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    exact: torch.Tensor | None = None,
    permuted: bool = False,
    centered: bool = False,
    bias: torch.Tensor | None = None,
    post_weight: torch.Tensor | None = None,
    post_eps: float = 0.0,
    scale: float = 1.0,
) -> None:
    """Compute h += delta and out = h / sqrt(mean(h^2) + eps) * weight in half, and in float32 in
    `exact` where that is given.

    delta: half[T, width], or with weights float32[T, k] and rows int32[T, k] the outputs half[n,
    width] of experts: row rows[t, k] of it, times weights[t, k], is added to token t, k ascending;
    rows below 0 are left out. Without `out`, h += delta is all. permuted: the columns of `out` in
    the order of `grouped.py`, and its rows as long as whole groups of 128, filled up with 0.
    centered: the mean is subtracted from h first, and `bias` float32[width], if given, added in the
    end; not after a norm of what is added. With `post_weight`, h = (h + rms_norm(y)) * scale for
    what would be added, y, with these weights and `post_eps`.
    """
    if post_weight is None and scale != 1:
        raise ValueError("add_norm has a scale only after a norm of what is added")
    if post_weight is not None and (centered or delta is None):
        raise ValueError("a norm of what is added needs a delta, and no norm with a mean after it")
    tokens, width = h.shape
    given = out if out is not None else delta
    if given is None:
        raise ValueError("add_norm needs an output or a delta")
    half = given.dtype
    units = next(n for n in _NORM_UNITS if n * _NORM_THREADS * _UNIT >= width)
    slots = 0 if delta is None else 1 if weights is None else weights.shape[1]
    name = "add_layer_norm" if centered else "add_norm" if post_weight is None else "add_post_norm"
    post = () if post_weight is None else (post_weight, np.float32(post_eps), np.float32(scale))
    launch(
        function(_rows_spec(half), f"{name}_{units}", h.device),
        tokens,
        _NORM_THREADS,
        h,
        delta,
        weights,
        rows,
        np.int32(slots),
        weight,
        *((bias,) if centered else ()),
        np.float32(eps),
        out,
        np.int32(permuted),
        exact,
        np.int32(width),
        *post,
    )


def join_gate(
    gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, gating: Gating = Gating()
) -> None:
    """Compute out = silu(gate) * up, or as `gating` says, for half[rows, cols]; gate and up may be
    column ranges of one matrix (equal strides).
    """
    rows, cols = out.shape
    launch(
        function(_rows_spec(out.dtype), f"{gating.activation}_gate", out.device),
        -(-rows * cols // (256 * _UNIT)),
        256,
        gate,
        up,
        out,
        np.int64(rows),
        np.int32(cols),
        np.int32(gate.stride(0)),
        np.float32(gating.limit),
    )


def converted(x: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out = x, of any dtype and as many elements, rounded to the half of `out`."""
    if {x.dtype, out.dtype} == set(_HALVES) and x.is_contiguous() and x.numel() % _UNIT == 0:
        units = x.numel() // _UNIT
        launch(
            function(_rows_spec(out.dtype), "from_other", out.device),
            -(-units // 256),
            256,
            x,
            out,
            np.int64(units),
        )
    else:
        out.view(x.shape).copy_(x)


def take_sinks(x: torch.Tensor, log_sums: torch.Tensor, sinks: torch.Tensor) -> None:
    """Multiply x half[S, n, heads, length], the result of attention without sinks, by what the sink
    float32[heads] of each head leaves: sigmoid(log_sums - sinks) for log_sums float32[S, heads, n],
    the logarithms of the softmax's sums.
    """
    sequences, n, heads, length = x.shape
    if x.stride(3) != 1 or length % _UNIT:
        raise ShapeError(f"results of attention {list(x.shape)} with strides {x.stride()}")
    launch(
        function(_rows_spec(x.dtype), "take_sinks", x.device),
        -(-x.numel() // (256 * _UNIT)),
        256,
        x,
        log_sums.contiguous(),
        sinks,
        np.int64(sequences * n),
        np.int32(n),
        np.int32(heads),
        np.int32(length // _UNIT),
        np.int64(x.stride(0)),
        np.int64(x.stride(1)),
        np.int64(x.stride(2)),
    )


def gather_rows(x: torch.Tensor, sources: torch.Tensor, n_slots: int, out: torch.Tensor) -> None:
    """Compute out[i] = x[sources[i] // n_slots] for half[T, width]; rows of which the source is
    below 0 stay as they are.
    """
    units = x.shape[1] // _UNIT
    launch(
        function(_rows_spec(x.dtype), "gather_rows", x.device),
        len(sources),
        min(256, -(-units // 32) * 32),
        x,
        sources,
        np.int32(n_slots),
        out,
        np.int32(units),
    )


def heads_fit(size: int, n_rot: int) -> bool:
    """Return whether `rotate_heads` takes heads of this size with n_rot rotated elements."""
    return size % _UNIT == 0 and size <= _UNIT * _HEAD_UNITS[-1] and n_rot % (2 * _UNIT) == 0


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
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    value_eps: float | None = None,
) -> None:
    """Norm the joined products of a prompt by head (if there are weights), rotate them, and write
    them to where attention reads them.

    qkv: half[T, (heads + kv) * size + kv * value_size], or [T, (heads + kv) * size] where values
    are keys before norm and rotation; q: [T, heads, size]; k: [rows, kv, size] and v: [rows, kv,
    value_size], of which rows first .. first + T are written; q, k and v of one dtype (float16,
    bfloat16 or float32). cos, sin: float32[n, n_rot / 2] for the positions of a sequence: T is a
    multiple of n. value_eps: values are divided by their root mean square.
    """
    tokens, n_heads, size = q.shape
    n_kv, value_size, given = k.shape[1], v.shape[2], qkv.shape[1]
    value_at = (n_heads + n_kv) * size
    if given == value_at and value_size == size:  # values are keys
        value_at = n_heads * size
    elif given != value_at + n_kv * value_size:
        raise ValueError(
            f"rows of {given} elements for {n_heads} heads of queries and {n_kv} of keys of {size},"
            f" and values of {value_size}"
        )
    units = next(n for n in _HEAD_UNITS if _UNIT * n >= max(size, value_size))
    jobs = tokens * -(-(n_heads + 2 * n_kv) // (32 // min(units, 32) * _ROPE_ROUNDS))
    launch(
        function(
            _heads_spec(qkv.dtype, q.dtype),
            f"heads_{'neox' if neox else 'norm'}_{units}",
            qkv.device,
        ),
        -(-jobs // _ROPE_WARPS),
        32 * _ROPE_WARPS,
        qkv,
        np.int32(tokens),
        np.int32(n_heads),
        np.int32(n_kv),
        np.int32(given // _UNIT),
        np.int32(value_at // _UNIT),
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
        q,
        k,
        v,
        np.int64(first),
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
) -> None:
    """Compute out = softmax(scale * scores) for contiguous float32 and half[..., rows, keys], with
    scores that become softcap * tanh(scores / softcap) first if that is not 0. Row r is that of
    query r % queries, which sees keys up to first + r % queries, with a window only so many of
    them. `scores` is overwritten.
    """
    keys = scores.shape[-1]
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
    )


def route_fits(n_experts: int, n_used: int, routing: Routing = Routing()) -> bool:
    """Return whether `route` takes this many experts and groups."""
    return (
        n_experts <= 32 * _PER_LANE[-1]
        and n_used <= 32
        and routing.groups <= 32
        and n_experts % routing.groups == 0
        and routing.group_best <= 2
    )


def route(
    logits: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    ser: tuple[int, float] | None = None,
    routing: Routing = Routing(),
    choice_bias: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Choose the experts of each token from router logits float32[T, n_experts], or from parts
    float32[n, T, n_experts] that are added in order, plus bias float32[n_experts]: ids int32[T, k]
    and weights float32[T, k].

    They are the k with the largest scores, plus choice_bias float32[n_experts], in descending
    order, equal ones by ascending index; see `Routing`. With `ser` = (K, t) the experts from slot
    K on count only if their score exceeds t times that of the first; otherwise they have id -1 and
    weight 0.
    """
    tokens, n_experts = logits.shape[-2:]
    n_used = ids.shape[1]
    per_lane = next(n for n in _PER_LANE if 32 * n >= n_experts)
    always, threshold = ser or (n_used, 0.0)
    launch(
        function(_EXPERTS_SPEC, f"route_{per_lane}", logits.device),
        -(-tokens // _ROUTE_WARPS),
        32 * _ROUTE_WARPS,
        logits,
        np.int32(logits.numel() // (tokens * n_experts)),
        bias,
        np.int32(tokens),
        np.int32(n_experts),
        np.int32(n_used),
        np.int32(always),
        np.float32(threshold),
        np.int32(routing.sigmoid),
        np.int32(routing.norm),
        np.float32(routing.scale),
        np.int32(routing.groups),
        np.int32(routing.groups_used),
        np.int32(routing.group_best),
        choice_bias,
        ids,
        weights,
    )


def group_rows(
    ids: torch.Tensor, ends: torch.Tensor, sources: torch.Tensor, rows: torch.Tensor
) -> None:
    """Sort ids int32[T, k] by expert, stably: rows of one expert follow each other in (token, slot)
    order.

    ends int32[n_experts]: rows of experts 0..e; sources int32[T * k]: which flat (token, slot) a
    grouped row is, -1 after the last; rows int32[T, k]: the grouped row of each, -1 where the id
    is below 0.
    """
    launch(
        function(_EXPERTS_SPEC, "group_rows", ids.device),
        len(ends),
        _GROUP_THREADS,
        ids,
        np.int32(ids.numel()),
        ends,
        sources,
        rows,
    )
