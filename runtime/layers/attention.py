"""Causal softmax attention with grouped key/value heads."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..linear import Linear
from .batch import Batch
from .norm import RMSNorm
from .rope import Rope


class Attention:
    """softmax(scale * Q K^T + causal mask) V, heads joined in head order and projected by `output`.

    Query head h reads key/value head h // (heads / kv_heads). `q_norm` and `k_norm` act on each head, before the rotation.
    """

    def __init__(self, q: Linear, k: Linear, v: Linear, output: Linear, *, n_heads: int, n_kv_heads: int, key_length: int,
                 value_length: int, rope: Rope, q_norm: RMSNorm | None = None, k_norm: RMSNorm | None = None):
        self.q, self.k, self.v, self.output = q, k, v, output
        self.n_heads, self.n_kv_heads, self.key_length, self.value_length = n_heads, n_kv_heads, key_length, value_length
        self.rope, self.q_norm, self.k_norm, self.scale = rope, q_norm, k_norm, key_length**-0.5

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width]; rows as `batch` says."""
        rows = (batch.n_sequences, batch.n_tokens)
        q = self.q(x).view(*rows, self.n_heads, self.key_length)
        k = self.k(x).view(*rows, self.n_kv_heads, self.key_length)
        v = self.v(x).view(*rows, self.n_kv_heads, self.value_length)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        angles = self.rope.angles(batch.positions)
        q, k = self.rope(q, angles), self.rope(k, angles)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=self.scale,
                                               enable_gqa=self.n_heads != self.n_kv_heads)
        return self.output(mixed.transpose(1, 2).reshape(len(x), self.n_heads * self.value_length))
