"""A gated delta net in a decoding step: `delta.cu` for one shape."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from ..common.delta_heads import DeltaHeads
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .recurrent import StepState

MOST_KEY, MOST_VALUE, MOST_WIDTH = 256, 128, 16384
MOST_OF_STREAM = 16  # elements of a row for each thread, where blocks share a head


@dataclass(frozen=True)
class DeltaShape:
    """`rows` new tokens, the width of the stream, and the heads."""

    rows: int
    width: int
    heads: DeltaHeads

    @property
    def fits(self) -> bool:
        """Return whether there is a kernel for the shape."""
        s = self.heads
        return (
            s.key_length % 4 == s.value_length % 4 == self.width % 4 == 0
            and s.key_length <= MOST_KEY
            and s.value_length <= MOST_VALUE
            and self.width <= MOST_WIDTH
            and s.taps >= 2
        )

    def threads(self, parts: int) -> int:
        """Threads of a block: a warp for every 8 columns of its part of a head's memory."""
        return 32 * -(-(self.heads.value_length // parts) // 8)

    def parts(self, processors: int) -> int:
        """Return how many blocks share a head, of a device with clusters and so many
        multiprocessors. The registers of a thread hold its share of a row of the stream twice.
        """
        s = self.heads
        return max(
            n
            for n in (1, 2, 4)
            if n == 1
            or (
                s.value_length % (8 * n) == 0
                and s.value_heads * n <= processors
                and self.width <= MOST_OF_STREAM * self.threads(n)
            )
        )


@functools.cache
def delta_spec(s: DeltaShape, parts: int = 1) -> KernelSpec:
    """Return the kernel for so many blocks per head; only devices with clusters run several."""
    sizes = {"ROWS": s.rows, "WIDTH": s.width, "PARTS": parts}
    name = f"delta_{s.width}_{s.heads.name}_{s.heads.taps}x{s.rows}{s.heads.layout}"
    return KernelSpec(
        name + f"_{parts}" * (parts > 1),
        ("step/delta.cu",),
        (*((key, str(value)) for key, value in sizes.items()), *s.heads.defines),
        ("delta",),
    )


class StepDelta:
    """Launch the delta net of one shape. Instances keep tickets, so layers on one stream share
    them.
    """

    def __init__(self, shape: DeltaShape, device: torch.device):
        facts, self.shape = torch.cuda.get_device_properties(device), shape
        self._parts = shape.parts(facts.multi_processor_count) if facts.major >= 9 else 1
        self._kernel = function(delta_spec(shape, self._parts), "delta", device)
        self._tickets = torch.zeros(shape.heads.key_heads, dtype=torch.int32, device=device)

    def __call__(
        self,
        h: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        rates: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        products: torch.Tensor,
        z: torch.Tensor,
        taps: torch.Tensor,
        out_norm: torch.Tensor,
        out_eps: float,
        state: StepState,
        out: torch.Tensor,
    ) -> None:
        """Compute out float32[rows, value_heads * value_length] for the rows h float32[rows, width]
        that follow a state, and update the state, whose memory is float32[value_heads, key_length,
        value_length].

        rates float32[2, value_heads, width]: the matrices of beta and alpha, which multiply norm(h)
        in float32. dt, a float32[value_heads]: the logarithm of the decay is
        a * softplus(alpha + dt). products and z float32[rows, ...]: the inputs of the convolution
        and the gates; one tensor where they are joined. taps float32[channels, taps], the last for
        the current token. out_norm float32[value_length]: the norm of every head before its gate.
        """
        launch(
            self._kernel,
            self.shape.heads.value_heads * self._parts,
            self.shape.threads(self._parts),
            h,
            norm,
            np.float32(eps),
            rates,
            dt,
            a,
            products,
            z,
            taps,
            out_norm,
            np.float32(out_eps),
            *state.arguments,
            self._tickets,
            out,
            pdl=True,
            cluster=self._parts if self._parts > 1 else None,
        )


def specs() -> list[KernelSpec]:
    """Return the shape of Qwen3.5-35B-A3B, and small ones. Others are compiled on first use."""
    large, small = (
        DeltaHeads(16, 32, 128, 128, 4, True, False),
        DeltaHeads(2, 4, 20, 12, 3, False, True),
    )
    return [
        *(delta_spec(DeltaShape(rows, 2048, large), parts) for rows in (1, 8) for parts in (1, 4)),
        delta_spec(DeltaShape(2, 64, small)),
    ]
