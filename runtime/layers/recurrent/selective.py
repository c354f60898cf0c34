"""Selective state spaces of the first Mamba: a memory of every channel."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ...state.cache import CacheSettings
from ...state.layer_state import Storage
from ...state.recurrent import RecurrentState, States, keep, kept
from ...state.table import Table
from ...weights.linear import Linear
from ..batch import Batch
from ..specs import SelectiveSpec
from .delta_net import convolved_silu


class Selective:
    """Channels through a short causal convolution and SiLU, then a recurrence whose steps and
    vectors they choose; results are gated by silu(z) and joined by `output`.

    With u the channels after the convolution, `vectors` of u gives low-rank steps, b and c; the
    steps of channels are dt = softplus(`steps` of the low-rank ones). The memory of a channel,
    float32[state_length], is h = exp(dt a) h + dt u b, and it gives c . h + d u.

    input: gives the channels, then gates z. convolution: float32[channels, length], the last column
    for the current token; its bias float32[channels]. a: float32[channels, state_length], below 0;
    d: float32[channels]. With `eps` in the description, low-rank steps, b and c are divided by
    their root mean square, and multiplied by `norms`, float32[rank] and twice
    float32[state_length], if there are any.
    """

    window = 0

    def __init__(
        self,
        spec: SelectiveSpec,
        *,
        input: Linear,
        convolution: torch.Tensor,
        bias: torch.Tensor | None,
        vectors: Linear,
        steps: Linear,
        a: torch.Tensor,
        d: torch.Tensor,
        output: Linear,
        norms: tuple[torch.Tensor, ...] | None = None,
    ):
        self.norms = norms
        self.spec, self.input, self.output = spec, input, output
        self.convolution, self.bias = convolution, bias
        self.vectors, self.steps, self.a, self.d = vectors, steps, a, d

    def new_storage(self, n_rows: int, settings: CacheSettings, device: torch.device) -> None:
        """Return None: nothing that is kept belongs to positions."""

    def new_state(
        self, storage: Storage | None, table: Table, device: torch.device
    ) -> RecurrentState:
        s = self.spec
        return RecurrentState(s.convolution - 1, s.channels, self._memory, device)

    @property
    def _memory(self) -> tuple[int, int, int]:
        return 1, self.spec.channels, self.spec.state_length

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that a sequence takes, whatever its capacity."""
        s = self.spec
        return 4 * s.channels * (s.convolution - 1 + s.state_length)

    def score_bytes(self, rows: int, keys: int, precision: str) -> int:
        """Return the bytes of channels, gates, steps and results, and of memories and what changes
        them; whatever the number of positions.
        """
        s = self.spec
        return 4 * s.channels * (8 * rows + 4 * s.state_length)

    def flop(self, n_past: int, n: int) -> float:
        """Return the operations of the recurrence. The convolution counts as a matrix."""
        return 7.0 * n * self.spec.channels * self.spec.state_length

    def read_bytes(self, n_past: int, n: int, settings: CacheSettings) -> float:
        """Return the bytes of the state, which every token reads."""
        return float(n * self.state_bytes(0, settings))

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width]; rows as `batch` says."""
        inputs, z = self.input(x).chunk(2, dim=1)
        mixed = [
            self._mix(inputs[span].unflatten(0, (len(states), -1)), states)
            for span, states in batch.recurrent_spans()
        ]
        y = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return self.output(y * F.silu(z))

    def _mix(self, inputs: torch.Tensor, states: States) -> torch.Tensor:
        """Return float32[sequences * n, channels] for inputs [sequences, n, channels] that follow
        what `states` keep, and update these.
        """
        s, n = self.spec, inputs.shape[1]
        before, memory = kept(states, inputs, s.convolution - 1, self._memory)
        u = convolved_silu(before, inputs, self.convolution, self.bias)
        found = self.vectors(u.flatten(0, 1)).split([s.rank, s.state_length, s.state_length], dim=1)
        if s.eps is not None:
            norms = self.norms or (None,) * 3
            found = [
                F.rms_norm(x, x.shape[-1:], norm, s.eps)
                for x, norm in zip(found, norms, strict=True)
            ]
        low, b, c = found
        dt = F.softplus(self.steps(low)).view_as(u)
        b, c = (x.view(len(u), n, 1, s.state_length) for x in (b, c))
        held, out = memory[:, 0], torch.empty_like(u)
        for t in range(n):
            step = dt[:, t, :, None]
            held = torch.exp(step * self.a) * held + (step * u[:, t, :, None]) * b[:, t]
            out[:, t] = (held * c[:, t]).sum(-1)
        keep(states, before, inputs, held[:, None])
        return (out + self.d * u).flatten(0, 1)
