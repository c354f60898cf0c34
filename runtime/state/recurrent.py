"""The state of a recurrent layer: of fixed size, however many tokens it has seen."""

from __future__ import annotations

import torch

from ...errors import UsageError
from .copies import copy_together


class RecurrentState:
    """What a layer with a short convolution and a recurrent memory keeps of one sequence.

    `inputs` float32[n_inputs, channels] are the last inputs of the convolution, zero before the
    first token; `memory` float32[heads, key_length, value_length]. Both are those after `n_seen`
    tokens, and cannot go back to fewer.
    """

    by_position = False

    def __init__(
        self,
        n_inputs: int,
        channels: int,
        memory: tuple[int, int, int],
        device: torch.device,
    ):
        self.inputs = torch.zeros(n_inputs, channels, device=device)
        self.memory = torch.zeros(memory, device=device)
        self.n_seen = 0

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.inputs.nbytes + self.memory.nbytes

    def check(self, start: int, layer: int) -> None:
        """UsageError if the next token is not at position `start`, as after a pass that failed."""
        if start != self.n_seen:
            raise UsageError(
                f"the recurrent state of layer {layer} has seen {self.n_seen} tokens, and the next"
                f" token is at position {start}: restore a snapshot, or clear the sequence"
            )

    def update(self, n: int, inputs: torch.Tensor, memory: torch.Tensor) -> None:
        """Keep the state after `n` more tokens."""
        copy_together((self.inputs, self.memory), (inputs, memory))
        self.n_seen += n

    def clear(self) -> None:
        """Set the state to that before the first token."""
        self.inputs.zero_()
        self.memory.zero_()
        self.n_seen = 0

    def save(self, first: int, stop: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Return a copy of the state, whatever the positions."""
        return self.n_seen, self.inputs.clone(), self.memory.clone()

    def load(self, first: int, saved: tuple[int, torch.Tensor, torch.Tensor]) -> None:
        """Put back a state that `save` returned."""
        self.n_seen, inputs, memory = saved
        self.inputs.copy_(inputs)
        self.memory.copy_(memory)


States = list[RecurrentState | None]
"""What is kept of each of several sequences; None for one that keeps nothing."""


def kept(
    states: States, inputs: torch.Tensor, n_inputs: int, memory: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last inputs float32[sequences, n_inputs, channels] and memories
    float32[sequences, *memory] of sequences, zeros of one that keeps nothing. inputs: the next
    ones, float32[sequences, n, channels].
    """
    before = inputs.new_zeros(len(states), n_inputs, inputs.shape[2])
    memories = inputs.new_zeros(len(states), *memory)
    for i, state in enumerate(states):
        if state is not None:
            before[i], memories[i] = state.inputs, state.memory
    return before, memories


def keep(states: States, before: torch.Tensor, inputs: torch.Tensor, memory: torch.Tensor) -> None:
    """Let states keep the last of the inputs before and of the new ones, and their memories after
    these. Shapes: see `kept`.
    """
    n, n_kept = inputs.shape[1], before.shape[1]
    last = inputs if n >= n_kept else torch.cat([before, inputs], dim=1)
    last = last[:, last.shape[1] - n_kept :]
    for i, state in enumerate(states):
        if state is not None:
            state.update(n, last[i], memory[i])
