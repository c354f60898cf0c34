"""The executor of a decoding step for a dense layer next to experts."""

from __future__ import annotations

import torch

from ....cuda_kernels.step import between as step_between
from ...layers.block import Branch
from ...layers.dense_and_experts import DenseAndExperts
from ...layers.moe import MoE
from ...layers.norm import Norm
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.executor import Executor
from ..common.expert_terms import on_cpu
from ..common.registry import STEP, PlacedBranch, Slow, executor
from .ffn import StepFFN
from .frame import Frame, PendingBranch
from .layers import StepExecutor
from .moe import StepExperts, StepMoE
from .offloaded import StepOffloadedMoE


class _WithDense(StepExperts):
    """Experts whose sum, with the result of the dense layer that is pending, is left pending."""

    def __init__(self, branch: PlacedBranch, moe: MoE, context: Context):
        m: DenseAndExperts = branch.module
        norms = Branch(m.expert_norm, moe, m.expert_post_norm)
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


class _Experts(_WithDense, StepMoE):
    """Experts on the device."""


class _OffloadedExperts(_WithDense, StepOffloadedMoE):
    """Experts on the CPU."""


@executor(STEP, DenseAndExperts)
class StepDenseAndExperts(Executor):
    """The dense layer, then the experts, which read the same stream."""

    captured = repeatable = joins = True

    def __init__(self, branch: PlacedBranch, context: Context):
        self.branch, m = branch, branch.module
        if m.moe is None or branch.post_norm is None:
            raise Slow("no experts, or no norm after both")
        norms = Branch(m.norm, m.dense, m.post_norm)
        self.dense = StepFFN(PlacedBranch(branch.layer, norms, branch.device), context)
        self.dense.down.defers = True
        if not self.dense.down.leaves_pending:
            raise Slow("a dense layer with a bias next to experts")
        kind = _OffloadedExperts if on_cpu(m.moe, context) else _Experts
        self.experts = kind(branch, m.moe, context)

    def check(self, state) -> None:
        """Takes any."""

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        self.dense(frame, h, state)
        self.experts(frame, frame.h, state)


def offloaded_of(executor: StepExecutor) -> StepOffloadedMoE | None:
    """Return what waits for experts on the CPU: this executor, or one that it holds."""
    inner = executor.experts if isinstance(executor, StepDenseAndExperts) else executor
    return inner if isinstance(inner, StepOffloadedMoE) else None
