"""The executor of a prompt for attention and a state-space layer side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...layers.attention import Attention
from ...layers.batch import Batch
from ...layers.block import AttentionAndStateSpace
from ...layers.norm import Norm
from ...layers.recurrent.state_space import StateSpace
from ..common.context import Context
from ..common.registry import PROMPT, PlacedBranch, executor
from .common.graphs import Stage, Staged
from .common.stream import Stream, check_norm
from .common.weights import Product
from .mixers.attention import PromptAttention
from .mixers.state_space import PromptStateSpace


@executor(PROMPT, AttentionAndStateSpace)
class PromptAttentionAndStateSpace(Staged):
    """h += attention(x) + states(x), x = norm(h), which stays in its buffer while attention runs. A
    rank may have no part of one of them.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        check_norm(branch.norm, context)
        m: AttentionAndStateSpace = branch.module
        self.branch, self.norm, self.context, self.place = branch, branch.norm, context, m.place
        self.attention = self.states = None
        # Both keep whether their results are summed over ranks.
        if isinstance(m.attention, Attention):
            one = replace(branch, branch=replace(branch.branch, module=m.attention))
            self.attention = PromptAttention(one, context, "delta of attention")
        if isinstance(m.states, StateSpace):
            one = replace(branch, branch=replace(branch.branch, module=m.states))
            self.states = PromptStateSpace(one, context)

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        found = [(True, self._norm)] if self.attention is None else self.attention.stages(batch)
        if self.states is None:
            return list(found)
        # What attention adds may be multiplied while ranks meet, from a buffer that is used again.
        again, _ = found[-1]
        beside = [(same, self._beside(stage)) for same, stage in self.states.stages(batch)]
        return [*found, (again, _settle), *beside]

    def _norm(self, stream: Stream, batch: Batch) -> None:
        """Do without attention what else it does at first."""
        stream.normed(self.norm)
        if stream.narrows:
            stream.keep_last(batch.n_sequences)

    def _beside(self, stage: Stage) -> Stage:
        """Return a stage of the state-space layer that reads what attention has read."""
        place, context = self.place, self.context

        def run(stream: Stream, batch: Batch) -> None:
            rows, width = batch.n_sequences * batch.n_tokens, stream.h.shape[1]
            x = context.buffer("normed", (rows, width), context.dtype)
            stage(StreamBeside(stream, x), replace(batch, place=place))

        return run


class StreamBeside(Stream):
    """A stream whose norm x half[rows, width] is already computed, of all rows, for a layer that
    reads it after another one has changed the stream. What it adds goes to the stream.
    """

    def __init__(self, stream: Stream, x: torch.Tensor):
        super().__init__(x, stream.context)
        self.narrows, self.accompanied, self._stream = stream.narrows, stream.accompanied, stream

    def normed(self, norm: Norm | None, *more: object, **kinds: object) -> torch.Tensor:
        """Return x. No other forms of it are there."""
        if more or kinds:
            raise TypeError("a norm that is read again has one form")
        return self.h

    def keep_last(self, n_sequences: int) -> None:
        """Keep as many rows as the stream does."""
        self.h = self.h[:n_sequences]

    def add(self, delta: torch.Tensor, *more: Any, **kinds: Any) -> None:
        """Add to the stream."""
        self._stream.add(delta, *more, **kinds)

    def add_product(self, product: Product, x: torch.Tensor, post_norm: Norm | None) -> None:
        """Add the product to the stream."""
        self._stream.add_product(product, x, post_norm)


def _settle(stream: Stream, batch: Batch) -> None:
    stream.settle_between()
    stream.multiply_parts()
