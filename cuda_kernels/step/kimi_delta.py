"""Kimi delta attention in a decoding step: `kimi_delta.cu` for one shape."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .recurrent import StepState

MOST_LENGTH = 128


@dataclass(frozen=True)
class KimiDeltaShape:
    """`rows` new tokens, heads, the length of their keys and values, the taps of the convolutions,
    and the lower bound of the logarithms of decays, 0 for none.
    """

    rows: int
    heads: int
    length: int
    taps: int
    bound: float = 0.0

    @property
    def fits(self) -> bool:
        """Return whether there is a kernel for the shape."""
        return self.length % 4 == 0 and self.length <= MOST_LENGTH and self.taps >= 2

    @property
    def threads(self) -> int:
        """Threads of a block: a warp for every 8 columns of a head's memory."""
        return 32 * -(-self.length // 8)


@functools.cache
def kimi_delta_spec(s: KimiDeltaShape) -> KernelSpec:
    """Return the kernel for a shape."""
    bound = float(np.float32(s.bound))
    above = f"_above_{-bound:g}".replace(".", "_") if bound else ""
    return KernelSpec(
        f"kimi_delta_{s.heads}x{s.length}_{s.taps}x{s.rows}{above}",
        ("step/kimi_delta.cu",),
        (
            ("ROWS", str(s.rows)),
            ("HEADS", str(s.heads)),
            ("LENGTH", str(s.length)),
            ("TAPS", str(s.taps)),
            ("BOUND", f"({bound!r}f)"),
        ),
        ("kimi_delta",),
    )


class StepKimiDelta:
    """Launch Kimi delta attention of one shape."""

    def __init__(self, shape: KimiDeltaShape, device: torch.device):
        self.shape = shape
        self._kernel = function(kimi_delta_spec(shape), "kimi_delta", device)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
        taps: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        state: StepState,
        out: torch.Tensor,
    ) -> None:
        """Compute out float32[rows, heads * length] for rows that follow a state, and update the
        state, whose memory is float32[heads, length, length].

        q, k, v, decay, gate float32[rows, heads * length] and beta float32[rows, heads]: what the
        projections give. taps float32[channels, taps], the last for the current token; channels are
        those of queries, keys and values. dt float32[heads * length], a float32[heads]: the
        logarithm of the decay is a * softplus(decay + dt), or bound * sigmoid(a * (decay + dt)).
        norm float32[length]: that of every head.
        """
        launch(
            self._kernel,
            self.shape.heads,
            self.shape.threads,
            q,
            k,
            v,
            decay,
            gate,
            beta,
            taps,
            dt,
            a,
            norm,
            np.float32(eps),
            *state.arguments,
            out,
            pdl=True,
        )


def specs() -> list[KernelSpec]:
    """Return the shapes of Kimi-Linear-48B-A3B and Ling-3.0-flash, and a small one. Others are
    compiled when used.
    """
    return [
        *(
            kimi_delta_spec(KimiDeltaShape(rows, 32, 128, 4, bound))
            for rows in (1, 8)
            for bound in (0.0, -5.0)
        ),
        kimi_delta_spec(KimiDeltaShape(2, 3, 20, 3)),
    ]
