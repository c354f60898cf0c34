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
