"""The gated feed-forward layer."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..linear import Linear


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; overwrites `gate`."""
    return F.silu(gate, inplace=True).mul_(up)


class GatedFFN:
    """down(silu(gate x) * (up x)) (Shazeer, 2020)."""

    def __init__(self, gate: Linear, up: Linear, down: Linear):
        self.gate, self.up, self.down = gate, up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu_gate(self.gate(x), self.up(x)))
