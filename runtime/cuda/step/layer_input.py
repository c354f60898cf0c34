"""Executors of a decoding step for inputs of layers."""

from __future__ import annotations

import torch

from ....cuda_kernels.matvec import products as matvec
from ....cuda_kernels.matvec.plan import NORM_MATVEC
from ....cuda_kernels.packed.decode import decode_rows
from ....cuda_kernels.step import between as step_between
from ...layers.layer_input import LayerInput, LayerInputs
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.executor import Executor, operation
from ..common.registry import STEP, Placed, PlacedBranch, executor
from .frame import Frame
from .layers import StepSum, on_device


@executor(STEP, LayerInput)
class StepLayerInput(Executor):
    """The gate, its activation times the input of the layer, and the projection onto h."""

    captured = repeatable = joins = True

    def __init__(self, branch: PlacedBranch, context: Context):
        self.branch, m = branch, branch.module
        self.gate = on_device(m.gate, context, NORM_MATVEC)
        self.activation = m.spec.activation
        self.projection = StepSum(m.projection, branch, context)

    def check(self, state) -> None:
        """Takes any."""

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        h, join = frame.joined()
        hidden = frame.buffer("layer input", self.gate.rows)
        operation(matvec.plain_matvec, h, [self.gate], [hidden], join)
        inputs = frame.layer_inputs()[self.branch.layer]
        step_between.activate(hidden, hidden, self.activation, up=inputs)
        self.projection(frame, hidden, frame.h)


class DeviceLayerInputs:
    """The inputs of all layers, from token ids and their embeddings."""

    captured = True

    def __init__(self, inputs: LayerInputs, context: Context):
        self.table = on_device(inputs.table, context)
        self.projection = on_device(inputs.projection, context, NORM_MATVEC)
        self.norm, self.length = inputs.norm, inputs.length
        if self.norm.weight.device != context.device:
            raise Placed(f"the norm of inputs of layers is not on {context.device}")

    def __call__(self, frame: Frame, h: torch.Tensor) -> None:
        columns, tokens = self.projection.rows, frame.sequence.tokens[: frame.n]
        projected, rows = (frame.buffer(f"layer inputs {i}", columns) for i in range(2))
        operation(matvec.plain_matvec, h, [self.projection], [projected])
        decode_rows(self.table, tokens, torch.float32, out=rows)
        scales = h.shape[1] ** -0.5, self.length**0.5
        norm, out = self.norm, frame.new_layer_inputs(columns // self.length, self.length)
        step_between.layer_inputs(projected, scales[0], norm.weight, norm.eps, rows, scales[1], out)
