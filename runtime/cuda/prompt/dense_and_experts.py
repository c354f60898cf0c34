"""The executor of a prompt for a dense layer next to experts."""

from __future__ import annotations

import torch

from ....cuda_kernels.prompt import rows as prompt_rows
from ...layers.batch import Batch
from ...layers.block import Branch
from ...layers.dense_and_experts import DenseAndExperts
from ..common.context import Context
from ..common.registry import PROMPT, PlacedBranch, Slow, executor
from .ffn import PromptFFN
from .graphs import Stage, Staged
from .offloaded import PromptOffloadedMoE, prompt_moe
from .stream import SlowBranch, Stream


@executor(PROMPT, DenseAndExperts)
class PromptDenseAndExperts(Staged):
    """h += norm(norm(dense layer) + norm(experts)), each of which has its norm of h before it."""

    def __init__(self, branch: PlacedBranch, context: Context):
        m: DenseAndExperts = branch.module
        self.branch, self.context, self.m = branch, context, m
        if m.moe is None:
            raise Slow("no experts")
        dense = Branch(m.norm, m.dense, m.post_norm)
        experts = Branch(m.expert_norm, m.moe, m.expert_post_norm)
        self.dense = PromptFFN(PlacedBranch(branch.layer, dense, branch.device), context)
        self.experts = prompt_moe(PlacedBranch(branch.layer, experts, branch.device), context)

    @property
    def stages(self) -> list[tuple[bool, Stage]]:
        [(captured, _)] = self.experts.stages
        return [(captured, self._run)]

    def _run(self, stream: Stream, batch: Batch) -> None:
        if self.experts.leaves(stream):
            SlowBranch(self.branch)(stream, batch)
            return
        with self.experts.present():
            self._add(stream)

    def _add(self, stream: Stream) -> None:
        m, context, shape = self.m, self.context, tuple(stream.h.shape)
        both = Stream(context.buffer("sum of branches", shape, torch.float32), context)
        both.h.zero_()
        self.dense.add(stream.normed(m.norm), both)
        both.settled()
        h, exact = stream.h, context.buffer("normed f32", shape, torch.float32)
        rounded = context.buffer("normed", shape, context.dtype)
        prompt_rows.add_norm(h, m.router_scale, m.eps, rounded, exact=exact)
        routed = self.experts.routed(exact)
        norm, fused = m.expert_norm, self.experts.fused
        x = context.buffer("normed", self.experts.input_shape(len(h)), context.dtype)
        prompt_rows.add_norm(h, norm.weight, norm.eps, x, permuted=fused)
        both.add(*self.experts.mixed(x, *routed), post_norm=m.expert_post_norm)
        delta = context.buffer("delta", shape, context.dtype)
        delta.copy_(both.settled())
        stream.add(delta, post_norm=self.branch.post_norm)


def copies_experts(executor: object) -> bool:
    """Return whether this executor, or one that it holds, copies experts from the CPU."""
    inner = executor.experts if isinstance(executor, PromptDenseAndExperts) else executor
    return isinstance(inner, PromptOffloadedMoE)
