"""A state-space layer of Mamba-2 in a decoding step: `state_space.cu` for one shape."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .recurrent import StepState

MOST_STATE, MOST_LENGTH = 256, 128
_NORM_THREADS = 256


@dataclass(frozen=True)
class StateSpaceShape:
    """`rows` new tokens, heads in groups, the lengths of a head and of the vectors that write and
    read its memory, and the taps of the convolution.
    """

    rows: int
    heads: int
    groups: int
    length: int
    state: int
    taps: int

    @property
    def fits(self) -> bool:
        """Return whether there is a kernel for the shape."""
        return (
            self.length % 4 == self.state % 4 == 0
            and self.length <= MOST_LENGTH
            and self.state <= MOST_STATE
            and self.taps >= 2
        )

    @property
    def name(self) -> str:
        """The sizes, as part of a name."""
        return f"{self.heads}x{self.length}_{self.groups}x{self.state}_{self.taps}"

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """Macros of the sizes but the rows."""
        sizes = (self.heads, self.groups, self.length, self.state, self.taps)
        names = ("HEADS", "GROUPS", "LENGTH", "STATE", "TAPS")
        return tuple((name, str(size)) for name, size in zip(names, sizes, strict=True))

    @property
    def threads(self) -> int:
        """Threads of a block: a warp for every 8 columns of a head's memory."""
        return 32 * -(-self.length // 8)


@functools.cache
def state_space_spec(s: StateSpaceShape) -> KernelSpec:
    """Return the kernels for a shape."""
    return KernelSpec(
        f"state_space_{s.name}x{s.rows}",
        ("step/state_space.cu",),
        (("ROWS", str(s.rows)), *s.defines),
        ("scan", "norm_groups"),
    )


class StepStateSpace:
    """Launch the state-space layer of one shape. Instances keep tickets, so layers on one stream
    share them.
    """

    def __init__(self, shape: StateSpaceShape, device: torch.device):
        self.shape = shape
        self._scan, self._norm = (
            function(state_space_spec(shape), name, device) for name in ("scan", "norm_groups")
        )
        self._tickets = torch.zeros(shape.groups, dtype=torch.int32, device=device)

    def __call__(
        self,
        products: torch.Tensor,
        taps: torch.Tensor,
        bias: torch.Tensor | None,
        dt: torch.Tensor,
        a: torch.Tensor,
        d: torch.Tensor,
        norm: torch.Tensor | None,
        eps: float,
        state: StepState,
        out: torch.Tensor,
    ) -> None:
        """Compute out float32[rows, heads * length] for rows that follow a state, and update the
        state, whose memory is float32[heads, state, length].

        products float32[rows, ...]: gates, channels of the convolution (values, vectors that write,
        vectors that read) and steps of heads. taps float32[channels, taps], the last for the
        current token; bias float32[channels]. dt, a, d float32[heads]. norm float32[groups, heads *
        length / groups]: weights of the norms, None for none.
        """
        s = self.shape
        launch(
            self._scan,
            s.heads,
            s.threads,
            products,
            taps,
            bias,
            dt,
            a,
            d,
            *state.arguments,
            self._tickets,
            out,
            pdl=True,
        )
        if norm is None:
            return
        grid = (s.groups, s.rows)
        launch(self._norm, grid, _NORM_THREADS, out, norm, np.float32(eps), pdl=True)


def specs() -> list[KernelSpec]:
    """Return the shape of Nemotron 3 Nano, and a small one. Others are compiled on first use."""
    return [
        *(state_space_spec(StateSpaceShape(rows, 64, 8, 64, 128, 4)) for rows in (1, 8)),
        state_space_spec(StateSpaceShape(2, 4, 2, 12, 20, 3)),
    ]
