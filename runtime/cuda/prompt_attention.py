"""Attention over many rows: one product for q, k and v, one kernel for norms, rotation and the cache, flash attention."""

from __future__ import annotations

import torch

from ...cuda_kernels import prompt
from ..cache import KVCache
from ..layers.attention import Attention
from ..layers.batch import Batch
from .context import Context
from .prompt_stream import Stream
from .prompt_weights import Product
from .registry import PROMPT, Branch, Slow, executor

_FLOATS = (torch.float16, torch.bfloat16)


@executor(PROMPT, Attention)
class PromptAttention:
    """h += attention(norm(h)). Keys and values in float16, or in the cache's dtype where that is bfloat16."""

    def __init__(self, branch: Branch, context: Context):
        m: Attention = branch.module
        if not prompt.norm_fits(len(branch.norm.weight)):
            raise Slow(f"rows of {len(branch.norm.weight)}")
        if m.key_length != m.value_length or m.key_length % 8 or not prompt.heads_fit(m.key_length, m.value_length):
            raise Slow(f"heads of {m.key_length} and {m.value_length}")
        if (m.q_norm is None) != (m.k_norm is None) or (m.q_norm is not None and m.q_norm.eps != m.k_norm.eps):
            raise Slow("norms of queries and keys differ")
        self.norm, self.m, self.context = branch.norm, m, context
        self.qkv = Product("qkv", [m.q, m.k, m.v], context)
        self.output = Product("delta", [m.output], context)

    def __call__(self, stream: Stream, batch: Batch) -> None:
        m, rows = self.m, (batch.n_sequences, batch.n_tokens)
        qkv = self.qkv(stream.normed(self.norm))
        mixed = self._cached(qkv, batch) if batch.state is not None else self._fresh(qkv, rows, batch)
        stream.add(self.output(mixed.reshape(-1, m.n_heads * m.value_length)))

    def _fresh(self, qkv: torch.Tensor, rows: tuple[int, int], batch: Batch) -> torch.Tensor:
        """Sequences that begin here; what they attend to is kept by nobody."""
        m, total = self.m, len(qkv)
        k, v = (self.context.buffer(name, (total, m.n_kv_heads, m.key_length), torch.float16) for name in ("keys", "values"))
        q = self._heads(qkv, k, v, 0, batch)
        return self._attend(*(x.view(*rows, -1, m.key_length) for x in (q, k, v)))

    def _cached(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Tokens behind those of one sequence, whose keys and values are taken in first."""
        m, cache, n = self.m, batch.state, batch.start + batch.n_tokens
        if cache.k.dtype in _FLOATS and cache.k.dtype == cache.v.dtype:
            q = self._heads(qkv, cache.k, cache.v, batch.start, batch)
            return self._attend(q[None], cache.k[None, :n], cache.v[None, :n])
        return self._quantized(qkv, cache, n, batch)

    def _quantized(self, qkv: torch.Tensor, cache: KVCache, n: int, batch: Batch) -> torch.Tensor:
        """Other caches are written and read as the truth path does; attention reads what they decode to in float16."""
        m = self.m
        k, v = (torch.empty(batch.n_tokens, m.n_kv_heads, m.key_length, device=qkv.device) for _ in range(2))
        q = self._heads(qkv, k, v, 0, batch)
        cache.write(batch.start, k, v)
        k, v = (x.half()[None] for x in cache.read(n))
        return cache.result(self._attend(cache.query(q).half()[None], k, v).float()).to(self.context.dtype)

    def _heads(self, qkv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, batch: Batch) -> torch.Tensor:
        """Queries [T, heads, key_length] in the dtype of k; keys and values go to k and v from row `first`."""
        m = self.m
        q = self.context.buffer("queries", (len(qkv), m.n_heads, m.key_length), k.dtype)
        cos, sin = self.context.angles(m.rope, batch.positions)
        q_norm, k_norm, eps = (m.q_norm.weight, m.k_norm.weight, m.q_norm.eps) if m.q_norm else (None, None, 0.0)
        prompt.rotate_heads(qkv, q, k, v, first, cos, sin, neox=m.rope.style == "neox", q_norm=q_norm, k_norm=k_norm, eps=eps)
        return q

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[S, n, heads, length] in the activations' dtype: the last n of N positions see what lies before them, and themselves.

        FlashAttention-2 as torch has it (Dao, 2023): causal masks end in the lower right corner, grouped heads are read as they are.
        """
        mixed = torch.ops.aten._flash_attention_forward(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False, scale=self.m.scale)[0]
        return mixed.to(self.context.dtype)
