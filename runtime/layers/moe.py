"""Mixture of experts (Shazeer et al., 2017)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..weights.linear import Linear
from ..weights.ranges import RangeName, opened, ranged
from ..weights.stacked_linear import ExpertLinear
from . import expert_rows, many_rows
from .ffn import GatedFFN, PlainFFN, activate, gated
from .specs import NEAR, FFNSpec, RouterSpec


class Experts:
    """One feed-forward layer per expert. `gate` and `up` may be one merged matrix whose first half
    of rows is the gate; where `spec` is not gated there is no gate.
    """

    def __init__(
        self,
        down: ExpertLinear,
        gate: ExpertLinear | None = None,
        up: ExpertLinear | None = None,
        gate_up: ExpertLinear | None = None,
        spec: FFNSpec = FFNSpec(),
    ):
        self.gate, self.up, self.gate_up, self.down, self.spec = gate, up, gate_up, down, spec

    @property
    def linears(self) -> list[ExpertLinear]:
        """The matrices of the experts."""
        return [x for x in (self.gate, self.up, self.gate_up, self.down) if x is not None]

    @property
    def range(self) -> RangeName:
        """The name of its range in profiles."""
        return RangeName("", "Experts")

    @ranged
    def __call__(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """x float32[rows, width] grouped by expert, counts[e] rows each."""
        if x.device != self.down.device:  # copy once to the device and back, not for every product
            return self(x.to(self.down.device), counts).to(x.device)
        return self.down(self.inner(x, counts), counts)

    def inner(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the input of `down`, float32[rows, hidden], for x on the device of the experts.
        Raise TypeError for experts without gate or up.
        """
        if self.gate_up is not None:
            gate, up = self.gate_up(x, counts).chunk(2, dim=-1)
        elif self.gate is not None and self.up is not None:
            gate, up = self.gate(x, counts), self.up(x, counts)
        elif self.up is not None and not self.spec.gated:
            return activate(self.spec, self.up(x, counts))
        else:
            raise TypeError("experts need gate and up, or both merged")
        return gated(self.spec, gate, up)


def _mixed(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the weights of `sparse_mixer`, float32[rows, n_used], for logits float32[rows,
    n_experts] and experts int64[rows, n_used] from the best on.
    """
    left, weights = logits, []
    for expert in chosen.split(1, dim=1):
        most = logits.gather(1, expert)
        far = most - logits > NEAR * torch.maximum(logits.abs(), most)
        weights.append(1 / (left - most).exp().where(~far, 0).sum(dim=1))
        left = left.scatter(1, expert, -torch.inf)
    return torch.stack(weights, dim=1)


class Router:
    """Chooses `spec.n_used` of `spec.n_experts` experts for every row.

    Among equal scores the lower expert wins. `bias` float32[n_experts] takes part in the choice
    only, not in the weights. `reduction` (K, t) is smart expert reduction: it keeps the K best
    experts, and of the others those with more than t times the largest score; the rest add nothing
    and do not count in the sum.
    """

    def __init__(
        self,
        linear: Linear,
        spec: RouterSpec,
        bias: torch.Tensor | None = None,
        reduction: tuple[int, float] | None = None,
    ):
        self.linear, self.spec, self.bias, self.reduction = linear, spec, bias, reduction

    @property
    def range(self) -> RangeName:
        """The name of its range in profiles."""
        return RangeName("", "Router")

    @ranged
    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int64[rows, n_used] from the best on, and their weights float32[rows, n_used], 0
        for those left out.
        """
        return self.choose(self.linear(x))

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Return the score of every expert, float32[rows, n_experts]."""
        return self._scores(self.linear(x))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a call does, for logits float32[rows, n_experts]."""
        if self.reduction is None:
            found = expert_rows.choose(logits, self.spec, self.bias)
            if found is not None:
                return found
        spec, scores = self.spec, self._scores(logits)
        choice = scores if self.bias is None else scores + self.bias
        if spec.groups > 1:
            choice = self._of_best_groups(choice)
        # torch.topk promises no order among equals; a stable sort does.
        values, chosen = choice.sort(dim=-1, descending=True, stable=True)
        values, chosen = values[:, : spec.n_used], chosen[:, : spec.n_used]
        weights = values if choice is scores else scores.gather(1, chosen)
        if spec.score == "selected":
            weights = weights.softmax(dim=-1)
        if spec.score == "sparse_mixer":
            weights = _mixed(scores, chosen)
        if self.reduction is not None:
            least, threshold = self.reduction
            kept = weights > threshold * weights[:, :1]
            kept[:, :least] = True
            weights = weights * kept
        if spec.norm or (spec.score == "selected" and self.reduction is not None):
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return chosen, weights if spec.scale == 1 else weights * spec.scale

    def weights_of(self, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the weights of experts that something else has chosen, int64[rows, n_used], as
        float32[rows, n_used].
        """
        weights = self._scores(logits).gather(1, chosen)
        if self.spec.norm:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights if self.spec.scale == 1 else weights * self.spec.scale

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        match self.spec.score:
            case "softmax":
                return logits.softmax(dim=-1)
            case "sigmoid":
                return logits.sigmoid()
            case "sqrt_softplus":
                return F.softplus(logits).sqrt()
            case "selected" | "sparse_mixer":
                return logits
        raise ValueError(f"score '{self.spec.score}' is not known")

    def _of_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Return `choice` with -inf for experts of groups that are not used."""
        spec = self.spec
        groups = choice.view(len(choice), spec.groups, -1)
        best = groups.sort(dim=-1, descending=True).values[..., : spec.group_best].sum(dim=-1)
        order = best.sort(dim=-1, descending=True, stable=True).indices[:, : spec.groups_used]
        used = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order, True)
        return groups.masked_fill(~used[..., None], float("-inf")).flatten(1)


@dataclass(frozen=True)
class Latent:
    """Products around experts that read and write shorter vectors: `down` gives what they read, and
    `up` makes rows of the width of what they add.
    """

    down: Linear
    up: Linear


class MoE:
    """The weighted sum of the chosen experts, and of `shared`, which works on every row; with
    `shared_gate` that is multiplied by sigmoid(shared_gate x).

    owned: `experts` are those from the first of these numbers up to the second; what others would
    add is on other ranks. None if all are here. latent: see `Latent`; None where experts read and
    write rows of the width.

    Rows are grouped by a stable sort and slots are summed in ascending order, without scattered
    additions, so that runs repeat bit for bit.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: GatedFFN | PlainFFN | None = None,
        shared_gate: Linear | None = None,
        owned: tuple[int, int] | None = None,
        latent: Latent | None = None,
    ):
        self.latent = latent
        # Returns what `mix` does for few rows, or None.
        self.few_rows: Callable[..., torch.Tensor | None] | None = None
        self.router, self.experts, self.shared, self.shared_gate, self.owned = (
            router,
            experts,
            shared,
            shared_gate,
            owned,
        )

    @property
    def spec(self) -> RouterSpec:
        """How experts are chosen."""
        return self.router.spec

    @property
    def experts_used(self) -> int:
        """Experts that each row goes through."""
        return self.spec.n_used

    @property
    def expert_share(self) -> float:
        """The part of the experts that a row uses, 0 to 1."""
        return self.spec.n_used / self.spec.n_experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_chosen(x, *self.router(x))

    def of_chosen(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return what a call does, for experts int64[rows, n_used] that were chosen, and their
        weights float32[rows, n_used].
        """
        if self.latent is not None:
            y = self.latent.up(self.mix(self.latent.down(x), chosen, weights))
        elif self.shared is None:
            return self.mix(x, chosen, weights)
        elif (
            not self.spec.on_input
            and (found := expert_rows.mix(self, x, chosen, weights, self._always)) is not None
        ):
            return found
        else:
            y = self.mix(x, chosen, weights)
        if self.shared is None:
            return y
        always, gate = self._always(x)
        y += always if gate is None else always * gate.sigmoid()
        return y

    def _always(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what `shared` gives, and what `shared_gate` does, float32[rows, 1]."""
        if self.shared is None:
            raise TypeError("no expert works on every row")
        with opened("", type(self.shared).__name__):
            always = self.shared(x)
        return always, None if self.shared_gate is None else self.shared_gate(x)

    def mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the experts int64[rows, n_used] for x float32[rows, width], of the
        latent width where they are `latent`.
        """
        if self.spec.on_input:  # a row for each expert of each row
            n_used, ones = chosen.shape[1], torch.ones_like(weights)
            rows = x.repeat_interleave(n_used, dim=0) * weights.reshape(-1, 1)
            single = self._mix(rows, chosen.reshape(-1, 1), ones.reshape(-1, 1))
            return single.view(len(x), n_used, -1).sum(dim=1)
        return self._mix(x, chosen, weights)

    def _mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.few_rows is not None and (y := self.few_rows(x, chosen, weights)) is not None:
            return y
        device = self.experts.down.device
        if x.device != device:  # copied once to the device and back, without the slots of experts
            with many_rows.compiled_rows() if self.few_rows is not None else nullcontext():
                y = self._mix(x.to(device), chosen.to(device), weights.to(device))
            return y.to(x.device)
        if (y := expert_rows.mix(self, x, chosen, weights)) is not None:
            return y
        first, last = self.owned or (0, self.spec.n_experts)
        n_experts, n_used = last - first, chosen.shape[1]
        flat = chosen.reshape(-1) - first
        if self.owned is not None:
            flat = torch.where((flat >= 0) & (flat < n_experts), flat, n_experts)
        if self.router.reduction is not None:
            flat = torch.where(weights.reshape(-1) > 0, flat, n_experts)  # after all experts
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=n_experts)[:n_experts]
        order = order[: int(counts.sum())]
        grouped = self.experts(x.index_select(0, order // n_used), counts)
        slots = grouped.new_zeros(len(flat), grouped.shape[1])
        slots[order] = grouped  # every (token, slot) is written at most once
        slots = slots.view(len(x), n_used, -1)
        y = weights[:, 0, None] * slots[:, 0]
        for slot in range(1, n_used):
            y += weights[:, slot, None] * slots[:, slot]
        return y
