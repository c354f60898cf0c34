"""The executor of a prompt for attention and a feed-forward layer side by side."""

from __future__ import annotations

from dataclasses import replace

from ...layers.attention import Attention
from ...layers.batch import Batch
from ...layers.block import AttentionAndFFN
from ...layers.ffn import GatedFFN
from ..common.context import Context
from ..common.registry import PROMPT, PlacedBranch, executor
from .common.graphs import Stage, Staged
from .common.stream import Stream, check_norm, last_rows
from .ffn import PromptFFN
from .mixers.attention import PromptAttention


@executor(PROMPT, AttentionAndFFN)
class PromptAttentionAndFFN(Staged):
    """h += attention(x) + ffn(x), x = norm(h), which stays in its buffer while attention runs. A
    rank may have no part of one of them.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        check_norm(branch.norm, context)
        m: AttentionAndFFN = branch.module
        self.branch, self.norm, self.context = branch, branch.norm, context
        self.attention = self.ffn = None
        if isinstance(m.attention, Attention):
            # It keeps whether its results are summed over ranks.
            one = replace(branch, branch=replace(branch.branch, module=m.attention))
            self.attention = PromptAttention(one, context)
        if isinstance(m.ffn, GatedFFN):
            one = replace(branch, branch=replace(branch.branch, module=m.ffn))
            self.ffn = PromptFFN(one, context, "delta of ffn")

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        mixed = [(True, self._norm)] if self.attention is None else self.attention.stages(batch)
        return [*mixed, *([] if self.ffn is None else [(True, self._feed)])]

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
