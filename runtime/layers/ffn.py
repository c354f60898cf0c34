"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from ..weights.linear import Linear
from . import many_rows
from .specs import FFNSpec

_OAI_SLOPE = 1.702  # of the sigmoid of swiglu_oai, as gpt-oss was trained with


def activate(spec: FFNSpec, x: torch.Tensor) -> torch.Tensor:
    """Return the activation of x, float32[..., n]; may overwrite x. Raise ValueError for an unknown
    one.
    """
    if spec.activation == "silu":
        return F.silu(x, inplace=True)
    if spec.activation == "gelu":
        return F.gelu(x, approximate="tanh")
    if spec.activation == "gelu_erf":
        return F.gelu(x)
    if spec.activation == "relu":
        return F.relu(x)
    if spec.activation == "relu_squared":
        return F.relu(x).square()
    if spec.activation == "xielu" and (s := spec.xielu) is not None:
        below = s.alpha_n * (x.clamp(max=s.eps).expm1() - x)
        return torch.where(x > 0, s.alpha_p * x.square(), below) + s.beta * x
    raise ValueError(f"activation '{spec.activation}' is not known")


def gated(spec: FFNSpec, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return activation(gate) * up, all float32[..., n]; may overwrite both. With a limit, gate is
    at most that, and up within it on both sides; "capped_silu" limits silu(gate), not gate.
    "swiglu_oai" (gpt-oss) is gate * sigmoid(1.702 gate) * (up + 1).
    """
    capped = spec.activation == "capped_silu"
    if capped:
        gate = F.silu(gate, inplace=True)
    if spec.limit:
        gate, up = gate.clamp_(max=spec.limit), up.clamp_(-spec.limit, spec.limit)
    if capped:
        return gate.mul_(up)
    if spec.activation == "swiglu_oai":
        return gate * torch.sigmoid(_OAI_SLOPE * gate) * (up + 1)
    if spec.activation == "silu" and (found := many_rows.gate_silu(gate, up)) is not None:
        return found
    return activate(spec, gate).mul_(up)


class GatedFFN:
    """down(activation(gate x) * (up x)) (Shazeer, 2020). `gate` and `up` may be one matrix,
    `gate_up`, whose first half of rows is the gate. cut: what the `cutoff` of the description
    leaves of a gate.
    """

    experts_used, expert_share = 1, 1.0

    def __init__(
        self,
        down: Linear,
        gate: Linear | None = None,
        up: Linear | None = None,
        gate_up: Linear | None = None,
        spec: FFNSpec = FFNSpec(),
        cut: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self.gate, self.up, self.gate_up, self.down, self.spec = gate, up, gate_up, down, spec
        self._cut = cut

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_up is not None:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
        elif self.gate is not None and self.up is not None:
            gate, up = self.gate(x), self.up(x)
        else:
            raise TypeError("a gated layer needs gate and up, or both merged")
        if self._cut is not None:
            gate = self._cut(gate)
        if self.spec.is_silu and (y := many_rows.gated_product(self.down, gate, up)) is not None:
            return y
        return self.down(gated(self.spec, gate, up))


class PlainFFN:
    """down(activation(up x))."""

    experts_used, expert_share = 1, 1.0

    def __init__(self, up: Linear, down: Linear, spec: FFNSpec):
        self.up, self.down, self.spec = up, down, spec

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(activate(self.spec, self.up(x)))
