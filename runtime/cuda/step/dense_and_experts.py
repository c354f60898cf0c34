"""The executor of a decoding step for a dense layer next to experts."""

from __future__ import annotations

import torch

from ....cuda_kernels.step import between as step_between
from ...layers.absent import AbsentRows
from ...layers.block import Branch
from ...layers.dense_and_experts import DenseAndExperts
from ...layers.moe import MoE
from ...layers.norm import Norm
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.executor import Executor, operation
from ..common.held import on_cpu
from ..common.registry import STEP, PlacedBranch, Slow, executor
from .attention_and_ffn import StepAttentionAndFFN
from .ffn import StepFFN
from .frame import Frame, PendingBranch
from .layers import StepExecutor
from .moe import StepExperts, StepMoE
from .offloaded import StepOffloadedMoE


class _WithDense(StepExperts):
    """Experts whose sum, with the result of the dense layer that is pending, is left pending. A
    rank only adds its part of them.
    """

    def __init__(self, branch: PlacedBranch, moe: MoE, context: Context):
        m: DenseAndExperts = branch.module
        norms = Branch(m.expert_norm, moe, None if m.sum is not None else m.expert_post_norm)
        super().__init__(PlacedBranch(branch.layer, norms, branch.device), context)
        self.router_norm, self.router_eps = m.router_scale, m.eps
        self.last_norm = branch.post_norm

    def end(self, frame: Frame, sum: torch.Tensor, h: torch.Tensor, norm: Norm) -> None:
        dense = frame.pending
        if dense is None or self.last_norm is None:
            raise TypeError("no dense layer before the experts, or no norm after them")
        first, second = (dense.delta, dense.weight, dense.eps), (sum, norm.weight, norm.eps)
        _leave_both(frame, first, second, self.last_norm)


class _Experts(_WithDense, StepMoE):
    """Experts on the device."""


class _OffloadedExperts(_WithDense, StepOffloadedMoE):
    """Experts on the CPU."""


@executor(STEP, DenseAndExperts)
class StepDenseAndExperts(Executor):
    """The dense layer, then the experts, which read the same stream. Ranks add up both results in
    one exchange; a rank may have no part of one of them.
    """

    captured = repeatable = joins = True

    def __init__(self, branch: PlacedBranch, context: Context):
        self.branch, m = branch, branch.module
        if branch.post_norm is None or (m.moe is None and m.sum is None):
            raise Slow("no experts, or no norm after both")
        self.last_norm, self.is_summed = branch.post_norm, m.sum is not None
        self.dense = self.experts = None
        if not isinstance(m.dense, AbsentRows):
            norms = Branch(m.norm, m.dense, None if self.is_summed else m.post_norm)
            self.dense = StepFFN(PlacedBranch(branch.layer, norms, branch.device), context)
            if not self.is_summed and not self.dense.down.leaves_pending:
                raise Slow("a dense layer with a bias next to experts")
        if m.moe is not None:
            kind = _OffloadedExperts if on_cpu(m.moe, context) else _Experts
            self.experts = kind(branch, m.moe, context)

    def check(self, state) -> None:
        """Takes any."""

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        if self.is_summed:
            self._add_parts(frame, state)
            return
        for part in (self.dense, self.experts):
            if part is not None:
                part(frame, frame.h, state)

    def _add_parts(self, frame: Frame, state) -> None:
        """Leave the sum of both pending, whose parts are on all ranks."""
        m, n, width = self.branch.module, frame.n, frame.width
        if frame.links is None:
            raise TypeError("a part of a sum without other ranks")
        parts = frame.zeros("parts of two sums", 2 * width).view(2, n, width)
        try:
            if self.dense is not None:
                frame.part = parts[0]
                self.dense(frame, frame.h, state)
            if self.experts is not None:
                frame.part = parts[1]
                self.experts(frame, frame.settled(), state)
        finally:
            frame.part = None
        frame.settled()
        sums = frame.buffer("two sums", 2 * width).view(2, n, width)
        operation(frame.links.assign, parts.view(2 * n, width), sums.view(2 * n, width))
        norms = m.post_norm, m.expert_post_norm
        first, second = ((x, by.weight, by.eps) for x, by in zip(sums, norms, strict=True))
        _leave_both(frame, first, second, self.last_norm)


_Normed = tuple[torch.Tensor, torch.Tensor, float]  # x float32[n, width], the weight of a norm, eps


def _leave_both(frame: Frame, first: _Normed, second: _Normed, last: Norm) -> None:
    """Leave last(norm(first) + norm(second)) pending; the second x becomes 0."""
    out = frame.buffer("sum of branches", frame.width)
    step_between.sum_normed(*first, *second, out)
    frame.pending = PendingBranch(out, last.weight, last.eps)


def offloaded_of(executor: StepExecutor) -> StepOffloadedMoE | None:
    """Return what waits for experts on the CPU: this executor, or one that it holds."""
    holds = isinstance(executor, (StepDenseAndExperts, StepAttentionAndFFN))
    inner = executor.experts if holds else executor
    return inner if isinstance(inner, StepOffloadedMoE) else None
