"""Causal softmax attention with grouped key/value heads."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..linear import Linear
from ..state.cache import CacheSettings, KVCache
from ..switches import Switches
from .batch import Batch
from .norm import RMSNorm
from .rope import Rope


class Attention:
    """softmax(scale * Q K^T + causal mask) V, heads joined in head order and projected by `output`.

    Query head h reads key/value head h // (heads / kv_heads). `q_norm` and `k_norm` act on each
    head, before the rotation.
    """

    def __init__(
        self,
        q: Linear,
        k: Linear,
        v: Linear,
        output: Linear,
        *,
        n_heads: int,
        n_kv_heads: int,
        key_length: int,
        value_length: int,
        rope: Rope,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        switches: Switches = Switches(),
    ):
        self.q, self.k, self.v, self.output = q, k, v, output
        self.n_heads, self.n_kv_heads, self.key_length, self.value_length = (
            n_heads,
            n_kv_heads,
            key_length,
            value_length,
        )
        self.rope, self.q_norm, self.k_norm, self.scale = rope, q_norm, k_norm, key_length**-0.5
        self.switches = switches

    def new_state(self, capacity: int, settings: CacheSettings, device: torch.device) -> KVCache:
        """An empty cache for one sequence of at most `capacity` tokens."""
        return KVCache(
            capacity, self.n_kv_heads, self.key_length, self.value_length, settings, device
        )

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that `new_state` takes."""
        return capacity * KVCache.bytes_per_token(
            self.n_kv_heads, self.key_length, self.value_length, settings
        )

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width]; rows as `batch` says."""
        rows, cache = (batch.n_sequences, batch.n_tokens), batch.state
        q = self.q(x).view(*rows, self.n_heads, self.key_length)
        k = self.k(x).view(*rows, self.n_kv_heads, self.key_length)
        v = self.v(x).view(*rows, self.n_kv_heads, self.value_length)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        angles = self.rope.angles(batch.positions)
        q, k = self.rope(q, angles), self.rope(k, angles)
        if cache is not None:
            # These tokens are read back as well: what a token sees must not depend on which call it
            # came in.
            cache.write(batch.start, k[0], v[0])
            q, (k, v) = cache.query(q), cache.read(batch.start + batch.n_tokens)
            k, v = k[None], v[None]
        elif batch.settings is not None:
            # Rows are stored one by one, of whatever sequence they are.
            cache = self.new_state(len(x), batch.settings, x.device)
            cache.write(0, k.flatten(0, 1), v.flatten(0, 1))
            q, (k, v) = cache.query(q), cache.read(len(x))
            k, v = k.unflatten(0, rows), v.unflatten(0, rows)
        mixed = (
            attend(q, k, v, self.scale)
            if self.switches.flash_attention
            else (attend_with_scores(q, k, v, self.scale, self.switches.attention_buffer))
        )
        if cache is not None:
            mixed = cache.result(mixed)
        return self.output(mixed.reshape(len(x), self.n_heads * self.value_length))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """float32[sequences, n, heads, value_length] for the last n of N positions: q [sequences, n,
    heads, key_length], k and v [sequences, N, kv_heads, ...].
    """
    n, total = q.shape[1], k.shape[1]
    # A single query sees everything there is. `is_causal` would line up the first query with the
    # first key.
    mask = (
        None
        if n in (1, total)
        else torch.ones(n, total, dtype=torch.bool, device=q.device).tril(total - n)
    )
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=1 < n == total,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return mixed.transpose(1, 2)


def attend_with_scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, most_mib: int = 0
) -> torch.Tensor:
    """Attend as `attend` does, with the matrix of scores in memory: of all heads, or of as many at
    a time as fit `most_mib` MiB (at least one).
    """
    n, total, n_heads, group = q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2]
    step = (
        n_heads
        if most_mib == 0
        else max(1, min(n_heads, (most_mib << 20) // (4 * q.shape[0] * n * total)))
    )
    hidden = torch.ones(n, total, dtype=torch.bool, device=q.device).triu(total - n + 1)
    mixed = q.new_empty(*q.shape[:3], v.shape[-1])
    for first in range(0, n_heads, step):
        heads = torch.arange(first, min(first + step, n_heads), device=q.device)
        keys, values = (x[:, :, heads // group].transpose(1, 2) for x in (k, v))
        scores = (q[:, :, heads].transpose(1, 2) * scale) @ keys.transpose(-1, -2)
        mixed[:, :, heads] = (
            scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1) @ values
        ).transpose(1, 2)
    return mixed
