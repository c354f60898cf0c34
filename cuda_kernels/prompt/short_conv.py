"""Gated short convolutions over many rows: `prompt/short_conv.cu`."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .overlap import overlap
from .rows import HALVES, UNIT, short

MOST_TAPS, THREADS, TOKENS = 8, 128, 32


@functools.cache
def short_conv_spec(half: torch.dtype, taps: int) -> KernelSpec:
    """Return the kernel for activations of `half` and so many taps, 2 to MOST_TAPS."""
    return KernelSpec(
        f"prompt_short_conv_{taps}_{short(half)}",
        ("prompt/short_conv.cu",),
        (("HALF", str(HALVES[half])), ("TAPS", str(taps))),
        ("short_conv",),
    )


def short_conv(
    products: torch.Tensor,
    past: torch.Tensor | None,
    taps: torch.Tensor,
    n_sequences: int,
    out: torch.Tensor,
) -> None:
    """Compute out = c * conv(b * x), half[rows, channels], for products half[rows, 3 * channels],
    which are b, c and x, of sequences of equal length one after the other. past float32[taps - 1,
    channels]: b * x before the first row, of one sequence; None for zero. taps float32[channels,
    taps], the last for the current token. channels: a multiple of UNIT.
    """
    rows, channels = out.shape
    units, tokens = channels // UNIT, rows // n_sequences
    pieces = -(-tokens // TOKENS)
    launch(
        function(short_conv_spec(out.dtype, taps.shape[1]), "short_conv", out.device),
        (-(-units // THREADS), pieces * n_sequences),
        THREADS,
        products,
        past,
        taps,
        out,
        np.int32(tokens),
        np.int32(units),
        np.int32(pieces),
        pdl=overlap(rows),
    )


def specs() -> list[KernelSpec]:
    """Return the kernels of LFM2. Others are compiled on first use."""
    return [short_conv_spec(half, 3) for half in HALVES]
