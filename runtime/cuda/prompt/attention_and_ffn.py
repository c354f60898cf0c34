"""The executor of a prompt for attention and a feed-forward layer side by side."""

from __future__ import annotations

from dataclasses import replace

from ...layers.attention import Attention
from ...layers.batch import Batch
from ...layers.block import AttentionAndFFN, Branch
from ...layers.ffn import GatedFFN
from ...layers.moe import MoE
from ..common.context import Context
from ..common.registry import PROMPT, PlacedBranch, executor
from .common.graphs import Stage, Staged
from .common.stream import Stream, check_norm, last_rows
from .ffn import PromptFFN
from .mixers.attention import PromptAttention
from .offloaded import prompt_moe


@executor(PROMPT, AttentionAndFFN)
class PromptAttentionAndFFN(Staged):
    """h += attention(x) + ffn(x), x = norm(h), which stays in its buffer while attention runs.
    Experts, which need x in other forms, run before the result of attention is added. A rank may
    have no part of one of them.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        check_norm(branch.norm, context)
        m: AttentionAndFFN = branch.module
        self.branch, self.norm, self.context = branch, branch.norm, context
        self.attention = self.ffn = self.experts = None
        # They keep whether their results are summed over ranks.
        if isinstance(m.attention, Attention):
            one = replace(branch, branch=replace(branch.branch, module=m.attention))
            of_experts = isinstance(m.ffn, MoE)
            delta = "delta of attention" if of_experts else "delta"
            self.attention = PromptAttention(one, context, delta)
        if isinstance(m.ffn, GatedFFN):
            one = replace(branch, branch=replace(branch.branch, module=m.ffn))
            self.ffn = PromptFFN(one, context, "delta of ffn")
        elif isinstance(m.ffn, MoE):
            rows = Branch(branch.norm, m.ffn, sum=branch.branch.sum)
            self.experts = prompt_moe(replace(branch, branch=rows), context)

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        mixed = [(True, self._norm)] if self.attention is None else self.attention.stages(batch)
        if self.experts is None:
            return [*mixed, *([] if self.ffn is None else [(True, self._feed)])]
        [(again, run)] = self.experts.stages(batch)
        if self.attention is None:
            return [*mixed, (again, run)]
        *before, join = mixed
        return [*before, (again, run), (again, _settle), join]

    def _norm(self, stream: Stream, batch: Batch) -> None:
        """Do without attention what else it does at first."""
        stream.normed(self.norm)
        if stream.narrows:
            stream.keep_last(batch.n_sequences)

    def _feed(self, stream: Stream, batch: Batch) -> None:
        if self.ffn is None:
            raise TypeError("no feed-forward layer")
        stream.settle_between()
        rows, width = batch.n_sequences * batch.n_tokens, stream.h.shape[1]
        x = self.context.buffer("normed", (rows, width), self.context.dtype)
        if len(stream.h) < rows:
            x = last_rows(x, batch.n_sequences).contiguous()
        self.ffn.add(x, stream)


def _settle(stream: Stream, batch: Batch) -> None:
    stream.settle_between()
