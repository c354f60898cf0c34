"""What kernels need to know of experts and their router besides the matrices."""

from __future__ import annotations

import torch

from ....cuda_kernels.common.gating import ExpertTerms, Gating
from ....cuda_kernels.common.routing import Routing
from ...layers.ffn import GatedFFN, PlainFFN
from ...layers.moe import Experts, Router
from ...layers.specs import FFNSpec
from ...weights.linear import Linear
from ...weights.stacked_linear import ExpertLinear
from .context import Context


def gating_of(spec: FFNSpec) -> Gating:
    """Return how gate and up are joined. Without a gate up is both: relu(x) x is relu(x)^2."""
    if not spec.gated and spec.activation == "relu_squared":
        return Gating("relu", spec.limit)
    return Gating(spec.activation, spec.limit)


def inputs_of(experts: Experts) -> list[ExpertLinear]:
    """Return gate and up, or the one matrix that has both; up twice where there is no gate."""
    if experts.up is not None and not experts.spec.gated:
        return [experts.up, experts.up]
    if experts.gate_up is not None:
        return [experts.gate_up]
    if experts.gate is None or experts.up is None:
        raise TypeError("experts need gate and up, or both merged")
    return [experts.gate, experts.up]


def pair_of(ffn: GatedFFN | PlainFFN) -> list[Linear]:
    """Return of a dense layer what `inputs_of` does of experts."""
    if isinstance(ffn, PlainFFN):
        return [ffn.up, ffn.up]
    return [x for x in (ffn.gate_up, ffn.gate, ffn.up) if x is not None]


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
