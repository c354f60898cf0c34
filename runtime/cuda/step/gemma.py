"""Executors of a decoding step for parts of a block that only Gemma 4 has."""

from __future__ import annotations

import torch

from ....cuda_kernels import matvec, step_between
from ....cuda_kernels.matvec_plan import NORM_MATVEC
from ....cuda_kernels.ops import decode_rows
from ...layers.block import Branch
from ...layers.gemma import DenseAndExperts, LayerInput, LayerInputs
from ...layers.norm import Norm
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.executor import Executor, operation
from ..common.registry import STEP, PlacedBranch, Slow, executor
from .frame import Frame, PendingBranch
from .layers import StepFFN, StepSum, on_device
from .moe import StepMoE


class _Experts(StepMoE):
    """Experts whose sum, with the result of the dense layer that is pending, is left pending."""

    def __init__(self, branch: PlacedBranch, m: DenseAndExperts, context: Context):
        if m.moe is None:
            raise Slow("no experts")
        norms = Branch(m.expert_norm, m.moe, m.expert_post_norm)
        super().__init__(PlacedBranch(branch.layer, norms, branch.device), context)
        self.router_norm, self.router_eps = m.router_scale, m.eps
        self.last_norm = branch.post_norm

    def end(self, frame: Frame, sum: torch.Tensor, h: torch.Tensor, norm: Norm) -> None:
        dense, out = frame.pending, frame.buffer("sum of branches", h.shape[1])
        if dense is None or self.last_norm is None:
            raise TypeError("no dense layer before the experts, or no norm after them")
        first, second = (dense.delta, dense.weight, dense.eps), (sum, norm.weight, norm.eps)
        step_between.sum_normed(*first, *second, out)
        frame.pending = PendingBranch(out, self.last_norm.weight, self.last_norm.eps)


@executor(STEP, DenseAndExperts)
class StepDenseAndExperts(Executor):
    """The dense layer, then the experts, which read the same stream."""

    captured = repeatable = joins = True

    def __init__(self, branch: PlacedBranch, context: Context):
        self.branch, m = branch, branch.module
        norms = Branch(m.norm, m.dense, m.post_norm)
        self.dense = StepFFN(PlacedBranch(branch.layer, norms, branch.device), context)
        if not self.dense.down.leaves_pending or branch.post_norm is None:
            raise Slow("a dense layer of floats next to experts, or no norm after both")
        self.experts = _Experts(branch, m, context)

    def check(self, state) -> None:
        """Takes any."""

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        self.dense(frame, h, state)
        self.experts(frame, frame.h, state)


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
        h, join = frame.joined() if matvec.joins(self.gate) else (frame.settled(), None)
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
            raise Slow(f"the norm of inputs of layers is not on {context.device}")

    def __call__(self, frame: Frame, h: torch.Tensor) -> None:
        columns, tokens = self.projection.rows, frame.sequence.tokens[: frame.n]
        projected, rows = (frame.buffer(f"layer inputs {i}", columns) for i in range(2))
        operation(matvec.plain_matvec, h, [self.projection], [projected])
        decode_rows(self.table, tokens, torch.float32, out=rows)
        scales = h.shape[1] ** -0.5, self.length**0.5
        norm, out = self.norm, frame.new_layer_inputs(columns // self.length, self.length)
        step_between.layer_inputs(projected, scales[0], norm.weight, norm.eps, rows, scales[1], out)
