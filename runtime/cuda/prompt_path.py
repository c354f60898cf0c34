"""Many rows at once: the residual stream in float32, all else in the dtype of the context, weights
decoded when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TypeVar

import torch

from ...cuda_kernels import matvec, ops
from ...cuda_kernels.matvec_plan import NORM_MATVEC
from ..layers.batch import Batch
from ..layers.block import Block
from ..network import Network
from ..state.cache import State
from . import prompt_attention, prompt_ffn, prompt_moe  # noqa: F401, they declare executors
from .context import Context
from .prompt_graphs import PromptGraphs, Stage, Staged
from .prompt_stream import Stream
from .prompt_weights import PromptOutput, packed
from .registry import PROMPT, Branch, Slow, branches, choose

_Made = TypeVar("_Made")


class PromptPath:
    """The executors of a network's branches."""

    def __init__(self, network: Network, context: Context):
        self.network, self.context = network, context
        found = branches(network.blocks)
        if found is None:
            context.report("Block", "not a mixer and a feed-forward layer one after the other", 0)
            steps = [(layer, _Block(block)) for layer, block in enumerate(network.blocks)]
        else:
            steps = [(b.layer, choose(PROMPT, b, context) or _Branch(b)) for b in found]
        self._steps: list[tuple[int, Stage]] = steps
        # The last step in which rows depend on one another.
        self._narrows = max(
            (number for number, branch in enumerate(found or ()) if branch.is_mixer),
            default=len(self._steps) - 1,
        )
        self._graphs = PromptGraphs(context)
        self._table = self._part("Embedding", lambda: packed(network.embedding, context))
        self._output = self._part("Output", lambda: PromptOutput(network.output, context))

    def _part(self, kind: str, make: Callable[[], _Made]) -> _Made | None:
        try:
            return make()
        except Slow as reason:
            self.context.report(kind, str(reason), 0)
            return None

    def run(
        self, tokens: torch.Tensor, start: int, state: State | None = None, *, last: bool = False
    ) -> torch.Tensor:
        """The residual stream float32[S * n, width] after all blocks, of tokens int64[S, n] at
        positions start.. ; with a `state` (then S = 1) they see what is in it, and their keys and
        values are written into it (`n_past` is the caller's to move). `last`: float32[S, width],
        the last row of each sequence; others are computed as far as these need them. Valid until
        the next pass.
        """
        with torch.cuda.device(self.context.device):  # kernels are launched on the current device
            return self._run(tokens, start, state, last)

    def _run(
        self, tokens: torch.Tensor, start: int, state: State | None, last: bool
    ) -> torch.Tensor:
        n_sequences, n_tokens = tokens.shape
        batch = Batch.of(n_sequences, n_tokens, start, self.context.device, self.context.settings)
        self.context.forget_angles()
        h = self.context.buffer(
            "stream", (tokens.numel(), self.network.output_norm.weight.numel()), torch.float32
        )
        self._embedded(tokens.reshape(-1), h)
        stream = Stream(h, self.context)
        graphs = self._graphs.of(len(h))
        for again, group in groupby(self._parts(), key=lambda part: part[0]):
            if again and graphs is not None:
                graphs.run([part for _, _, part in group], stream, batch)
                continue
            for _, layer, part in group:
                part(
                    stream,
                    batch.at(None if state is None else state.layers[layer], self.context.device),
                )
        for number, (layer, step) in enumerate(self._steps[self._narrows :]):
            stream.narrows = last and number == 0
            step(
                stream,
                batch.at(None if state is None else state.layers[layer], self.context.device),
            )
            if last:
                stream.keep_last(batch.n_sequences)
        return stream.settled()

    def _parts(self) -> Iterator[tuple[bool, int, Stage]]:
        """Yield what runs before the last mixer: whether it is the same in every pass of as many
        rows, the layer, what to call.
        """
        for layer, step in self._steps[: self._narrows]:
            if isinstance(step, Staged):
                yield from ((again, layer, part) for again, part in step.stages)
            else:
                yield False, layer, step

    def next_logits(self, h: torch.Tensor) -> torch.Tensor:
        """Return float32[vocab] for the last row of the residual stream, by a matrix-vector kernel
        if possible.
        """
        norm, home, h = self.network.output_norm, self.network.output_device, h[-1:]
        matrix = None if self._output is None or home != h.device else self._output.matrix
        if (
            matrix is None
            or not matvec.supported(matrix.type)
            or not matvec.fits(matrix, NORM_MATVEC)
        ):
            return self.logits(norm(h.to(home)))[0]
        out = torch.empty(1, matrix.rows, dtype=torch.float32, device=h.device)
        matvec.norm_matvec(h, norm.weight, norm.eps, [matrix], [out])
        return out[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[rows, width], normed, to float32[rows, vocab] on `network.output_device`."""
        if self._output is None:
            return self.network.output(hidden)
        return self._output(hidden.to(self.context.device, self.context.dtype)).to(
            self.network.output_device
        )

    def _embedded(self, tokens: torch.Tensor, out: torch.Tensor) -> None:
        if self._table is None:
            out.copy_(self.network.embedding(tokens))
        else:
            ops.decode_rows(self._table, tokens.to(self.context.device), torch.float32, out=out)


class _Block:
    """A block of another kind, on the reference path."""

    def __init__(self, block: Block):
        self.block = block

    def __call__(self, stream: Stream, batch: Batch) -> None:
        h, device = stream.settled(), self.block.device
        h.copy_(self.block(h.to(device), batch.at(batch.state, device)))


class _Branch:
    """h += module(norm(h)) on the reference path, on the device of its norm."""

    def __init__(self, branch: Branch):
        self.branch = branch

    def __call__(self, stream: Stream, batch: Batch) -> None:
        h, norm, module = stream.settled(), self.branch.norm, self.branch.module
        device = norm.weight.device
        x = norm(h.to(device))
        h += (module(x, batch.at(batch.state, device)) if self.branch.is_mixer else module(x)).to(
            h.device
        )
