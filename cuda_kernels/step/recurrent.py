"""The recurrent state that a decoding step reads and updates."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepState:
    """The state of one sequence in one layer: the last inputs of the convolution float32[taps - 1,
    channels], and the memory of all heads in float32.

    other: a second place for both. Then a step leaves the state before it as it is: with an even
    positions[0] - begun[0] it writes to the second place, with an odd one it reads there and writes
    to the first. positions, begun: int32 on the device.
    """

    inputs: torch.Tensor
    memory: torch.Tensor
    other: tuple[torch.Tensor, torch.Tensor] | None = None
    positions: torch.Tensor | None = None
    begun: torch.Tensor | None = None

    @property
    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        """Return what kernels take, in this order."""
        other = self.other or (None, None)
        return self.inputs, self.memory, *other, self.positions, self.begun
