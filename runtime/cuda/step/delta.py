"""The executor of gated delta nets in a decoding step."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....cuda_kernels.matvec import products as matvec
from ....cuda_kernels.matvec.plan import NORM_MATVEC
from ....cuda_kernels.step.delta import DeltaShape, StepDelta
from ...layers.recurrent.delta_net import DeltaNet
from ...state.sequence import State
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.delta_shapes import check_devices, delta_heads, inputs, rates
from ..common.executor import operation
from ..common.registry import STEP, PlacedBranch, Slow, executor
from .frame import Frame
from .layers import StepRecurrent, StepSum, on_device


@executor(STEP, DeltaNet)
class StepDeltaLayer(StepRecurrent):
    """The inputs of the convolution and the gates in one launch; rates, convolution, the rule, norm
    and gates in one; the output projection onto h.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        net: DeltaNet = branch.module
        s = net.spec
        check_devices(net, context)
        self.net = net
        self.shape = DeltaShape(1, self.norm.numel(), delta_heads(net))
        if not self.shape.fits:
            raise Slow(
                f"heads of {s.key_length} and {s.value_length} elements, width {self.shape.width}"
            )
        self.inputs = [on_device(linear, context, NORM_MATVEC) for linear in inputs(net)]
        self.rates = rates(net, context)
        self.output = StepSum(net.output, branch, context)

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state: State) -> None:
        net, shape = self.net, replace(self.shape, rows=frame.n)
        outs = [
            frame.buffer(f"delta inputs {i}", matrix.rows) for i, matrix in enumerate(self.inputs)
        ]
        operation(matvec.norm_matvec, h, self.norm, self.eps, self.inputs, outs)
        mixed = frame.buffer("mixed", shape.heads.value_heads * shape.heads.value_length)
        mix = frame.once(("delta", shape), lambda: StepDelta(shape, frame.device))
        mix(
            h,
            self.norm,
            self.eps,
            self.rates,
            net.dt,
            net.a,
            outs[0],
            outs[-1],
            net.convolution,
            net.norm.weight,
            net.norm.eps,
            self.places(frame, state),
            mixed,
        )
        self.output(frame, mixed, h)
