"""Gated delta nets: linear attention whose state does not grow with the sequence."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ...state.cache import CacheSettings
from ...state.layer_state import Storage
from ...state.recurrent import RecurrentState, States, keep, kept
from ...state.table import Table
from ...weights.linear import Linear
from .. import many_rows
from ..batch import Batch
from ..norm import RMSNorm
from ..specs import DeltaNetSpec
from .delta_rule import CHUNK, by_chunks, by_steps

_L2_EPS = 1e-6  # of the norm of queries and keys, as the models were trained with


class DeltaNet:
    """Queries, keys and values through a short causal convolution and the gated delta rule; each
    head is normed, gated by silu(z) or sigmoid(z), and all are joined by `output`.

    Projections: `qkv` gives queries, keys and values of all heads in this order, and `gate` gives
    z; or `qkvz` gives all four of each key head in turn. `beta` and `alpha` give one number for
    each value head; or `ba` gives both of each key head in turn.
    convolution: float32[channels, length], the last column for the current token.
    dt, a: float32[value_heads]; the logarithm of the decay is a * softplus(alpha + dt).
    """

    window = 0

    def __init__(
        self,
        spec: DeltaNetSpec,
        *,
        convolution: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        norm: RMSNorm,
        output: Linear,
        qkv: Linear | None = None,
        gate: Linear | None = None,
        qkvz: Linear | None = None,
        beta: Linear | None = None,
        alpha: Linear | None = None,
        ba: Linear | None = None,
    ):
        self.spec, self.convolution, self.dt, self.a = spec, convolution, dt, a
        self.norm, self.output = norm, output
        self.qkv, self.gate, self.qkvz = qkv, gate, qkvz
        self.beta, self.alpha, self.ba = beta, alpha, ba

    def new_storage(self, n_rows: int, settings: CacheSettings, device: torch.device) -> None:
        """Return None: nothing that is kept belongs to positions."""

    def new_state(
        self, storage: Storage | None, table: Table, device: torch.device
    ) -> RecurrentState:
        s = self.spec
        memory = (s.value_heads, s.key_length, s.value_length)
        return RecurrentState(s.convolution - 1, s.channels, memory, device)

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that a sequence takes, whatever its capacity."""
        s = self.spec
        memory = s.value_heads * s.key_length * s.value_length
        return 4 * ((s.convolution - 1) * s.channels + memory)

    def score_bytes(self, rows: int, keys: int, precision: str) -> int:
        """Return the bytes of queries, keys and values of all value heads, of the products of the
        tokens of a chunk, and of the memory; whatever the number of positions.
        """
        s, chunk = self.spec, min(rows, CHUNK)
        padded = -(-rows // CHUNK) * CHUNK if rows > CHUNK else rows
        heads = 4 * padded * s.value_heads * (6 * s.key_length + 6 * s.value_length)
        # Differences in float64, and four products.
        within = padded * s.value_heads * chunk * (2 * 8 + 4 * 4)
        memory = 3 * 4 * s.value_heads * s.key_length * s.value_length
        return heads + within + memory + 4 * rows * 4 * s.channels

    def flop(self, n_past: int, n: int) -> float:
        """Return the operations of the rule, token by token. The convolution counts as a matrix."""
        s = self.spec
        return 7.0 * n * s.value_heads * s.key_length * s.value_length

    def read_bytes(self, n_past: int, n: int, settings: CacheSettings) -> float:
        """Return the bytes of the state, which every token reads."""
        return float(n * self.state_bytes(0, settings))

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width]; rows as `batch` says."""
        s, rows = self.spec, len(x)
        inputs, z = self._inputs(x)
        beta, decay = self._rates(x)
        mixed = []
        for span, states in batch.recurrent_spans():
            u, b, g = (y[span].unflatten(0, (len(states), -1)) for y in (inputs, beta, decay))
            mixed.append(self._mix(u, b, g, states))
        mixed = [m.flatten(0, 1) for m in mixed]
        y = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        y = self.norm(y).view(rows, s.value_heads * s.value_length)
        if s.sigmoid:
            return self.output(y * z.sigmoid())
        if (found := many_rows.gated_product(self.output, z, y)) is not None:
            return found
        gated = many_rows.gate_silu(z, y)
        return self.output(y * F.silu(z) if gated is None else gated)

    def _inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs of the convolution [rows, channels] and gates [rows, value_heads *
        value_length].
        """
        s = self.spec
        if self.qkvz is not None:
            values = s.value_heads // s.key_heads * s.value_length
            heads = self.qkvz(x).unflatten(1, (s.key_heads, -1))
            *qkv, z = heads.split([s.key_length, s.key_length, values, values], dim=-1)
            return torch.cat([part.flatten(1) for part in qkv], dim=1), z.flatten(1)
        if self.qkv is None or self.gate is None:
            raise TypeError("a delta net needs qkv and gate, or both as one")
        return self.qkv(x), self.gate(x)

    def _rates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the strength of every write to the memory, and the logarithm of the decay before
        it, each [rows, value_heads].
        """
        if self.ba is not None:
            beta, alpha = self.ba(x).unflatten(1, (self.spec.key_heads, -1)).chunk(2, dim=-1)
            beta, alpha = beta.flatten(1), alpha.flatten(1)
        elif self.beta is not None and self.alpha is not None:
            beta, alpha = self.beta(x), self.alpha(x)
        else:
            raise TypeError("a delta net needs beta and alpha, or both as one")
        return beta.sigmoid(), self.a * F.softplus(alpha + self.dt)

    def _mix(
        self,
        inputs: torch.Tensor,
        beta: torch.Tensor,
        decay: torch.Tensor,
        states: States,
    ) -> torch.Tensor:
        """Return [sequences, n, value_heads, value_length] for inputs [sequences, n, channels] that
        follow what `states` keep, and update these.
        """
        s, n = self.spec, inputs.shape[1]
        shape = (s.value_heads, s.key_length, s.value_length)
        before, memory = kept(states, inputs, s.convolution - 1, shape)
        q, k, v = self._heads(convolved_silu(before, inputs, self.convolution))
        found = many_rows.delta_rule(q, k, v, decay, beta, memory, tiled=s.tiled)
        if found is None:
            rule = by_steps if n == 1 else by_chunks
            q, k = self._repeated(q), self._repeated(k)
            found = rule(q, k, v, decay, beta, memory)
        mixed, memory = found
        keep(states, before, inputs, memory)
        return mixed

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys [sequences, n, key_heads, key_length], and values [sequences, n,
        value_heads, value_length].
        """
        s = self.spec
        keys = s.key_heads * s.key_length
        q, k, v = x.split([keys, keys, s.value_heads * s.value_length], dim=-1)
        q, k = (l2_norm(y.unflatten(-1, (s.key_heads, s.key_length))) for y in (q, k))
        q = q * s.key_length**-0.5
        return q, k, v.unflatten(-1, (s.value_heads, s.value_length))

    def _repeated(self, heads: torch.Tensor) -> torch.Tensor:
        """Return queries or keys of all value heads, [sequences, n, value_heads, key_length]."""
        group = self.spec.value_heads // self.spec.key_heads
        if group == 1:
            return heads
        if self.spec.tiled:
            return torch.cat([heads] * group, 2)
        return heads.repeat_interleave(group, dim=2)


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """Return x, float32[..., n], divided by the root of the sum of its squares over the last
    dimension, to which a small number is added.
    """
    found = many_rows.l2_norm(x, _L2_EPS)
    if found is not None:
        return found
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _L2_EPS)


def convolved(before: torch.Tensor, inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the causal convolution of inputs float32[sequences, n, channels] after those before,
    float32[sequences, length - 1, channels]. weights: float32[channels, length], the last column
    for the current token.
    """
    n, inputs = inputs.shape[1], torch.cat([before, inputs], dim=1)
    # A sum of products, as cuDNN's convolution would use TF32.
    found = inputs[:, :n] * weights[:, 0]
    for tap in range(1, weights.shape[1]):
        found += inputs[:, tap : tap + n] * weights[:, tap]
    return found


def convolved_silu(
    before: torch.Tensor,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return SiLU of what `convolved` does, plus a bias float32[channels]."""
    if bias is None:
        found = many_rows.convolve_silu(before, inputs, weights)
        if found is not None:
            return found
    found = convolved(before, inputs, weights)
    return F.silu(found if bias is None else found.add_(bias))
