"""What layers with recurrent states share over many rows: where their states are, and how their
results are joined.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from ....layers.batch import Batch
from ....state.copies import copy_together
from ....state.recurrent import RecurrentState
from ...common.context import Context
from ...common.registry import PlacedBranch
from ..common.graphs import Stage, Staged
from ..common.stream import Stream, last_rows
from ..common.weights import Product


class PromptRecurrent(Staged):
    """h += output(what is mixed), in a buffer that a graph may have filled. The state of a kept
    sequence is copied to buffers and back, so that graphs can change it; at position 0 it is zero.

    kept: shapes of the last inputs of the convolution and of the memory.
    """

    branch: PlacedBranch
    context: Context
    output: Product
    kept: tuple[tuple[int, ...], tuple[int, ...]]

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        mix: list[tuple[bool, Stage]] = [(True, self._mix)]
        if batch.states is not None:
            load = [] if batch.begins else [(False, self._load)]
            mix = [*load, *mix, (False, self._store)]
        return [(True, self._project), *mix, (self._joins_in_a_graph(), self._join)]

    @abstractmethod
    def _project(self, stream: Stream, batch: Batch) -> None:
        """Compute the first products."""

    @abstractmethod
    def _mix(self, stream: Stream, batch: Batch) -> None:
        """Compute what `_join` reads, and the state after it where one is kept."""

    def _load(self, stream: Stream, batch: Batch) -> None:
        """Bring the state to where `_mix` changes it."""
        state = self._state(batch)
        copy_together(self._held(), (state.inputs, state.memory))

    def _store(self, stream: Stream, batch: Batch) -> None:
        self._state(batch).update(batch.n_tokens, *self._held())

    def _state(self, batch: Batch) -> RecurrentState:
        """Return what is kept of the only sequence, which is at the first of the tokens."""
        state = batch.state
        if not isinstance(state, RecurrentState):
            raise TypeError(f"layer {batch.layer} keeps no recurrent state")
        state.check(batch.start, batch.layer)
        return state

    def _before(self, batch: Batch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the buffers of `_held` with the state before these tokens; None for zeros."""
        return (None, None) if batch.states is None or batch.begins else self._held()

    def _after(self, batch: Batch) -> torch.Tensor | None:
        """Return the buffer for the memory after these tokens; None where no state is kept."""
        return None if batch.states is None else self._held()[1]

    def _keep_last(self, batch: Batch, inputs: torch.Tensor) -> None:
        """Keep the last inputs of the convolution. inputs float32[.., channels]: the last of the
        new ones, taps - 1 or all.
        """
        past = self._held()[0]
        if len(inputs) == len(past):
            past.copy_(inputs)
            return
        if batch.begins:
            past.zero_()
        past.copy_(torch.cat([past[batch.n_tokens :], inputs]))

    def _held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return buffers for the last inputs of the convolution and for the memory."""
        first, second = (
            self.context.buffer(f"{name} of a sequence", shape, torch.float32)
            for name, shape in zip(("inputs", "memory"), self.kept, strict=True)
        )
        return first, second

    def _join(self, stream: Stream, batch: Batch) -> None:
        mixed = self._mixed(stream)
        if stream.narrows:
            stream.keep_last(batch.n_sequences)
            mixed = last_rows(mixed, batch.n_sequences).contiguous()
        stream.add_product(self.output, mixed, self.branch.post_norm)

    def _joins_in_a_graph(self) -> bool:
        """Return whether `_join` can be part of a graph."""
        return not (self.branch.is_summed and self.context.defers(self.output.rows))

    def _mixed(self, stream: Stream) -> torch.Tensor:
        return self.context.buffer("mixed", (len(stream.h), self.output.cols), self.context.dtype)
