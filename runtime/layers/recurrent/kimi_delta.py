"""Kimi delta attention: delta nets whose decay is per channel."""

from __future__ import annotations

from functools import reduce

import torch
from torch.nn import functional as F

from ...state.cache import CacheSettings
from ...state.layer_state import Storage
from ...state.recurrent import RecurrentState, States, keep, kept
from ...state.table import Table
from ...weights.linear import Linear
from ..batch import Batch
from ..norm import RMSNorm
from ..specs import KimiDeltaSpec
from .delta_net import convolved_silu, l2_norm
from .delta_rule import by_steps
from .kimi_delta_rule import CHUNK, by_chunks


class KimiDelta:
    """Queries, keys and values through short causal convolutions and the rule of
    `kimi_delta_rule`; each head is normed, multiplied by the sigmoid of its gate, and all are
    joined by `output`.

    qkv: the projections of queries, keys and values of all heads. decay, gate: one product, or two
    one after the other, that give a number for each element of all heads. beta: gives one for each
    head. convolution: float32[channels, length], the last column for the current token. dt:
    float32[inner]; a: float32[heads]; the logarithm of the decay is a * softplus(decay(x) + dt), or
    bound * sigmoid(a * (decay(x) + dt)) if `spec` has a bound.
    """

    window = 0

    def __init__(
        self,
        spec: KimiDeltaSpec,
        *,
        qkv: tuple[Linear, Linear, Linear],
        decay: tuple[Linear, ...],
        gate: tuple[Linear, ...],
        beta: Linear,
        convolution: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        norm: RMSNorm,
        output: Linear,
    ):
        self.spec, self.qkv, self.decay, self.gate, self.beta = spec, qkv, decay, gate, beta
        self.convolution, self.dt, self.a = convolution, dt, a
        self.norm, self.output = norm, output

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
        return s.heads, s.length, s.length

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that a sequence takes, whatever its capacity."""
        s = self.spec
        return 4 * ((s.convolution - 1) * s.channels + s.inner * s.length)

    def score_bytes(self, rows: int, keys: int, precision: str) -> int:
        """Return the bytes of inputs and results of all heads, of the products of the pairs of a
        chunk, and of memories; whatever the number of positions.
        """
        s, chunk = self.spec, min(rows, CHUNK)
        padded = -(-rows // chunk) * chunk
        # Differences in float64, their exponentials, and two products.
        within = chunk * chunk * s.inner * (2 * 8 + 3 * 4)
        return 4 * padded * 14 * s.inner + within + 4 * 4 * s.inner * s.length

    def flop(self, n_past: int, n: int) -> float:
        """Return the operations of the rule, token by token. The convolutions count as a matrix."""
        return 7.0 * n * self.spec.inner * self.spec.length

    def read_bytes(self, n_past: int, n: int, settings: CacheSettings) -> float:
        """Return the bytes of the state, which every token reads."""
        return float(n * self.state_bytes(0, settings))

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width]; rows as `batch` says."""
        inputs = torch.cat([product(x) for product in self.qkv], dim=1)
        decay, gate = (reduce(_applied, products, x) for products in (self.decay, self.gate))
        return self.output(self.mixed(inputs, decay, gate, self.beta(x), batch))

    def mixed(
        self,
        inputs: torch.Tensor,
        decay: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """Return what `output` reads, float32[rows, inner], for what the projections give, float32:
        inputs [rows, channels], decay and gate [rows, inner], beta [rows, heads].
        """
        s = self.spec
        decay = (decay + self.dt).unflatten(1, (s.heads, -1))
        if s.bound:
            decay = s.bound * (self.a[:, None] * decay).sigmoid()
        else:
            decay = self.a[:, None] * F.softplus(decay)
        beta, mixed = beta.sigmoid(), []
        for span, states in batch.recurrent_spans():
            u, g, b = (y[span].unflatten(0, (len(states), -1)) for y in (inputs, decay, beta))
            mixed.append(self._mix(u, g, b, states).flatten(0, 1))
        y = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return self.norm(y).flatten(1) * gate.sigmoid()

    def _mix(
        self, inputs: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, states: States
    ) -> torch.Tensor:
        """Return [sequences, n, heads, length] for inputs [sequences, n, channels], the logarithms
        of decays [sequences, n, heads, length] and beta [sequences, n, heads] that follow what
        `states` keep, and update these.
        """
        s, n = self.spec, inputs.shape[1]
        before, memory = kept(states, inputs, s.convolution - 1, self._memory)
        heads = convolved_silu(before, inputs, self.convolution).unflatten(-1, (3, s.heads, -1))
        q, k, v = heads.unbind(2)
        q, k = l2_norm(q) * s.length**-0.5, l2_norm(k)
        rule = by_steps if n == 1 else by_chunks
        y, memory = rule(q, k, v, decay, beta, memory)
        keep(states, before, inputs, memory)
        return y


def _applied(x: torch.Tensor, product: Linear) -> torch.Tensor:
    return product(x)
