"""Kernels of the prompt path at torch level: the operations between matrix products for many rows.

h is float32[T, width]. "half" is the activations' dtype, bfloat16 or float16. Nothing synchronizes;
results repeat bit for bit. Callers check first with the `*_fits` functions whether a kernel takes
the shape.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ...errors import ShapeError
from ..common.gating import ACTIVATIONS, Gating
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .overlap import overlap

HALVES = {torch.bfloat16: 0, torch.float16: 1}
_NORM_UNITS, _NORM_THREADS, UNIT = (1, 2, 4, 8), 256, 8


@functools.cache
def _rows_spec(half: torch.dtype) -> KernelSpec:
    names = (
        *(f"add_norm_{n}" for n in _NORM_UNITS),
        *(f"add_more_norm_{n}" for n in _NORM_UNITS),
        *(f"add_layer_norm_{n}" for n in _NORM_UNITS),
        *(f"add_post_norm_{n}" for n in _NORM_UNITS),
        *(f"{activation}_gate" for activation in ACTIVATIONS),
        "gather_rows",
        "row_factors",
        "xielu_rows",
        "take_sinks",
        "from_other",
    )
    return KernelSpec(
        f"prompt_{short(half)}", ("prompt/prompt.cu",), (("HALF", str(HALVES[half])),), names
    )


def short(dtype: torch.dtype) -> str:
    """Return what names of kernels call a dtype."""
    return {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]


def specs() -> list[KernelSpec]:
    """Return all kernels of this module."""
    return [*map(_rows_spec, HALVES)]


def norm_fits(width: int) -> bool:
    """Return whether `add_norm` takes rows of this width."""
    return width % UNIT == 0 and width <= _NORM_UNITS[-1] * _NORM_THREADS * UNIT


def add_norm(
    h: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
    *,
    delta: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    extra: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
    exact: torch.Tensor | None = None,
    permuted: bool = False,
    plain: torch.Tensor | None = None,
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
    rows below 0 are left out. Before them `extra` half[T, width] is added, if given, with `shares`
    float32[T] times sigmoid(shares). Without `out`, h += delta is all. permuted: the columns of
    `out` in the order of `grouped.py`, and its rows as long as whole groups of 128, filled up with
    0; `plain` half[T, width] then gets them as they are, if given. centered: the mean is subtracted
    from h first, and `bias` float32[width], if given, added in the end; not after a norm of what is
    added. With `post_weight`, h = (h + rms_norm(y)) * scale for what would be added, y, with these
    weights and `post_eps`.
    """
    if post_weight is None and scale != 1:
        raise ValueError("add_norm has a scale only after a norm of what is added")
    if post_weight is not None and (centered or delta is None):
        raise ValueError("a norm of what is added needs a delta, and no norm with a mean after it")
    more = extra is not None or plain is not None
    if more and (centered or post_weight is not None or (extra is not None and weights is None)):
        raise ValueError(
            "add_norm adds more only next to the outputs of experts, and has no more outputs with"
            " other norms"
        )
    if plain is not None and (out is None or not permuted):
        raise ValueError("add_norm writes rows as they are only next to permuted ones")
    tokens, width = h.shape
    given = out if out is not None else delta
    if given is None:
        raise ValueError("add_norm needs an output or a delta")
    half = given.dtype
    units = next(n for n in _NORM_UNITS if n * _NORM_THREADS * UNIT >= width)
    slots = 0 if delta is None else 1 if weights is None else weights.shape[1]
    name = "add_more_norm" if more else "add_layer_norm" if centered else "add_norm"
    if post_weight is not None:
        name = "add_post_norm"
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
        *((extra, shares, plain) if more else ()),
        *post,
        pdl=overlap(len(h)),
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
        -(-rows * cols // (256 * UNIT)),
        256,
        gate,
        up,
        out,
        np.int64(rows),
        np.int32(cols),
        np.int32(gate.stride(0)),
        np.float32(gating.limit),
        pdl=overlap(rows),
    )


def xielu(x: torch.Tensor, alpha_p: float, alpha_n: float, beta: float, eps: float) -> None:
    """Compute the activation xIELU of half[rows, cols], one row after the other, in place."""
    units = x.numel() // UNIT
    launch(
        function(_rows_spec(x.dtype), "xielu_rows", x.device),
        -(-units // 256),
        256,
        x,
        np.int64(units),
        *map(np.float32, (alpha_p, alpha_n, beta, eps)),
        pdl=overlap(len(x)),
    )


def converted(x: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out = x, of any dtype and as many elements, rounded to the half of `out`."""
    if {x.dtype, out.dtype} == set(HALVES) and x.is_contiguous() and x.numel() % UNIT == 0:
        units = x.numel() // UNIT
        launch(
            function(_rows_spec(out.dtype), "from_other", out.device),
            -(-units // 256),
            256,
            x,
            out,
            np.int64(units),
            pdl=overlap(len(out)),
        )
    else:
        out.view(x.shape).copy_(x)


def take_sinks(x: torch.Tensor, log_sums: torch.Tensor, sinks: torch.Tensor) -> None:
    """Multiply x half[S, n, heads, length], the result of attention without sinks, by what the sink
    float32[heads] of each head leaves: sigmoid(log_sums - sinks) for log_sums float32[S, heads, n],
    the logarithms of the softmax's sums. Raise ShapeError for another layout of x.
    """
    sequences, n, heads, length = x.shape
    if x.stride(3) != 1 or length % UNIT:
        raise ShapeError(f"results of attention {list(x.shape)} with strides {x.stride()}")
    launch(
        function(_rows_spec(x.dtype), "take_sinks", x.device),
        -(-x.numel() // (256 * UNIT)),
        256,
        x,
        log_sums.contiguous(),
        sinks,
        np.int64(sequences * n),
        np.int32(n),
        np.int32(heads),
        np.int32(length // UNIT),
        np.int64(x.stride(0)),
        np.int64(x.stride(1)),
        np.int64(x.stride(2)),
        pdl=overlap(sequences * n),
    )


def row_factors(
    products: torch.Tensor, queries: int, key_at: int, keys: int, eps: float, out: torch.Tensor
) -> None:
    """Compute out[t] = 1 / sqrt(mean(x^2) + eps), float32[T, 2], for the first `queries` columns of
    half[T, ...], and for `keys` of them from `key_at` on; nothing for 0 columns.
    """
    launch(
        function(_rows_spec(products.dtype), "row_factors", products.device),
        (len(products), 2),
        _NORM_THREADS,
        products,
        np.int32(products.shape[1] // UNIT),
        np.int32(queries // UNIT),
        np.int32(key_at // UNIT),
        np.int32(keys // UNIT),
        np.float32(eps),
        out,
        pdl=overlap(len(products)),
    )


def gather_rows(x: torch.Tensor, sources: torch.Tensor, n_slots: int, out: torch.Tensor) -> None:
    """Compute out[i] = x[sources[i] // n_slots] for half[T, width]; rows of which the source is
    below 0 stay as they are.
    """
    units = x.shape[1] // UNIT
    launch(
        function(_rows_spec(x.dtype), "gather_rows", x.device),
        len(sources),
        min(256, -(-units // 32) * 32),
        x,
        sources,
        np.int32(n_slots),
        out,
        np.int32(units),
        pdl=overlap(len(sources)),
    )
