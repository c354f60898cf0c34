"""Mixture of experts whose result does not depend on the order in which experts are computed."""

from __future__ import annotations

import torch

from ..linear import ExpertLinear, Linear
from .ffn import silu_gate


class Experts:
    """One gated feed-forward layer per expert. `gate` and `up` may be one merged matrix whose first
    half of rows is the gate.
    """

    def __init__(
        self,
        down: ExpertLinear,
        gate: ExpertLinear | None = None,
        up: ExpertLinear | None = None,
        gate_up: ExpertLinear | None = None,
    ):
        self.gate, self.up, self.gate_up, self.down = gate, up, gate_up, down

    def __call__(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """x float32[rows, width] grouped by expert, counts[e] rows each."""
        if x.device != self.down.device:  # copy once to the device and back, not for every product
            return self(x.to(self.down.device), counts).to(x.device)
        return self.down(self.inner(x, counts), counts)

    def inner(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the input of `down`, float32[rows, hidden], for x on the device of the experts."""
        if self.gate_up is not None:
            gate, up = self.gate_up(x, counts).chunk(2, dim=-1)
        elif self.gate is not None and self.up is not None:
            gate, up = self.gate(x, counts), self.up(x, counts)
        else:
            raise TypeError("experts need gate and up, or both merged")
        return silu_gate(gate, up)


class MoE:
    """Softmax router over all experts; the `n_used` most probable ones, with probabilities scaled
    to a sum of 1.

    Among equal probabilities the lower expert wins. `reduction` (K, t) is smart expert reduction:
    it keeps the K best experts, and of the others those with more than t times the largest
    probability; the rest add nothing and do not count in the sum. Rows are grouped by a stable sort
    and slots are summed in ascending order, without scattered additions, so that runs repeat bit
    for bit.
    """

    def __init__(
        self,
        router: Linear,
        experts: Experts,
        n_experts: int,
        n_used: int,
        reduction: tuple[int, float] | None = None,
    ):
        self.router, self.experts, self.n_experts, self.n_used, self.reduction = (
            router,
            experts,
            n_experts,
            n_used,
            reduction,
        )

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int64[rows, n_used] from the most probable on, and their weights float32[rows,
        n_used], 0 for those left out.
        """
        probabilities = self.router(x).softmax(dim=-1)
        # torch.topk promises no order among equals; a stable sort does.
        values, chosen = probabilities.sort(dim=-1, descending=True, stable=True)
        weights, chosen = values[:, : self.n_used], chosen[:, : self.n_used]
        if self.reduction is not None:
            least, threshold = self.reduction
            kept = weights > threshold * weights[:, :1]
            kept[:, :least] = True
            weights = weights * kept
        return chosen, weights / weights.sum(dim=-1, keepdim=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(x)
        flat = chosen.reshape(-1)
        if self.reduction is not None:
            flat = torch.where(weights.reshape(-1) > 0, flat, self.n_experts)  # after all experts
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.n_experts)[: self.n_experts]
        order = order[: int(counts.sum())]
        grouped = self.experts(x[order // self.n_used], counts)
        slots = grouped.new_zeros(len(flat), grouped.shape[1])
        slots[order] = grouped  # every (token, slot) is written at most once
        slots = slots.view(len(x), self.n_used, -1)
        y = weights[:, 0, None] * slots[:, 0]
        for slot in range(1, self.n_used):
            y += weights[:, slot, None] * slots[:, slot]
        return y
