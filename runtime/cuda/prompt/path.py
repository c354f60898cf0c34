"""Many rows at once: the residual stream in float32, all else in the dtype of the context, weights
decoded when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

import torch

from ....cuda_kernels.matvec import operands
from ....cuda_kernels.matvec import products as matvec
from ....cuda_kernels.matvec.plan import NORM_MATVEC
from ....cuda_kernels.packed.decode import decode_rows
from ....formats.tensor_names import TensorName
from ...layers.batch import Batch
from ...layers.layer_input import LayerInputs
from ...layers.norm import RMSNorm
from ...network.network import Network
from ...state.sequence import State
from ...weights.ranges import opened, recording
from ..common.context import Context
from ..common.executor import operation
from ..common.registry import PROMPT, PlacedBranch, Slow, choose_all, placed
from . import (  # noqa: F401, see below
    absent,
    attention_and_ffn,
    attention_and_state_space,
    dense_and_experts,
    ffn,
    layer_input,
    offloaded,
)
from .common.graphs import MOST_KINDS, Part, PassKind, PromptGraphs, Segment, Stage, Staged, launch
from .common.stream import Scaled, SlowBranch, Stream
from .common.weights import PromptOutput, packed
from .dense_and_experts import copies_experts
from .layer_input import PromptLayerInputs
from .links import Summed, row_links_of
from .mixers import attention, delta, kimi_delta, mla, short_conv, state_space  # noqa: F401, they declare executors, as do those above
from .together import Piece, fits, most_pieces, run_layers

_Made = TypeVar("_Made")


def _stages(step: Stage, batch: Batch) -> Sequence[tuple[bool, Stage]]:
    return step.stages(batch) if isinstance(step, Staged) else [(False, step)]


def _narrow(stream: Stream, batch: Batch) -> None:
    """Let the next step keep the last row of each sequence."""
    stream.narrows = True


def _narrowed(stream: Stream, batch: Batch) -> None:
    """Keep these rows, if the step has not done it."""
    stream.narrows = False
    stream.keep_last(batch.n_sequences)


class PromptPath:
    """The executors of a network's branches."""

    def __init__(self, network: Network, context: Context):
        self.network, self.context = network, context
        self._steps: list[Part] = []
        self._slow: list[Stage] = []  # of layers whose tensors are replaced
        self._narrows = 0  # the last step that needs all rows
        context.row_links = row_links_of(network, context)
        branches = placed(network.blocks, network.layers)
        executors = context.same_choices(choose_all(PROMPT, branches, context))
        context.sources = attention.sources(branches, executors)
        for number, branch in enumerate(branches):
            if branch.branch.takes_batch:
                self._narrows = len(self._steps)
            made = executors[number]
            step = self._step(branch, made)
            self._steps.append((branch.layer, step))
            slow = SlowBranch(branch)
            self._slow.append(slow)
            if branch.scale is not None:
                scaled = branch.layer, Scaled(branch, float(branch.scale))
                self._steps.append(scaled)
                self._slow.append(scaled[1])
        self._graphs = PromptGraphs(context)
        self._kept: dict[PassKind, list[Segment]] = {}  # the one used last at the end
        modules = (module for one in branches for module in one.branch.modules)
        ropes = (getattr(module, "rope", None) for module in modules)
        by_context = {
            id(rope): rope for rope in ropes if rope is not None and rope.long is not None
        }
        self._ropes = list(by_context.values())  # those that depend on the context
        copies = any(map(copies_experts, executors))
        # Pieces of `ubatch` tokens that go through each layer one after the other.
        self.most_together = (
            most_pieces(network.width, context.ubatch) if copies and fits(network) else 1
        )
        self._table = self._part(
            "Embedding", lambda: packed(network.embedding, context, uneven=True)
        )
        self._output = self._part("Output", lambda: PromptOutput(network.output, context))
        inputs = network.inputs
        self._inputs = (
            self._part("LayerInputs", lambda: PromptLayerInputs(inputs, context))
            if isinstance(inputs, LayerInputs)
            else None
        )

    def _step(self, branch: PlacedBranch, executor: Any | None) -> Stage:
        group = self.context.group
        if executor is None:
            return SlowBranch(branch)
        if branch.is_summed and group is not None:
            return Summed(executor, branch, group, self.context, self.network.width)
        return executor

    def _part(self, kind: str, make: Callable[[], _Made]) -> _Made | None:
        try:
            return make()
        except Slow as reason:
            self.context.report(kind, reason, 0)
            return None

    def run(
        self,
        tokens: torch.Tensor,
        start: int,
        state: State | None = None,
        *,
        last: bool = False,
        final: bool = True,
    ) -> torch.Tensor:
        """The residual stream float32[S * n, width] after all blocks, of tokens int64[S, n] at
        positions start.. ; with a `state` (then S = 1) they see what is in it, and their keys and
        values are written into it (`n_past` is the caller's to move). `last`: float32[S, width],
        the last row of each sequence; others are computed as far as these need them. final: whether
        the result is used, see `Network.hidden`. Valid until the next pass.
        """
        with torch.cuda.device(self.context.device):  # kernels are launched on the current device
            stage = self.network.stage
            if stage is None:
                return self._run(tokens, start, state, last)[0]
            # The next rank needs all rows.
            h, batch = self._run(tokens, start, state, last and stage.is_last)
            rows = len(tokens) if last else tokens.numel()
            return self.network.handed_on(stage, h, rows, batch, final=final)

    def _run(
        self, tokens: torch.Tensor, start: int, state: State | None, last: bool
    ) -> tuple[torch.Tensor, Batch]:
        n_sequences, n_tokens = tokens.shape
        device = self.context.device
        batch = (
            Batch.of(n_sequences, n_tokens, start, device, self.context.settings)
            if state is None
            else Batch.after([state], [n_tokens], device)
        )
        self.context.forget_angles()
        h = self.context.buffer("stream", (tokens.numel(), self.network.width), torch.float32)
        with opened("token_embd", "token_embd"):
            self._embedded(tokens.reshape(-1), h)
        batch = self._prepared(tokens.reshape(-1), h, batch)
        if self.network.stage is not None:
            h = self.network.taken(self.network.stage, h, batch)
        stream = Stream(h, self.context)
        if self.context.taps.fast or self.context.replaced:
            launch(list(self._one_by_one()), stream, batch)
            return stream.settled(), batch
        if recording:  # a graph would run its kernels without names
            launch(self._steps[: self._narrows], stream, batch)
            self._finish(stream, batch, self._steps[self._narrows :], last)
            return stream.settled(), batch
        kind = PassKind.of(batch, self._ropes, last)
        graphs = self._graphs.of(kind)
        if graphs is not None and batch.begins:
            self.context.use_angles(graphs.angles)
        for again, parts in self._segments(kind, batch):
            if again and graphs is not None:
                graphs.run(parts, stream, batch)
            else:
                launch(parts, stream, batch)
        return stream.settled(), batch

    def _prepared(
        self, tokens: torch.Tensor, h: torch.Tensor, batch: Batch, alone: bool = True
    ) -> Batch:
        """Do what `Network.prepared` does. alone: no other rows are under way, so what layers read
        can be where graphs have read it.
        """
        if self._inputs is None or None in self._changed_layers():
            batch = self.network.prepared(tokens, h, batch)
        else:
            batch = replace(batch, inputs=self._inputs(tokens, h))
        if batch.inputs is None or not alone:
            return batch
        by_layer = batch.inputs.transpose(0, 1)
        kept = self.context.buffer("kept inputs of layers", tuple(by_layer.shape), torch.float32)
        return replace(batch, inputs=kept.copy_(by_layer).transpose(0, 1))

    def passes(self, tokens: torch.Tensor) -> list[list[torch.Tensor]]:
        """Return int64[n] in pieces of at most `ubatch`, those together that `run_together` takes
        at a time.
        """
        pieces, n = tokens.split(self.context.ubatch), self.most_together
        if self.context.taps.fast or self.context.replaced:
            n = 1
        return [list(pieces[first : first + n]) for first in range(0, len(pieces), n)]

    def run_together(
        self, pieces: list[torch.Tensor], state: State, *, last: bool
    ) -> list[torch.Tensor]:
        """What `run` returns for each of several pieces that follow each other in a sequence, with
        `last` for the last piece alone.
        """
        device, width, start = self.context.device, self.network.width, state.n_past
        shape = sum(map(len, pieces)), width
        streams = self.context.buffer("streams", shape, torch.float32)
        under_way = []
        with torch.cuda.device(device):
            for tokens, h in zip(pieces, streams.split([len(x) for x in pieces]), strict=True):
                n = len(tokens)
                positions = torch.arange(start, start + n, device=device)
                with opened("token_embd", "token_embd"):
                    self._embedded(tokens, h)
                batch = Batch((n,), (start,), positions, (state,))
                batch = self._prepared(tokens, h, batch, alone=False)
                under_way.append(Piece(Stream(h, self.context), batch))
                start += n
            n_whole = self._narrows if last else len(self._steps)
            run_layers(self._steps[:n_whole], under_way, self.context)
            for piece in under_way:
                self.context.use_angles(piece.angles)
                # Of other pieces than the last, only what the last mixer keeps is needed.
                end = len(self._steps) if piece is under_way[-1] else n_whole + 1
                self._finish(piece.stream, piece.batch, self._steps[n_whole:end], last)
            return [piece.stream.settled() for piece in under_way[-1 if last else 0 :]]

    def _finish(self, stream: Stream, batch: Batch, steps: list[Part], last: bool) -> None:
        """Run the last mixer and what follows it; see `run`."""
        for number, (layer, step) in enumerate(steps):
            stream.narrows = last and number == 0
            step(stream, batch.at(layer, self.context.device))
            if last:
                stream.keep_last(batch.n_sequences)

    def first_states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the first block reads, float32[rows, width], of tokens int64[rows]."""
        with torch.cuda.device(self.context.device), opened("token_embd", "token_embd"):
            shape = tokens.numel(), self.network.width
            h = torch.empty(shape, dtype=torch.float32, device=self.context.device)
            self._embedded(tokens, h)
            return h

    def after_layer(
        self, layer: int, tokens: torch.Tensor, h: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Change h float32[rows, width], which a block reads, to what comes out of it, in the way
        that shows inputs; see `Network.after_layer`.
        """
        device = self.context.device
        with torch.cuda.device(device):
            self.context.forget_angles()
            if self.network.inputs is not None:
                batch = self._prepared(tokens, self.first_states(tokens), batch)
            stream = Stream(h, self.context)
            self.context.showing = True
            try:
                for at, step in self._one_by_one():
                    if at == layer:
                        step(stream, batch.at(layer, device))
            finally:
                self.context.showing = False
            return stream.settled()

    def _one_by_one(self) -> Iterator[Part]:
        """Yield what runs without graphs, while inputs are shown or tensors replaced."""
        changed = self._changed_layers()
        for (layer, step), slow in zip(self._steps, self._slow, strict=True):
            yield layer, slow if layer in changed else step

    def _changed_layers(self) -> set[int | None]:
        """Return the layers of replaced tensors, None for embeddings and output."""
        return {TensorName.parse(name).layer for name in self.context.replaced}

    def _segments(self, kind: PassKind, batch: Batch) -> list[Segment]:
        """Return what runs in a pass. It is kept for the next pass of the kind: the device waits
        while a hundred executors are asked for their stages.
        """
        found = self._kept.pop(kind, None)
        if found is None:
            if len(self._kept) == MOST_KINDS:
                del self._kept[next(iter(self._kept))]
            parts = [
                (again, layer, part)
                for number, (layer, step) in enumerate(self._steps)
                for again, part in self._parts_of(number, step, batch, kind.last)
            ]
            found = [
                (again, [(layer, part) for _, layer, part in run])
                for again, run in groupby(parts, key=itemgetter(0))
            ]
        self._kept[kind] = found
        return found

    def _parts_of(
        self, number: int, step: Stage, batch: Batch, last: bool
    ) -> Sequence[tuple[bool, Stage]]:
        """Return the stages of a step. last: of the last mixer on, only the last row of each
        sequence is needed.
        """
        stages = _stages(step, batch)
        if not last or number != self._narrows:
            return stages
        # In the graph before and the one after, if there are any.
        return [(stages[0][0], _narrow), *stages, (stages[-1][0], _narrowed)]

    def next_logits(self, h: torch.Tensor) -> torch.Tensor:
        """Return float32[vocab] for the last row of the residual stream, by a matrix-vector kernel
        if possible.
        """
        norm, home, h = self.network.output_norm, self.network.output_device, h[-1:]
        matrix = None if self._output is None or home != h.device else self._output.matrix
        if (
            matrix is None
            or not isinstance(norm, RMSNorm)
            or not operands.supported(matrix.type)
            or not operands.fits(matrix, NORM_MATVEC)
        ):
            return self.logits(norm(h.to(home)))[0]
        out = torch.empty(1, matrix.rows, dtype=torch.float32, device=h.device)
        with opened("output", "output"):
            operation(matvec.norm_matvec, h, norm.weight, norm.eps, [matrix], [out])
        return self._whole(out)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[rows, width], normed, to float32[rows, vocab] on `network.output_device`."""
        if self._output is None or None in self._changed_layers():
            return self.network.logits(hidden.to(self.network.output_device))
        hidden = hidden.to(self.context.device)
        self.context.taps.show(self.network.output.observed, hidden)
        with opened("output", "output"):
            logits = self._output(hidden.to(self.context.dtype))
        return self._whole(logits).to(self.network.output_device)

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of all ranks, capped in place."""
        join, cap = self.network.join, self.network.softcap
        logits = logits.div_(cap).tanh_().mul_(cap) if cap else logits
        return logits if join is None else join(logits)

    def _embedded(self, tokens: torch.Tensor, out: torch.Tensor) -> None:
        if self._table is None or None in self._changed_layers():
            out.copy_(self.network.embed(tokens))
            return
        decode_rows(self._table, tokens.to(self.context.device), torch.float32, out=out)
        if self.network.embedding_scale != 1:
            out *= self.network.embedding_scale
