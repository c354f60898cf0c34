"""Small operations between the products of a decoding step: `between.cu`."""

from __future__ import annotations

import numpy as np
import torch

from ..compile.launch import function, launch
from ..compile.spec import KernelSpec

THREADS = 256
_NONE = (0.0, 0.0, 0.0, 0.0)  # numbers of xIELU where there is another activation
ACTIVATIONS = ("silu", "gelu", "gelu_erf", "relu_squared", "xielu")  # numbers in the kernel
BETWEEN = KernelSpec(
    "step_between",
    ("step/between.cu",),
    (),
    (
        "add_normed",
        "sum_normed",
        "norm_heads",
        "layer_inputs",
        "layer_norm",
        "center",
        "activate",
        "scale",
        "clear",
        "cap",
        "take_share",
        "gate_heads",
    ),
)


def specs() -> list[KernelSpec]:
    """Return all kernels of this module."""
    return [BETWEEN]


def add_normed(
    x: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    """Compute h += y / sqrt(mean(y^2) + eps) * weight for y = x + bias, and set x to 0: x and h
    float32[n, width], weight and bias float32[width].
    """
    n, width = h.shape
    launch(
        function(BETWEEN, "add_normed", h.device),
        n,
        THREADS,
        x,
        bias,
        weight,
        np.float32(eps),
        h,
        np.int32(width),
        pdl=True,
    )


def layer_norm(
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
) -> None:
    """Compute out = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias for h and out float32[n,
    width], weight and bias float32[width].
    """
    n, width = h.shape
    launch(
        function(BETWEEN, "layer_norm", h.device),
        n,
        THREADS,
        h,
        weight,
        bias,
        np.float32(eps),
        out,
        np.int32(width),
        pdl=True,
    )


def center(h: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out = h - mean(h) for h and out float32[n, width]."""
    n, width = h.shape
    launch(function(BETWEEN, "center", h.device), n, THREADS, h, out, np.int32(width), pdl=True)


def activate(
    x: torch.Tensor,
    out: torch.Tensor,
    activation: str,
    *,
    bias: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    xielu: tuple[float, ...] | None = None,
) -> None:
    """Compute out = activation(x + bias), times up + up_bias if that is given, for x, up and out
    float32[n, cols] and biases float32[cols]. out may be x. xielu: alpha_p, alpha_n, beta and eps
    of that activation.
    """
    launch(
        function(BETWEEN, "activate", x.device),
        -(-x.numel() // THREADS),
        THREADS,
        x,
        bias,
        up,
        up_bias,
        out,
        np.int32(ACTIVATIONS.index(activation)),
        np.int32(x.shape[-1]),
        np.int32(x.numel()),
        *map(np.float32, xielu or _NONE),
        pdl=True,
    )


def scale(x: torch.Tensor, factor: float) -> None:
    """Compute x *= factor for contiguous float32."""
    launch(
        function(BETWEEN, "scale", x.device),
        -(-x.numel() // THREADS),
        THREADS,
        x,
        np.float32(factor),
        np.int32(x.numel()),
        pdl=True,
    )


def clear(x: torch.Tensor) -> None:
    """Set contiguous float32 to 0."""
    launch(
        function(BETWEEN, "clear", x.device),
        -(-x.numel() // THREADS),
        THREADS,
        x,
        np.int32(x.numel()),
        pdl=True,
    )


def sum_normed(
    first: torch.Tensor,
    first_weight: torch.Tensor,
    first_eps: float,
    second: torch.Tensor,
    second_weight: torch.Tensor,
    second_eps: float,
    out: torch.Tensor,
) -> None:
    """Compute out = rms_norm(first) + rms_norm(second), and set second to 0: float32[n, width],
    weights float32[width].
    """
    n, width = out.shape
    launch(
        function(BETWEEN, "sum_normed", out.device),
        n,
        THREADS,
        first,
        first_weight,
        np.float32(first_eps),
        second,
        second_weight,
        np.float32(second_eps),
        out,
        np.int32(width),
        pdl=True,
    )


def norm_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    size: int,
    own: torch.Tensor | None,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
) -> None:
    """Compute q_out = rms_norm(q) and k_out = rms_norm(k), over all heads of a row together: q, k
    and results float32[n, heads * size], weights float32[heads * size]. own: int32, the number of
    each head of q_out and then of k_out among those of q and k; None for all in their order.
    """
    n, q_width = q.shape
    launch(
        function(BETWEEN, "norm_heads", q.device),
        (n, 2),
        THREADS,
        q,
        k,
        q_weight,
        k_weight,
        np.float32(eps),
        own,
        q_out,
        k_out,
        np.int32(q_width),
        np.int32(k.shape[1]),
        np.int32(q_out.shape[1] // size),
        np.int32(k_out.shape[1] // size),
        np.int32(size),
        pdl=True,
    )


def layer_inputs(
    projected: torch.Tensor,
    scale: float,
    weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    table_scale: float,
    out: torch.Tensor,
) -> None:
    """Compute out[layer, row] = (rms_norm(projected[row, layer] * scale) + table_scale * table[row,
    layer]) / sqrt(2): projected and table float32[n, layers, length], weight float32[length], out
    float32[layers, n, length].
    """
    n_layers, n, length = out.shape
    launch(
        function(BETWEEN, "layer_inputs", out.device),
        (n_layers, n),
        THREADS,
        projected,
        np.float32(scale),
        weight,
        np.float32(eps),
        table,
        np.float32(table_scale),
        out,
        np.int32(length),
        pdl=True,
    )


def cap(x: torch.Tensor, most: float) -> None:
    """Compute x = most * tanh(x / most) for contiguous float32."""
    launch(
        function(BETWEEN, "cap", x.device),
        -(-x.numel() // THREADS),
        THREADS,
        x,
        np.float32(most),
        np.int32(x.numel()),
        pdl=True,
    )


def take_share(h: torch.Tensor, weight: torch.Tensor, eps: float, hidden: torch.Tensor) -> None:
    """Compute hidden *= sigmoid(h / sqrt(mean(h^2) + eps) . weight), row by row: h float32[n,
    width], weight float32[width], hidden float32 or bfloat16[n, cols].
    """
    launch(
        function(BETWEEN, "take_share", h.device),
        len(h),
        THREADS,
        h,
        weight,
        np.float32(eps),
        hidden,
        np.int32(hidden.dtype == torch.bfloat16),
        np.int32(h.shape[1]),
        np.int32(hidden.shape[1]),
        pdl=True,
    )


def gate_heads(x: torch.Tensor, gates: torch.Tensor) -> None:
    """Compute x[row, head] *= sigmoid(gates[row, head]) for contiguous x float32[n, heads * length]
    and gates float32[n, heads].
    """
    launch(
        function(BETWEEN, "gate_heads", x.device),
        -(-x.numel() // THREADS),
        THREADS,
        x,
        gates,
        np.int32(x.shape[1] // gates.shape[1]),
        np.int32(x.numel()),
        pdl=True,
    )
