"""The executor of a decoding step for attention and a feed-forward layer side by side."""

from __future__ import annotations

import torch

from ...layers.attention import Attention
from ...layers.block import AttentionAndFFN, Branch
from ...layers.ffn import GatedFFN
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.executor import Executor
from ..common.registry import STEP, PlacedBranch, executor
from .attention import StepAttentionLayer
from .ffn import StepFFN
from .frame import Frame


@executor(STEP, AttentionAndFFN)
class StepAttentionAndFFN(Executor):
    """Gate and up, which read the stream before attention adds to it; attention; down. A rank may
    have no part of one of them.
    """

    captured = repeatable = joins = True

    def __init__(self, branch: PlacedBranch, context: Context):
        self.branch, m = branch, branch.module
        self.attention = self.ffn = None
        if isinstance(m.attention, Attention):
            self.attention = StepAttentionLayer(_with(branch, m.attention), context)
        if isinstance(m.ffn, GatedFFN):
            self.ffn = StepFFN(_with(branch, m.ffn), context)

    def check(self, state) -> None:
        """Slow if attention cannot run on what a sequence keeps for it."""
        if self.attention is not None:
            self.attention.check(state)

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        hidden = None if self.ffn is None else self.ffn.hidden(frame)
        if self.attention is not None:
            self.attention(frame, frame.h, state)
        if self.ffn is not None and hidden is not None:
            self.ffn.add(frame, hidden)


def _with(branch: PlacedBranch, module: Attention | GatedFFN) -> PlacedBranch:
    """Return a branch of one of both."""
    return PlacedBranch(branch.layer, Branch(branch.norm, module), branch.device)
