"""Mixture of experts whose result does not depend on the order in which experts are computed."""

from __future__ import annotations

import torch

from ..linear import ExpertLinear, Linear
from .ffn import silu_gate


class Experts:
    """One gated feed-forward layer per expert. `gate` and `up` may be one merged matrix whose first half of rows is the gate."""

    def __init__(self, down: ExpertLinear, gate: ExpertLinear | None = None, up: ExpertLinear | None = None,
                 gate_up: ExpertLinear | None = None):
        self.gate, self.up, self.gate_up, self.down = gate, up, gate_up, down

    def __call__(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """x float32[rows, width] grouped by expert, counts[e] rows each."""
        if self.gate_up is not None:
            gate, up = self.gate_up(x, counts).chunk(2, dim=-1)
        else:
            gate, up = self.gate(x, counts), self.up(x, counts)
        return self.down(silu_gate(gate, up), counts)


class MoE:
    """Softmax router over all experts, the `n_used` most probable ones, their probabilities brought to a sum of 1.

    Equal probabilities go to the lower expert. Rows are grouped by a stable sort and slots are summed in ascending order, with
    no scattered addition, so that a run repeats bit for bit.
    """

    def __init__(self, router: Linear, experts: Experts, n_experts: int, n_used: int):
        self.router, self.experts, self.n_experts, self.n_used = router, experts, n_experts, n_used

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = self.router(x).softmax(dim=-1)
        # torch.topk promises no order among equals; a stable sort does.
        chosen = probabilities.sort(dim=-1, descending=True, stable=True).indices[:, : self.n_used]
        weights = probabilities.gather(1, chosen)
        weights = weights / weights.sum(dim=-1, keepdim=True)

        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.n_experts)
        grouped = self.experts(x[order // self.n_used], counts)
        slots = torch.empty_like(grouped)
        slots[order] = grouped  # a permutation: every (token, slot) is written once
        slots = slots.view(len(x), self.n_used, -1)
        y = weights[:, 0, None] * slots[:, 0]
        for slot in range(1, self.n_used):
            y += weights[:, slot, None] * slots[:, slot]
        return y
