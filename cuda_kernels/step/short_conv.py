"""A gated short convolution in a decoding step: `step/short_conv.cu`."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..compile.launch import function, launch
from ..compile.spec import KernelSpec

MOST_TAPS, THREADS = 16, 128


@functools.cache
def short_conv_spec(taps: int) -> KernelSpec:
    """Return the kernel for so many taps, 2 to MOST_TAPS."""
    return KernelSpec(
        f"step_short_conv_{taps}",
        ("step/short_conv.cu",),
        (("TAPS", str(taps)),),
        ("short_conv",),
    )


def short_conv(
    products: torch.Tensor,
    taps: torch.Tensor,
    inputs: torch.Tensor,
    other: torch.Tensor | None,
    positions: torch.Tensor,
    begun: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute out = c * conv(b * x), float32[rows, channels], for products float32[rows, 3 *
    channels], which are b, c and x, and update inputs float32[taps - 1, channels], the last b * x.
    taps float32[channels, taps], the last for the current token.

    other, positions, begun: see `step.recurrent.StepState`.
    """
    channels, n_taps = taps.shape
    launch(
        function(short_conv_spec(n_taps), "short_conv", out.device),
        -(-channels // THREADS),
        THREADS,
        products,
        taps,
        inputs,
        other,
        positions,
        begun,
        out,
        np.int32(len(out)),
        np.int32(channels),
        pdl=True,
    )


def specs() -> list[KernelSpec]:
    """Return the kernel of LFM2. Others are compiled on first use."""
    return [short_conv_spec(3)]
