"""The executor of experts in a decoding step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch

from ....cuda_kernels.common.gating import NO_TERMS
from ....cuda_kernels.matvec import expert_operands, operands
from ....cuda_kernels.matvec import experts as matvec_experts
from ....cuda_kernels.matvec import products as matvec
from ....cuda_kernels.matvec.plan import (
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    GATE_UP,
    MATVEC_ADD,
    MOST_SLOTS,
    NORM_MATVEC,
)
from ....cuda_kernels.packed.decode import decode_matrix
from ....cuda_kernels.packed.matrix import PackedMatrix
from ....cuda_kernels.step import between as step_between
from ....cuda_kernels.step.router import fits as router_fits
from ...layers.ffn import GatedFFN, PlainFFN
from ...layers.moe import MoE
from ...layers.norm import LayerNorm, Norm
from ...weights.linear import Linear
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.executor import operation
from ..common.expert_terms import gating_of, inputs_of, pair_of, routing_of, terms_of
from ..common.held import held_decoded
from ..common.registry import PlacedBranch, Slow
from .frame import STEP_ROWS, Frame
from .layers import BETWEEN, StepBranch, on_device


@dataclass(frozen=True)
class Begun:
    """What experts have computed before the last products. ids, weights: of the chosen experts.
    hidden: float32[n, slots, hidden], what their last products read. x: the same of a shared expert
    with launches of its own.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    hidden: torch.Tensor | None = None
    x: torch.Tensor | None = None


class StepExperts(StepBranch, ABC):
    """An executor of experts. `router_norm`, `router_eps`: of what the router reads.

    `begin` launches what reads the stream, and `add` what adds to it, so that attention can run in
    between.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        self.router_norm, self.router_eps = self.norm, self.eps
        norm = branch.branch.norm
        # A LayerNorm is an RMS norm of what is centered.
        self.centers = isinstance(norm, LayerNorm)
        if isinstance(norm, LayerNorm) and norm.bias is not None:
            raise Slow("a norm with a bias before experts")

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        self.add(frame, h, self.begin(frame, self.read(frame, h)))

    def read(self, frame: Frame, h: torch.Tensor) -> torch.Tensor:
        """Return what RMS norms read, for h float32[n, width]."""
        if not self.centers:
            return h
        centered = frame.buffer("centered", h.shape[1])
        step_between.center(h, centered)
        return centered

    @abstractmethod
    def begin(self, frame: Frame, h: torch.Tensor) -> Begun:
        """Launch everything but the last products, for what `read` returns."""

    @abstractmethod
    def add(self, frame: Frame, h: torch.Tensor, begun: Begun) -> None:
        """Launch the last products, onto h float32[n, width], the stream."""

    def end(self, frame: Frame, sum: torch.Tensor, h: torch.Tensor, norm: Norm) -> None:
        """h += norm(sum); sum becomes 0."""
        step_between.add_normed(sum, h, norm.weight, norm.eps)


class StepMoE(StepExperts):
    """The choice of experts in one launch, gate and up of all chosen ones in one, their weighted
    sum onto h in one. A shared expert is in these launches as far as its matrices have the same
    types: its gate and up in the second, as slots of the third; else it has its own.

    Experts that read shorter vectors get these from a product of their own, before the router is
    launched; their sum is the input of another one.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        moe: MoE = branch.module
        spec, e = moe.spec, moe.experts
        self.routing = replace(routing_of(moe.router), owned=moe.owned)
        if not router_fits(STEP_ROWS, self.norm.numel(), spec.n_experts, spec.n_used, self.routing):
            raise Slow(f"{spec.n_used} of {spec.n_experts} experts, width {self.norm.numel()}")
        self.spec, self.reduction = spec, moe.router.reduction
        # Other ranks have those experts, or they count for too little.
        self.some_absent = moe.owned is not None or self.reduction is not None
        self.router = float_matrix(moe.router.linear, context)
        self.router_biases = moe.router.linear.bias, moe.router.bias
        self.down = on_device(e.down, context, EXPERT_DOWN, spec.n_used, biased=True)
        inputs = [on_device(x, context, EXPERT_GATE_UP, biased=True) for x in inputs_of(e)]
        self.gate, self.up = inputs[0], inputs[1] if len(inputs) == 2 else None
        self.gating, self.down_terms = gating_of(e.spec), terms_of(e.down, context)
        self.input_terms = [terms_of(linear, context) for linear in inputs_of(e)]
        self.always, self.shared, self.latent = None, None, None
        if moe.latent is not None:
            if branch.post_norm is not None:
                raise Slow("a norm after experts that read shorter vectors")
            self.latent = (
                on_device(moe.latent.down, context, NORM_MATVEC),
                on_device(moe.latent.up, context, MATVEC_ADD),
            )
        if moe.shared is not None:
            of_others = self.latent is None  # which read the same
            inputs = shared_inputs(self, moe.shared, context) if of_others else ()
            self.always = shared_slots(self, moe.shared, inputs, context)
            if self.always is None:
                self.shared = SharedExpert(self, moe, inputs, context)
        self.shared_gate = None
        if self.always is not None:
            gate = moe.shared_gate
            self.shared_gate = None if gate is None else held_decoded(gate, context).view(-1)
            self.routing = replace(
                self.routing, shared=self.always.slots, shared_gate=gate is not None
            )

        self.ones = self._ones(context) if spec.on_input else None

    def _ones(self, context: Context) -> torch.Tensor:
        """Return what multiplies results where weights multiply what experts read: float32[rows,
        slots].
        """
        if self.reduction is not None:
            raise Slow("-ser where weights multiply what experts read")
        if self.shared_gate is not None:
            raise Slow("weights that multiply what experts next to a gated one read")
        n = self.spec.n_used + (0 if self.always is None else self.always.slots)
        return torch.ones(STEP_ROWS, n, device=context.device)

    def begin(self, frame: Frame, h: torch.Tensor) -> Begun:
        spec = self.spec
        always = self.always
        n_slots = spec.n_used + (0 if always is None else always.slots)
        ids, weights = (
            frame.buffer("experts", spec.n_used, torch.int32),
            frame.buffer("expert weights", n_slots),
        )
        route = frame.router(
            self.norm.numel(), spec.n_experts, spec.n_used, self.reduction, self.routing
        )
        read, norm, eps = h, self.norm, self.eps
        if self.latent is not None:
            read, norm, eps = self.latent_of(frame, h), None, 0.0
        router_norm = self.router_norm, self.router_eps
        biases = self.router_biases
        route(h, *router_norm, self.router, ids, weights, *biases, self.shared_gate)
        hidden = frame.buffer("expert hidden", n_slots * self.down.cols).view(frame.n, n_slots, -1)
        no_terms = [NO_TERMS] * (2 - len(self.input_terms))
        operation(
            matvec_experts.expert_gate_up,
            read,
            norm,
            eps,
            self.gate,
            self.up,
            ids,
            hidden,
            self.gating,
            *self.input_terms,
            *no_terms,
            *([] if always is None else [always.inputs]),
            *([] if self.shared is None else self.shared.among_others(frame)),
            some_absent=self.some_absent,
            **({} if self.latent is None else {"plain": True}),
            **({} if self.ones is None else {"weighing": weights}),
        )
        if self.ones is not None:
            weights = self.ones[: frame.n]
        x = None if self.shared is None else self.shared.inner(frame, h)
        return Begun(ids, weights, hidden, x)

    def add(self, frame: Frame, h: torch.Tensor, begun: Begun) -> None:
        norm, always = self.branch.post_norm, self.always
        to = frame.onto(h) if norm is None else frame.zeros("sum of experts", h.shape[1])
        down = None if always is None else always.down
        sum = to if self.latent is None else frame.buffer("latent sum", self.down.rows)
        chosen = begun.ids, begun.weights
        arguments = begun.hidden, self.down, *chosen, sum, self.down_terms, down
        operation(matvec_experts.expert_down_add, *arguments, some_absent=self.some_absent)
        if self.latent is not None:
            operation(matvec.matvec_add, sum, self.latent[1], to)
        if self.shared is not None:
            operation(matvec.matvec_add, begun.x, self.shared.down, to)
        if norm is not None:
            self.end(frame, to, h, norm)

    def latent_of(self, frame: Frame, h: torch.Tensor) -> torch.Tensor:
        """Launch what gives the vectors that experts read, float32[n, length], and clear the
        sum of what they write. Both have ended when the router lets the next launch start.
        """
        if self.latent is None:
            raise TypeError("experts read the stream")
        step_between.clear(frame.buffer("latent sum", self.down.rows))
        latent = frame.buffer("latent", self.latent[0].rows)
        operation(matvec.norm_matvec, h, self.norm, self.eps, [self.latent[0]], [latent])
        return latent


@dataclass(frozen=True)
class SharedSlots:
    """A shared expert in the launches of the others: its gate and up, or the one matrix that has
    both, and down.
    """

    inputs: tuple[PackedMatrix, ...]
    down: PackedMatrix
    slots: int


def shared_inputs(
    owner: StepMoE, ffn: GatedFFN | PlainFFN, context: Context
) -> tuple[PackedMatrix, ...]:
    """Return gate and up of a shared expert, or the one matrix that has both, if they can be in one
    launch with those of the others; else nothing.
    """
    if gating_of(ffn.spec) != owner.gating:
        return ()
    linears = pair_of(ffn)
    try:
        inputs = tuple(on_device(x, context, EXPERT_GATE_UP) for x in linears)
    except Slow:
        return ()
    types = {m.type for m in (*inputs, owner.gate, *([] if owner.up is None else [owner.up]))}
    return inputs if len(types) == 1 else ()


def shared_slots(
    owner: StepMoE, ffn: GatedFFN | PlainFFN, inputs: tuple[PackedMatrix, ...], context: Context
) -> SharedSlots | None:
    """Return the slots of a shared expert with these inputs; None if it cannot be slots: `down` of
    another type, or a hidden size that is not a multiple of the experts'.
    """
    if not inputs:
        return None
    try:
        down = on_device(ffn.down, context)
    except Slow:
        return None
    slots = expert_operands.shared_slots(down, owner.down)
    total = owner.spec.n_used + slots
    if not slots or total > MOST_SLOTS or not operands.fits(owner.down, EXPERT_DOWN, total):
        return None
    return SharedSlots(inputs, down, slots)


class SharedExpert:
    """The expert that works on every token. Its products read h before routed experts are added.

    inputs: gate and up that are in the launch of the others; without them they are here.
    """

    def __init__(
        self, owner: StepBranch, moe: MoE, inputs: tuple[PackedMatrix, ...], context: Context
    ):
        self.inputs = inputs
        ffn = moe.shared
        if ffn is None or not gating_of(ffn.spec).is_known:
            raise Slow("a shared expert with another activation")
        self.norm, self.eps, self.gating = owner.norm, owner.eps, gating_of(ffn.spec)
        pair = pair_of(ffn)
        self.matrices = [on_device(x, context, GATE_UP) for x in pair]
        self.down = on_device(ffn.down, context, MATVEC_ADD)
        types = {x.type for x in self.matrices}
        floats = any(x.type.is_float for x in (*self.matrices, self.down))
        self.between = torch.float32 if inputs or floats or len(types) > 1 else BETWEEN
        gate = moe.shared_gate
        # Times the weights of the norm, so that one product is enough.
        self.share = None if gate is None else held_decoded(gate, context).view(-1) * self.norm

    def hidden(self, frame: Frame) -> torch.Tensor:
        """Return the buffer [n, hidden] between gate and down."""
        return frame.buffer("shared hidden", self.down.cols, self.between)

    def among_others(self, frame: Frame) -> tuple:
        """Return what the launch for gate and up of the others takes."""
        return (self.inputs, self.hidden(frame)) if self.inputs else ()

    def inner(self, frame: Frame, h: torch.Tensor) -> torch.Tensor:
        """Return the input of `down`, multiplied by the share of each token."""
        hidden = self.hidden(frame)
        if not self.inputs:
            gate, up = self.matrices[0], self.matrices[1] if len(self.matrices) == 2 else None
            arguments = h, self.norm, self.eps, gate, up, hidden, None, self.gating
            operation(matvec.gate_up, *arguments)
        if self.share is not None:
            step_between.take_share(h, self.share, self.eps, hidden)
        return hidden


def float_matrix(linear: Linear, context: Context) -> torch.Tensor:
    """float32[rows, cols] of a matrix that has to be multiplied in float32 (the router's)."""
    return decode_matrix(on_device(linear, context, biased=True), torch.float32)
