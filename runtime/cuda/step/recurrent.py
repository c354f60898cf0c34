"""The executors of state-space layers, alone and beside attention, of gated short convolutions and
of Kimi delta attention in a decoding step.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ....cuda_kernels.matvec import products as matvec
from ....cuda_kernels.matvec.plan import NORM_MATVEC
from ....cuda_kernels.step import short_conv as step_conv
from ....cuda_kernels.step.kimi_delta import KimiDeltaShape, StepKimiDelta
from ....cuda_kernels.step.state_space import StateSpaceShape, StepStateSpace
from ...layers.attention import Attention
from ...layers.block import AttentionAndStateSpace, Branch
from ...layers.recurrent.kimi_delta import KimiDelta
from ...layers.recurrent.short_conv import ShortConv
from ...layers.recurrent.state_space import StateSpace
from ...state.sequence import State
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.executor import operation
from ..common.registry import STEP, Placed, PlacedBranch, Slow, executor
from .attention import StepAttentionLayer
from .frame import Frame
from .layers import StepBranch, StepExecutor, StepRecurrent, StepSum, on_device


@executor(STEP, StateSpace)
class StepStateSpaceLayer(StepRecurrent):
    """The product of inputs in one launch; convolution, recurrence and gates in one; norms of
    groups in one; the output projection onto h.
    """

    def __init__(self, branch: PlacedBranch, context: Context, place: int | None = None):
        super().__init__(branch, context, place)
        net: StateSpace = branch.module
        s = net.spec
        placed = [x for x in (net.convolution, net.dt, net.a, net.norm) if x is not None]
        if any(x.device != context.device for x in placed):
            raise Placed(f"its convolution is not on {context.device}")
        self.net = net
        sizes = (s.heads, s.groups, s.head_length, s.state_length, s.convolution)
        self.shape = StateSpaceShape(1, *sizes)
        if not self.shape.fits:
            raise Slow(f"heads of {s.head_length} elements with states of {s.state_length}")
        self.input = on_device(net.input, context, NORM_MATVEC)
        self.output = StepSum(net.output, branch, context)

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state: State) -> None:
        self.add(frame, self.products(frame, h), h, state)

    def products(self, frame: Frame, h: torch.Tensor) -> torch.Tensor:
        """Launch the product of inputs, and return what it gives."""
        products = frame.buffer("state space inputs", self.input.rows)
        operation(matvec.norm_matvec, h, self.norm, self.eps, [self.input], [products])
        return products

    def add(self, frame: Frame, products: torch.Tensor, h: torch.Tensor, state: State) -> None:
        """Launch the rest: what follows the product of inputs."""
        net, shape = self.net, replace(self.shape, rows=frame.n)
        mixed = frame.buffer("mixed", net.spec.inner)
        mix = frame.once(("state space", shape), lambda: StepStateSpace(shape, frame.device))
        mix(
            products,
            net.convolution,
            net.bias,
            net.dt,
            net.a,
            net.d,
            net.norm,
            net.eps,
            self.places(frame, state),
            mixed,
        )
        self.output(frame, mixed, h)


@executor(STEP, AttentionAndStateSpace)
class StepAttentionAndStateSpace(StepBranch):
    """The inputs of the state-space layer, which read the stream before attention adds to it;
    attention; the rest of the state-space layer. A rank may have no part of one of them.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        m: AttentionAndStateSpace = branch.module
        self.attention: StepAttentionLayer | None = None
        self.recurrent: StepStateSpaceLayer | None = None
        if isinstance(m.attention, Attention):
            self.attention = StepAttentionLayer(_with(branch, m.attention), context)
        if isinstance(m.states, StateSpace):
            self.recurrent = StepStateSpaceLayer(_with(branch, m.states), context, m.place)
        self.repeatable = self.recurrent is None

    def check(self, state: State) -> None:
        """Slow if one of them cannot run on what a sequence keeps for it."""
        for part in (self.attention, self.recurrent):
            if part is not None:
                part.check(state)

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state: State) -> None:
        products = None if self.recurrent is None else self.recurrent.products(frame, h)
        if self.attention is not None:
            self.attention(frame, h, state)
        if self.recurrent is not None and products is not None:
            self.recurrent.add(frame, products, h, state)


def recurrent_of(executor: StepExecutor) -> StepRecurrent | None:
    """Return the executor, or that of both side by side, whose layer has a recurrent state."""
    if isinstance(executor, StepAttentionAndStateSpace):
        return executor.recurrent
    return executor if isinstance(executor, StepRecurrent) else None


def _with(branch: PlacedBranch, module: Attention | StateSpace) -> PlacedBranch:
    """Return a branch of one of both."""
    return PlacedBranch(branch.layer, Branch(branch.norm, module, mixer=True), branch.device)


@executor(STEP, ShortConv)
class StepShortConv(StepRecurrent):
    """b, c and x in one launch; the convolution and both gates in one; the output projection onto
    h.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        net: ShortConv = branch.module
        if net.convolution.device != context.device:
            raise Placed(f"its convolution is not on {context.device}")
        if not 2 <= net.spec.taps <= step_conv.MOST_TAPS:
            raise Slow(f"a convolution of {net.spec.taps} taps")
        self.net = net
        self.inputs = on_device(net.inputs, context, NORM_MATVEC)
        self.output = StepSum(net.output, branch, context)

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state: State) -> None:
        net, held = self.net, self.state(state)
        products = frame.buffer("convolution inputs", self.inputs.rows)
        operation(matvec.norm_matvec, h, self.norm, self.eps, [self.inputs], [products])
        mixed = frame.buffer("mixed", net.spec.channels)
        operation(
            step_conv.short_conv,
            products,
            net.convolution,
            held.inputs,
            self.other(state, frame.sequence)[0] if frame.alternates else None,
            frame.positions,
            frame.sequence.begun,
            mixed,
        )
        self.output(frame, mixed, h)


@executor(STEP, KimiDelta)
class StepKimiDeltaLayer(StepRecurrent):
    """The products that read the stream, up to three of a type in a launch; the second ones of the
    decay and of the gate, if any; convolutions, the rule, norm and gates in one; the output
    projection onto h.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        net: KimiDelta = branch.module
        s = net.spec
        if any(x.device != context.device for x in (net.convolution, net.dt, net.a)):
            raise Placed(f"its convolution is not on {context.device}")
        self.net, self.shape = net, KimiDeltaShape(1, s.heads, s.length, s.convolution, s.bound)
        if not self.shape.fits:
            raise Slow(f"heads of {s.length} elements")
        firsts = (*net.qkv, net.beta, net.decay[0], net.gate[0])
        self.inputs = [on_device(linear, context, NORM_MATVEC) for linear in firsts]
        self.seconds = [
            [on_device(x, context, NORM_MATVEC) for x in products[1:]]
            for products in (net.decay, net.gate)
        ]
        self.output = StepSum(net.output, branch, context)

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state: State) -> None:
        net, shape = self.net, replace(self.shape, rows=frame.n)
        names = ("q", "k", "v", "beta", "first of decay", "first of gate")
        outs = [
            frame.buffer(f"kimi delta {name}", matrix.rows)
            for name, matrix in zip(names, self.inputs, strict=True)
        ]
        operation(matvec.norm_matvec, h, self.norm, self.eps, self.inputs, outs)
        *qkv, beta, decay, gate = outs
        both = [decay, gate]
        for i, (name, matrices) in enumerate(zip(("decay", "gate"), self.seconds, strict=True)):
            if matrices:
                second = frame.buffer(f"kimi delta {name}", net.spec.inner)
                operation(matvec.plain_matvec, both[i], matrices, [second])
                both[i] = second
        mixed = frame.buffer("mixed", net.spec.inner)
        mix = frame.once(("kimi delta", shape), lambda: StepKimiDelta(shape, frame.device))
        mix(
            *qkv,
            *both,
            beta,
            net.convolution,
            net.dt,
            net.a,
            net.norm.weight,
            net.norm.eps,
            self.places(frame, state),
            mixed,
        )
        self.output(frame, mixed, h)
