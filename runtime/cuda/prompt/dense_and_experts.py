"""The executor of a prompt for a dense layer next to experts."""

from __future__ import annotations

import torch

from ....cuda_kernels.prompt import rows as prompt_rows
from ...layers.absent import AbsentRows
from ...layers.batch import Batch
from ...layers.block import Branch
from ...layers.dense_and_experts import DenseAndExperts
from ...layers.norm import Norm
from ..common.context import Context
from ..common.registry import PROMPT, PlacedBranch, Slow, executor
from .attention_and_ffn import PromptAttentionAndFFN
from .common.graphs import Stage, Staged
from .common.stream import SlowBranch, Stream
from .ffn import PromptFFN
from .moe import PromptMoE
from .offloaded import PromptOffloadedMoE, prompt_moe


@executor(PROMPT, DenseAndExperts)
class PromptDenseAndExperts(Staged):
    """h += norm(norm(dense layer) + norm(experts)), each of which has its norm of h before it.
    Ranks add up each result before its norm; a rank may have no part of one of them.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        m: DenseAndExperts = branch.module
        self.branch, self.context, self.m = branch, context, m
        self.group = None if m.sum is None else context.group
        if m.moe is None and self.group is None:
            raise Slow("no experts")
        # A sum over ranks comes before the norm after it.
        after = (m.post_norm, m.expert_post_norm) if self.group is None else (None, None)
        self.dense = self.experts = None
        if not isinstance(m.dense, AbsentRows):
            dense = Branch(m.norm, m.dense, after[0])
            self.dense = PromptFFN(PlacedBranch(branch.layer, dense, branch.device), context)
        if m.moe is not None:
            experts = Branch(m.expert_norm, m.moe, after[1])
            self.experts = prompt_moe(PlacedBranch(branch.layer, experts, branch.device), context)
        self.expert_post_norm = after[1]

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        again = True
        if self.experts is not None:
            [(again, _)] = self.experts.stages(batch)
        # A graph contains sums only if GPUs meet without their hosts.
        meets = self.group is None or self.context.row_links is not None
        return [(again and meets, self._run)]

    def _run(self, stream: Stream, batch: Batch) -> None:
        leaves = self.experts is not None and self.experts.leaves(stream)
        if leaves and self.group is None:
            SlowBranch(self.branch)(stream, batch)
        elif leaves or self.experts is None:
            self._add(stream, leaves)
        else:
            with self.experts.present():
                self._add(stream)

    def _add(self, stream: Stream, leaves: bool = False) -> None:
        """leaves: experts run on the reference path. Ranks without experts do not know, and have to
        meet in the same way.
        """
        m, context, shape = self.m, self.context, tuple(stream.h.shape)
        both = Stream(context.buffer("sum of branches", shape, torch.float32), context)
        both.h.zero_()
        self._begin(both)
        x = stream.normed(m.norm)
        if self.dense is not None:
            self.dense.add(x, both)
        self._end(both, m.post_norm)
        self._begin(both)
        if self.experts is not None and leaves:
            mixed = m.mixed(self.experts.m, stream.h)
            both.add(context.buffer("delta", shape, context.dtype).copy_(mixed))
        elif self.experts is not None:
            self._add_experts(self.experts, stream.h, both)
        self._end(both, m.expert_post_norm)
        delta = context.buffer("delta", shape, context.dtype)
        delta.copy_(both.h)
        stream.add(delta, post_norm=self.branch.post_norm)

    def _add_experts(self, experts: PromptMoE, h: torch.Tensor, both: Stream) -> None:
        m, context, shape = self.m, self.context, tuple(h.shape)
        exact = context.buffer("normed f32", shape, torch.float32)
        rounded = context.buffer("normed", shape, context.dtype)
        prompt_rows.add_norm(h, m.router_scale, m.eps, rounded, exact=exact)
        routed = experts.routed(exact)
        norm, fused = m.expert_norm, experts.fused
        x = context.buffer("normed", experts.input_shape(len(h)), context.dtype)
        prompt_rows.add_norm(h, norm.weight, norm.eps, x, permuted=fused)
        both.add(*experts.mixed(x, *routed), post_norm=self.expert_post_norm)

    def _begin(self, both: Stream) -> None:
        if self.group is not None:
            both.begin_parts()

    def _end(self, both: Stream, norm: Norm) -> None:
        """Add what was left for the next norm; the sum over ranks has its norm here."""
        if self.group is not None:
            both.meet_parts(self.group, norm)
        both.settled()


def copies_experts(executor: object) -> bool:
    """Return whether this executor, or one that it holds, copies experts from the CPU."""
    holds = isinstance(executor, (PromptDenseAndExperts, PromptAttentionAndFFN))
    inner = executor.experts if holds else executor
    return isinstance(inner, PromptOffloadedMoE)
