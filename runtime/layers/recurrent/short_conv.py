"""Gated short convolutions: what mixes tokens in most layers of LFM2."""

from __future__ import annotations

import torch

from ...state.cache import CacheSettings
from ...state.layer_state import Storage
from ...state.recurrent import RecurrentState, States, keep, kept
from ...state.table import Table
from ...weights.linear import Linear
from ..batch import Batch
from ..specs import ShortConvSpec
from .delta_net import convolved

_NO_MEMORY = (0, 0, 0)


class ShortConv:
    """`inputs` gives b, c and x of all channels, in this order; c * conv(b * x) goes through
    `output`. The convolution is causal and of each channel alone.

    convolution: float32[channels, taps], the last column for the current token; `name` is that of
    its tensor.
    """

    window = 0

    def __init__(
        self,
        spec: ShortConvSpec,
        *,
        inputs: Linear,
        convolution: torch.Tensor,
        name: str,
        output: Linear,
    ):
        self.spec, self.inputs, self.output = spec, inputs, output
        self.convolution, self.name = convolution, name

    def new_storage(self, n_rows: int, settings: CacheSettings, device: torch.device) -> None:
        """Return None: nothing that is kept belongs to positions."""

    def new_state(
        self, storage: Storage | None, table: Table, device: torch.device
    ) -> RecurrentState:
        """Return the state of a new sequence: the last b * x, and no memory besides."""
        s = self.spec
        return RecurrentState(s.taps - 1, s.channels, _NO_MEMORY, device)

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that a sequence takes, whatever its capacity."""
        return 4 * (self.spec.taps - 1) * self.spec.channels

    def score_bytes(self, rows: int, keys: int, precision: str) -> int:
        """Return the bytes of b * x with those before, of products and their sum, and of the
        result; whatever the number of positions.
        """
        return 4 * (4 * rows + self.spec.taps) * self.spec.channels

    def flop(self, n_past: int, n: int) -> float:
        """Return the operations of both gates. The convolution counts as a matrix."""
        return 2.0 * n * self.spec.channels

    def read_bytes(self, n_past: int, n: int, settings: CacheSettings) -> float:
        """Return the bytes of the state, which every token reads."""
        return float(n * self.state_bytes(0, settings))

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width]; rows as `batch` says."""
        b, c, x = self.inputs(x).chunk(3, dim=1)
        gated = b * x
        mixed = [
            self._mix(gated[span].unflatten(0, (len(states), -1)), states)
            for span, states in batch.recurrent_spans()
        ]
        y = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return self.output(c * y)

    def _mix(self, inputs: torch.Tensor, states: States) -> torch.Tensor:
        """Return the convolution float32[sequences * n, channels] of inputs [sequences, n,
        channels] that follow what `states` keep, and update these.
        """
        before, memory = kept(states, inputs, self.spec.taps - 1, _NO_MEMORY)
        keep(states, before, inputs, memory)
        return convolved(before, inputs, self.convolution).flatten(0, 1)
