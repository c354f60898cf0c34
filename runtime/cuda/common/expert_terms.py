"""What kernels need to know of experts and their router besides the matrices."""

from __future__ import annotations

import torch

from ....cuda_kernels.common.gating import ExpertTerms, Gating
from ....cuda_kernels.common.routing import Routing
from ...layers.moe import Experts, Router
from ...layers.specs import FFNSpec
from ...weights.stacked_linear import ExpertLinear
from .context import Context


def gating_of(spec: FFNSpec) -> Gating:
    """Return how gate and up are joined."""
    return Gating(spec.activation, spec.limit)


def inputs_of(experts: Experts) -> list[ExpertLinear]:
    """Return gate and up, or the one matrix that has both."""
    if experts.gate_up is not None:
        return [experts.gate_up]
    if experts.gate is None or experts.up is None:
        raise TypeError("experts need gate and up, or both merged")
    return [experts.gate, experts.up]


def terms_of(linear: ExpertLinear, context: Context) -> ExpertTerms:
    """Return the biases and scales of all experts on the device, in float32."""

    def here(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None:
            return None
        return values.to(context.device, torch.float32).contiguous()

    return ExpertTerms(here(linear.bias), here(linear.scale))


def routing_of(router: Router) -> Routing:
    """Return how kernels have to route. The softmax over the chosen logits is that over all,
    normalized to a sum of 1.
    """
    spec = router.spec
    return Routing(
        sigmoid=spec.score == "sigmoid",
        norm=spec.norm or spec.score == "selected",
        scale=spec.scale,
        choice_bias=router.bias is not None,
        logit_bias=router.linear.bias is not None,
        groups=spec.groups,
        groups_used=spec.groups_used,
        group_best=min(spec.group_best, spec.n_experts // spec.groups),
    )
