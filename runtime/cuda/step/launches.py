"""What a step launches, one after the other: embedding, branches, output and sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...layers.batch import Batch
from ...layers.norm import RMSNorm
from ...network.network import Network
from ...network.sampling import Sampling
from ...state.sequence import State
from ...weights.ranges import opened
from ..common.context import Context
from ..common.executor import operation
from ..common.registry import STEP, Slow, choose_all, placed
from . import (  # noqa: F401, they declare executors
    absent,
    attention,
    attention_and_ffn,
    delta,
    dense_and_experts,
    ffn,
    mla,
    recurrent,
)
from .ends import (
    DeviceEmbedding,
    SlowEmbedding,
    SlowLayerInputs,
    SlowOutput,
    StepBegin,
    StepEnd,
    StepOutput,
)
from .frame import Frame, PendingBranch, StepSequence
from .layer_input import DeviceLayerInputs
from .layers import SlowBranch, StepExecutor, StepScaled
from .links import links_of
from .sampling import sampler

_End = TypeVar("_End")  # what begins or ends a step


class StepLaunches:
    """The executors of a network, and their order. `captured`: whether nothing among them needs the
    host.
    """

    def __init__(self, network: Network, context: Context, frame: Frame):
        self.network, self.context, self.frame = network, context, frame
        self.embedding: StepBegin = _or_slow(
            context, "DeviceEmbedding", DeviceEmbedding, SlowEmbedding, network
        )
        self.inputs: StepBegin | None = None
        if network.inputs is not None:
            self.inputs = _or_slow(
                context, "LayerInputs", DeviceLayerInputs, SlowLayerInputs, network.inputs
            )
        self.branches: list[StepExecutor] = []
        branches = placed(network.blocks, network.layers)
        chosen = context.same_choices(choose_all(STEP, branches, context))
        for branch, found in zip(branches, chosen, strict=True):
            self.branches.append(found or SlowBranch(branch))
            if branch.scale is not None:
                self.branches.append(StepScaled(branch))
        self.links = links_of(network, context)
        frame.links = self.links
        self.ending: StepEnd = _or_slow(context, "Output", StepOutput, SlowOutput, network)

    @property
    def captured(self) -> bool:
        """Return whether a step can be captured into one CUDA graph."""
        parts = (self.embedding, self.inputs, *self.branches, self.ending)
        return all(part.captured for part in parts if part is not None)

    def step(self, sequence: StepSequence, state: State, n: int, wanted: str | Sampling) -> None:
        """Launch a whole step for n tokens. wanted: logits of "all" tokens or of the "last" one, or
        how the next token is drawn.
        """
        self._begin(sequence, state, n, wanted)
        self._run_branches(sequence, state)
        self._finish(sequence, n, wanted)
        self.frame.end()

    def layers(
        self,
        sequence: StepSequence,
        state: State,
        n: int,
        wanted: str | Sampling,
        between: torch.Tensor,
    ) -> None:
        """Launch the layers of this rank, between what comes in and what goes out: the residual
        stream in `between`, float32[n, width], with other streams after it.
        """
        self._begin(sequence, state, n, wanted)
        first, batch = between[:, : self.network.width], self.frame.batch
        several = self.network.n_streams > 1 and batch is not None  # without, no layer is here
        if self.network.layers.start:
            operation(moved, first, self.frame.h)
            if several:
                self.network.leave(between, batch)
        self._run_branches(sequence, state)
        operation(moved, self.frame.settled(), first)
        if several:
            self.network.gather_streams(between, batch)
        self.frame.end()

    def output(
        self, sequence: StepSequence, n: int, wanted: str | Sampling, between: torch.Tensor
    ) -> None:
        """Launch what follows the last layer of the model, whose result is in `between`."""
        self.frame.begin(sequence, n, None)
        operation(moved, between[:, : self.network.width], self.frame.h)
        self._finish(sequence, n, wanted)
        self.frame.end()

    def _begin(self, sequence: StepSequence, state: State, n: int, wanted: str | Sampling) -> None:
        """Launch the embedding of the tokens."""
        frame = self.frame
        batch = None if sequence.captures else Batch.after([state], [n], self.context.device)
        frame.begin(sequence, n, batch, sequence.alternates and not isinstance(wanted, str))
        h = frame.h
        with opened("token_embd", "token_embd"):
            self.embedding(frame, h)
            if self.inputs is not None:
                self.inputs(frame, h)
        if batch is not None:
            frame.batch = self.network.prepared(sequence.tokens[:n].long(), h, batch)

    def _run_branches(self, sequence: StepSequence, state: State) -> None:
        frame = self.frame
        for number, branch in enumerate(self.branches):
            executor = sequence.instead.get(number, branch)
            h = self.frame.h if executor.joins else self.frame.settled()
            whole = isinstance(executor, (SlowBranch, StepScaled)) or not executor.branch.is_summed
            if whole or self.links is None:
                executor(frame, h, state)
            else:
                self._summed(executor, h, state)

    def _finish(self, sequence: StepSequence, n: int, wanted: str | Sampling) -> None:
        """Launch the output, and the sampler of a drawn token."""
        frame = self.frame
        with opened("output", "output"):
            self.ending(frame, slice(0, n) if wanted == "all" else slice(n - 1, n))
        if not isinstance(wanted, str):
            sampler(frame, wanted)(frame.logits[0], sequence)

    def _summed(self, executor: StepExecutor, h: torch.Tensor, state: State) -> None:
        """Run an executor whose result is a part of a sum over ranks, and add the sum."""
        frame, norm, links = self.frame, executor.branch.branch.post_norm, self.links
        if links is None:
            raise TypeError("a part of a sum without other ranks")
        part = frame.part = frame.zeros("part of a sum", h.shape[1])
        try:
            executor(frame, h, state)
        finally:
            frame.part = None
        h = frame.settled()
        if not isinstance(norm, RMSNorm):
            operation(links.sum, part, h)
            return
        total = frame.buffer("delta", h.shape[1])
        operation(links.assign, part, total)
        frame.pending = PendingBranch(total, norm.weight, norm.eps)


def moved(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the residual stream."""
    out.copy_(source)


def _or_slow(
    context: Context,
    kind: str,
    fast: Callable[[Any, Context], _End],
    slow: Callable[[Any, Context], _End],
    module: Any,
) -> _End:
    try:
        return fast(module, context)
    except Slow as reason:
        context.report(kind, reason, 0)
        return slow(module, context)
