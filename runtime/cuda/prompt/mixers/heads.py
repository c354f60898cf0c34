"""Heads of queries, keys and values of attention: norms, rotation, and the cache, in one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .....cuda_kernels.prompt import attention as prompt_attention
from .....cuda_kernels.prompt import rows as prompt_rows
from .....cuda_kernels.prompt.attention import OwnAmong
from ....layers.attention import Attention
from ....layers.batch import Batch
from ...common.context import Context
from ...common.joined_norms import JoinedNorms


class Products(NamedTuple):
    """The products q, k and v, half[T, ...] of all rows; or k and v, and `queries` half[S, ...] of
    the last row of each sequence.
    """

    joined: torch.Tensor
    queries: torch.Tensor | None = None


class Heads:
    """The heads of one layer of attention."""

    def __init__(self, m: Attention, context: Context):
        self.m, self.context = m, context
        self.joined = JoinedNorms.of(m, context.device)

    def gates(self, products: Products) -> torch.Tensor | None:
        """Return the gates half[rows, heads, length] that follow each head of queries."""
        s, rows = self.m.spec, products.joined if products.queries is None else products.queries
        if not s.gated_queries:
            return None
        return rows[:, : s.query_rows].unflatten(1, (s.heads, 2, s.key_length))[:, :, 1]

    def stored(
        self, products: Products, k: torch.Tensor, v: torch.Tensor, first: int, batch: Batch
    ) -> torch.Tensor:
        """Return queries [rows that have them, heads, key_length] in the dtype of k; keys and
        values go to k and v from row `first`.
        """
        if products.queries is not None:
            none = k.new_empty(len(products.joined), 0, self.m.spec.key_length)
            self._rotate(products.joined, none, k, v, first, *self._angles(batch))
            return self.queries(products.queries, batch, k.dtype)
        q = self._buffer(products.joined, k.dtype)
        self._rotate(products.joined, q, k, v, first, *self._angles(batch))
        return self._tempered(q, batch)

    def queries(self, rows: torch.Tensor, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
        """Return the queries of products that have nothing else: of all rows, or of the last one
        of each sequence.
        """
        q, (cos, sin) = self._buffer(rows, dtype), self._angles(batch)
        if len(rows) == batch.n_sequences:
            cos, sin = cos[-1:], sin[-1:]
        none = q.new_empty(len(rows), 0, self.m.spec.key_length)
        self._rotate(rows, q, none, none, 0, cos, sin)
        return self._tempered(q, batch)

    def _buffer(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        shape = len(rows), self.m.spec.heads, self.m.spec.key_length
        return self.context.buffer("queries", shape, dtype)

    def _rotate(
        self,
        products: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        m = self.m
        factors, own = self._over_all(products, q.shape[1] > 0, k.shape[1] > 0)
        prompt_attention.rotate_heads(
            products,
            q,
            k,
            v,
            first,
            cos,
            sin,
            neox=m.rope is not None and m.rope.style == "neox",
            gated=m.spec.gated_queries,
            q_norm=None if m.q_norm is None else m.q_norm.weight,
            k_norm=None if m.k_norm is None else m.k_norm.weight,
            eps=0.0 if m.q_norm is None else m.q_norm.eps,
            value_eps=m.value_eps if m.spec.value_norm else None,
            norms_last=m.spec.norms_last,
            factors=factors,
            own=own,
        )

    def _over_all(
        self, products: torch.Tensor, queries: bool, keys: bool
    ) -> tuple[torch.Tensor | None, OwnAmong | None]:
        """Return the factors of norms over all heads, and which of these heads are those of this
        rank, of products that have queries, keys and values or only one of these. None for norms
        of heads.
        """
        s, joined = self.m.spec, self.joined
        if joined is None:
            return None, None
        of_queries, of_keys = s.query_rows * queries, s.key_rows * keys
        factors = self.context.buffer("factors of norms", (len(products), 2), torch.float32)
        prompt_rows.row_factors(products, of_queries, of_queries, of_keys, joined.eps, factors)
        if s.own is None or joined.own is None:
            return factors, None
        heads = joined.own[0 if queries else s.heads : None if keys else s.heads]
        return factors, OwnAmong(s.own.n_queries * queries, s.own.n_keys * keys, heads)

    def _tempered(self, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self.m.spec.temperature is not None:
            found = self.context.temperatures(self.m.spec.temperature, batch.sequence_positions)
            last = len(q) == batch.n_sequences
            factors = found[-1:] if last else found.repeat(batch.n_sequences)
            q *= factors[:, None, None].to(q.dtype)
        return q

    def _angles(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines float32[n, n_rot / 2] of the positions of each sequence."""
        positions = batch.sequence_positions
        if self.m.rope is None:
            none = torch.empty(len(positions), 0, device=positions.device)
            return none, none
        return self.context.angles(self.m.rope.of_context(batch.contexts[0]), positions)
