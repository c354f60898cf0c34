"""The executor of a decoding step for attention and a feed-forward layer side by side."""

from __future__ import annotations

import torch

from ...layers.attention import Attention
from ...layers.block import AttentionAndFFN, Branch
from ...layers.ffn import GatedFFN
from ...layers.moe import MoE
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.executor import Executor
from ..common.registry import STEP, PlacedBranch, executor
from .attention import StepAttentionLayer
from .ffn import StepFFN
from .frame import Frame
from .offloaded import step_moe


@executor(STEP, AttentionAndFFN)
class StepAttentionAndFFN(Executor):
    """Gate and up, or those of experts with their choice, which read the stream before attention
    adds to it; attention; down. A rank may have no part of one of them.
    """

    captured = repeatable = joins = True

    def __init__(self, branch: PlacedBranch, context: Context):
        self.branch, m = branch, branch.module
        self.attention = self.ffn = self.experts = None
        if isinstance(m.attention, Attention):
            self.attention = StepAttentionLayer(_with(branch, m.attention), context)
        if isinstance(m.ffn, GatedFFN):
            self.ffn = StepFFN(_with(branch, m.ffn), context)
        elif isinstance(m.ffn, MoE):
            self.experts = step_moe(_with(branch, m.ffn), context)

    def check(self, state) -> None:
        """Slow if attention cannot run on what a sequence keeps for it."""
        if self.attention is not None:
            self.attention.check(state)

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        hidden = None if self.ffn is None else self.ffn.hidden(frame)
        begun, experts = None, self.experts
        if experts is not None:
            begun = experts.begin(frame, experts.read(frame, frame.settled()))
        if self.attention is not None:
            self.attention(frame, frame.h, state)
        if self.ffn is not None and hidden is not None:
            self.ffn.add(frame, hidden)
        if experts is not None and begun is not None:
            experts.add(frame, frame.h, begun)


def _with(branch: PlacedBranch, module: Attention | GatedFFN | MoE) -> PlacedBranch:
    """Return a branch of one of both."""
    return PlacedBranch(branch.layer, Branch(branch.norm, module), branch.device)
