"""The executor of experts in a decoding step."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....cuda_kernels import matvec, step_between
from ....cuda_kernels.matvec_plan import EXPERT_DOWN, EXPERT_GATE_UP, GATE_UP, MATVEC_ADD
from ....cuda_kernels.ops import decode_matrix
from ....cuda_kernels.step_router import fits as router_fits
from ...layers.ffn import GatedFFN
from ...layers.moe import MoE
from ...layers.norm import Norm
from ...weights.linear import Linear
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.executor import operation
from ..common.expert_terms import gating_of, inputs_of, routing_of, terms_of
from ..common.registry import STEP, PlacedBranch, Slow, executor
from .frame import STEP_ROWS, Frame
from .layers import BETWEEN, StepBranch, on_device


@executor(STEP, MoE)
class StepMoE(StepBranch):
    """The choice of experts in one launch, gate and up of all chosen ones in one, their weighted
    sum onto h in one; a shared expert in two more.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        moe: MoE = branch.module
        spec, e = moe.spec, moe.experts
        self.routing = replace(routing_of(moe.router), owned=moe.owned)
        if not router_fits(STEP_ROWS, self.norm.numel(), spec.n_experts, spec.n_used, self.routing):
            raise Slow(f"{spec.n_used} of {spec.n_experts} experts, width {self.norm.numel()}")
        self.spec, self.reduction = spec, moe.router.reduction
        self.router_norm, self.router_eps = self.norm, self.eps
        self.router = float_matrix(moe.router.linear, context)
        self.router_biases = moe.router.linear.bias, moe.router.bias
        with_terms = {"biased": True, "scaled": True}
        self.down = on_device(e.down, context, EXPERT_DOWN, spec.n_used, **with_terms)
        inputs = inputs_of(e)
        self.gate = on_device(inputs[0], context, EXPERT_GATE_UP, **with_terms)
        self.up = (
            on_device(inputs[1], context, EXPERT_GATE_UP, **with_terms) if inputs[1:] else None
        )
        self.gating, self.down_terms = gating_of(e.spec), terms_of(e.down, context)
        self.input_terms = [terms_of(linear, context) for linear in inputs]
        self.shared = None if moe.shared is None else SharedExpert(self, moe, context)

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        spec = self.spec
        ids, weights = (
            frame.buffer("experts", spec.n_used, torch.int32),
            frame.buffer("expert weights", spec.n_used),
        )
        route = frame.router(
            self.norm.numel(), spec.n_experts, spec.n_used, self.reduction, self.routing
        )
        router_norm = self.router_norm, self.router_eps
        route(h, *router_norm, self.router, ids, weights, *self.router_biases)
        hidden = frame.buffer("expert hidden", spec.n_used * self.down.cols).view(
            frame.n, spec.n_used, -1
        )
        operation(
            matvec.expert_gate_up,
            h,
            self.norm,
            self.eps,
            self.gate,
            self.up,
            ids,
            hidden,
            self.gating,
            *self.input_terms,
        )
        always = None if self.shared is None else self.shared.inner(frame, h)
        norm = self.branch.post_norm
        to = frame.onto(h) if norm is None else frame.zeros("sum of experts", h.shape[1])
        operation(matvec.expert_down_add, hidden, self.down, ids, weights, to, self.down_terms)
        if self.shared is not None:
            operation(matvec.matvec_add, always, self.shared.down, to)
        if norm is not None:
            self.end(frame, to, h, norm)

    def end(self, frame: Frame, sum: torch.Tensor, h: torch.Tensor, norm: Norm) -> None:
        """h += norm(sum); sum becomes 0."""
        step_between.add_normed(sum, h, weight=norm.weight, eps=norm.eps)


class SharedExpert:
    """The expert that works on every token. Its products read h before routed experts are added."""

    def __init__(self, owner: StepBranch, moe: MoE, context: Context):
        ffn = moe.shared
        if not isinstance(ffn, GatedFFN):
            raise Slow("a shared expert without a gate")
        self.norm, self.eps, self.gating = owner.norm, owner.eps, gating_of(ffn.spec)
        pair = [x for x in (ffn.gate_up, ffn.gate, ffn.up) if x is not None]
        self.matrices = [on_device(x, context, GATE_UP) for x in pair]
        self.down = on_device(ffn.down, context, MATVEC_ADD)
        types = {x.type for x in self.matrices}
        floats = any(x.type.is_float for x in (*self.matrices, self.down))
        self.between = torch.float32 if floats or len(types) > 1 else BETWEEN
        gate = moe.shared_gate
        # Times the weights of the norm, so that one product is enough.
        self.share = None if gate is None else decode_linear(gate, context).view(-1) * self.norm

    def inner(self, frame: Frame, h: torch.Tensor) -> torch.Tensor:
        """Return the input of `down`, multiplied by the share of each token."""
        hidden = frame.buffer("shared hidden", self.down.cols, self.between)
        gate, up = self.matrices[0], self.matrices[1] if len(self.matrices) == 2 else None
        arguments = h, self.norm, self.eps, gate, up, hidden, None, self.gating
        operation(matvec.gate_up, *arguments)
        if self.share is not None:
            step_between.take_share(h, self.share, self.eps, hidden)
        return hidden


def float_matrix(linear: Linear, context: Context) -> torch.Tensor:
    """float32[rows, cols] of a matrix that has to be multiplied in float32 (the router's)."""
    return decode_matrix(on_device(linear, context, biased=True), torch.float32)


def decode_linear(linear: Linear, context: Context) -> torch.Tensor:
    """float32[rows, cols] of a small matrix, packed or not. Slow if it is on another device."""
    if linear.device != context.device or linear.bias is not None:
        raise Slow(f"{linear.role} is not on {context.device}, or has a bias")
    return torch.cat([part for _, part in linear.matrix.parts()])
