"""State-space layers of Mamba-2: linear attention whose state does not grow with the sequence."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ...state.cache import CacheSettings
from ...state.layer_state import Storage
from ...state.recurrent import RecurrentState, States, keep, kept
from ...state.table import Table
from ...weights.linear import Linear
from ..batch import Batch
from ..specs import StateSpaceSpec
from .delta_net import convolved_silu
from .state_space_rule import CHUNK, by_chunks, by_steps


class StateSpace:
    """Values and the vectors that write and read memories, through a short causal convolution and
    the recurrence of `state_space_rule`; results are gated by silu(z), normed over each group if
    there is a norm, and joined by `output`.

    input: gives gates z, values, the writing vectors of all groups, the reading ones, and a step
    for each head, in this order. convolution: float32[channels, length], the last column for the
    current token; its bias float32[channels]. dt, a, d: float32[heads]; steps are softplus(step +
    dt), the logarithm of the decay is a * step, and d times its values is added to what a head
    reads. norm: float32[groups, inner / groups], the weights of RMS norms of groups, whose epsilon
    is `eps`; None for none.
    """

    window = 0

    def __init__(
        self,
        spec: StateSpaceSpec,
        *,
        input: Linear,
        convolution: torch.Tensor,
        bias: torch.Tensor | None,
        dt: torch.Tensor,
        a: torch.Tensor,
        d: torch.Tensor,
        norm: torch.Tensor | None,
        eps: float,
        output: Linear,
    ):
        self.spec, self.input, self.output = spec, input, output
        self.convolution, self.bias = convolution, bias
        self.dt, self.a, self.d, self.norm, self.eps = dt, a, d, norm, eps

    def new_storage(self, n_rows: int, settings: CacheSettings, device: torch.device) -> None:
        """Return None: nothing that is kept belongs to positions."""

    def new_state(
        self, storage: Storage | None, table: Table, device: torch.device
    ) -> RecurrentState:
        s = self.spec
        return RecurrentState(s.convolution - 1, s.channels, self._memory, device)

    @property
    def _memory(self) -> tuple[int, int, int]:
        s = self.spec
        return s.heads, s.state_length, s.head_length

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that a sequence takes, whatever its capacity."""
        s = self.spec
        return 4 * ((s.convolution - 1) * s.channels + s.inner * s.state_length)

    def score_bytes(self, rows: int, keys: int, precision: str) -> int:
        """Return the bytes of inputs, values, the products of the tokens of a chunk, and what every
        chunk writes; whatever the number of positions.
        """
        s, chunk = self.spec, min(rows, CHUNK)
        padded = -(-rows // chunk) * chunk
        inputs = 4 * rows * (s.inputs + 4 * s.channels)
        # Differences in float64, and three products.
        within = padded * s.heads * chunk * (2 * 8 + 3 * 4)
        memories = 4 * (padded // chunk + 3) * s.inner * s.state_length
        return inputs + within + memories + 4 * padded * 6 * s.inner

    def flop(self, n_past: int, n: int) -> float:
        """Return the operations of the recurrence, token by token. The convolution counts as a
        matrix.
        """
        return 5.0 * n * self.spec.inner * self.spec.state_length

    def read_bytes(self, n_past: int, n: int, settings: CacheSettings) -> float:
        """Return the bytes of the state, which every token reads."""
        return float(n * self.state_bytes(0, settings))

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width]; rows as `batch` says."""
        return self.output(self.mixed(self.input(x), batch))

    def mixed(self, products: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return what `output` reads, float32[rows, inner], for what `input` gives, float32[rows,
        inputs].
        """
        s = self.spec
        z, channels, steps = products.split([s.inner, s.channels, s.heads], dim=1)
        steps = F.softplus(steps + self.dt)
        mixed = []
        for span, states in batch.recurrent_spans():
            u, dt = (y[span].unflatten(0, (len(states), -1)) for y in (channels, steps))
            mixed.append(self._mix(u, dt, states).flatten(0, 1))
        y = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        y = y.flatten(1) * F.silu(z)
        if self.norm is None:
            return y
        y = y.unflatten(1, (s.groups, -1))
        y = F.rms_norm(y, y.shape[-1:], None, self.eps) * self.norm
        return y.flatten(1)

    def _mix(self, inputs: torch.Tensor, dt: torch.Tensor, states: States) -> torch.Tensor:
        """Return [sequences, n, heads, head_length] for inputs [sequences, n, channels] and steps
        [sequences, n, heads] that follow what `states` keep, and update these.
        """
        s, n = self.spec, inputs.shape[1]
        before, memory = kept(states, inputs, s.convolution - 1, self._memory)
        vectors = s.groups * s.state_length
        x, b, c = convolved_silu(before, inputs, self.convolution, self.bias).split(
            [s.inner, vectors, vectors], dim=-1
        )
        x = x.unflatten(-1, (s.heads, s.head_length))
        b, c = (y.unflatten(-1, (s.groups, s.state_length)) for y in (b, c))
        rule = by_steps if n == 1 else by_chunks
        y, memory = rule(x * dt[..., None], b, c, dt * self.a, memory)
        keep(states, before, inputs, memory)
        return y + x * self.d[:, None]
