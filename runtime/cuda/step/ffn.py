"""Executors of feed-forward layers in a decoding step."""

from __future__ import annotations

from dataclasses import astuple

import torch

from ....cuda_kernels.matvec import products as matvec
from ....cuda_kernels.matvec.operands import RowRange
from ....cuda_kernels.matvec.plan import GATE_UP, NORM_MATVEC
from ....cuda_kernels.step import between as step_between
from ...layers.ffn import GatedFFN, PlainFFN
from ...layers.norm import RMSNorm
from ...weights.linear import Linear
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.executor import operation
from ..common.expert_terms import gating_of
from ..common.registry import STEP, PlacedBranch, executor
from .frame import Frame
from .layers import BETWEEN, StepBranch, StepInput, StepSum, on_device


@executor(STEP, GatedFFN)
class StepFFN(StepBranch):
    """Gate and up with the activation in one launch, down onto h."""

    joins = True

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        ffn: GatedFFN = branch.module
        pair = [x for x in (ffn.gate_up, ffn.gate, ffn.up) if x is not None]
        self.input = StepInput(branch.branch.norm, context)
        self.down = StepSum(ffn.down, branch, context)
        self.cols, self.activation = self.down.matrix.cols, ffn.spec.activation
        self.gating = gating_of(ffn.spec)
        self.biases = _biases_of(pair, self.cols)
        # Without biases the product itself computes the activation, and an RMS norm if any.
        self.joined = self.biases is None and isinstance(self.input.norm, RMSNorm | None)
        kind = GATE_UP if self.joined else NORM_MATVEC
        matrices = [on_device(x, context, kind, biased=True) for x in pair]
        self.matrices = matrices
        quantized = (
            len({x.type for x in matrices}) == 1
            and not matrices[0].type.is_float
            and not self.down.matrix.type.is_float
            and self.joined
        )
        self.between = BETWEEN if quantized else torch.float32
        self.halves = (
            [RowRange(matrices[0], first, self.cols) for first in (0, self.cols)]
            if len(matrices) == 1
            else matrices
        )

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        self.add(frame, self.hidden(frame))

    def add(self, frame: Frame, hidden: torch.Tensor) -> None:
        """Launch the product of what `hidden` returns, onto the stream."""
        self.down(frame, hidden, frame.h)

    def hidden(self, frame: Frame) -> torch.Tensor:
        """Launch what comes before the last product, [n, cols], of the stream as it is now."""
        hidden = frame.buffer("hidden", self.cols, self.between)
        if not self.joined:
            gate, up = (frame.buffer(name, self.cols) for name in ("gate", "up"))
            self.input(frame, self.halves, [gate, up])
            gate_bias, up_bias = self.biases or (None, None)
            step_between.activate(
                gate, hidden, self.activation, bias=gate_bias, up=up, up_bias=up_bias
            )
        else:
            gate, up = self.matrices[0], self.matrices[1] if len(self.matrices) == 2 else None
            h, join = frame.joined()
            arguments = h, self.norm, self.eps, gate, up, hidden, join, self.gating
            operation(matvec.gate_up, *arguments, plain=self.input.norm is None)
        return hidden


def _biases_of(
    pair: list[Linear], rows: int
) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
    """Return the biases of gate and up, which may be one matrix; None if there are none."""
    if all(x.bias is None for x in pair):
        return None
    if len(pair) == 1 and pair[0].bias is not None:
        return pair[0].bias[:rows].contiguous(), pair[0].bias[rows:].contiguous()
    return pair[0].bias, pair[1].bias


@executor(STEP, PlainFFN)
class StepPlainFFN(StepBranch):
    """Up, bias and activation, down onto h."""

    joins = True

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        ffn: PlainFFN = branch.module
        self.input = StepInput(branch.norm, context)
        self.up = on_device(ffn.up, context, NORM_MATVEC, biased=True)
        self.bias, self.activation = ffn.up.bias, ffn.spec.activation
        self.xielu = None if ffn.spec.xielu is None else astuple(ffn.spec.xielu)
        self.down = StepSum(ffn.down, branch, context)

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        hidden = frame.buffer("hidden", self.up.rows)
        self.input(frame, [self.up], [hidden])
        step_between.activate(hidden, hidden, self.activation, bias=self.bias, xielu=self.xielu)
        self.down(frame, hidden, frame.h)
