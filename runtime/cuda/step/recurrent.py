"""The executors of state-space layers and of gated short convolutions in a decoding step."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....cuda_kernels.matvec import products as matvec
from ....cuda_kernels.matvec.plan import NORM_MATVEC
from ....cuda_kernels.step import short_conv as step_conv
from ....cuda_kernels.step.state_space import StateSpaceShape, StepStateSpace
from ...layers.recurrent.short_conv import ShortConv
from ...layers.recurrent.state_space import StateSpace
from ...state.sequence import State
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.executor import operation
from ..common.registry import STEP, Placed, PlacedBranch, Slow, executor
from .frame import Frame
from .layers import StepRecurrent, StepSum, on_device


@executor(STEP, StateSpace)
class StepStateSpaceLayer(StepRecurrent):
    """The product of inputs in one launch; convolution, recurrence and gates in one; norms of
    groups in one; the output projection onto h.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
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
        net, shape = self.net, replace(self.shape, rows=frame.n)
        products = frame.buffer("state space inputs", self.input.rows)
        operation(matvec.norm_matvec, h, self.norm, self.eps, [self.input], [products])
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
