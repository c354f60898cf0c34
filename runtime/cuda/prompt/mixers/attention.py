"""Attention over many rows: one product for q, k and v, one kernel for norms, rotation and the
cache, flash attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .....cuda_kernels.prompt import attention as prompt_attention
from .....cuda_kernels.prompt import rows as prompt_rows
from ....layers.attention import Attention
from ....layers.batch import Batch
from ....state.cache import KVCache
from ....state.copies import copy_together
from ...common import cached
from ...common.context import Context
from ...common.registry import PROMPT, PlacedBranch, Slow, executor
from ..common.graphs import Stage, Staged, may_hold
from ..common.stream import Stream, check_norm, last_rows
from ..common.weights import Product
from .heads import Heads, Products
from .scores import attend, gated, has_flash

_FLOATS = (torch.float16, torch.bfloat16)
# Most bytes of keys and values in a pass that reads its own from buffers: of more, their copy to
# the cache takes longer than the host's launches.
OWN_BYTES = 2 << 20


class _Results(NamedTuple):
    """Where results of attention go, half[rows, ...], and gates [rows, heads, length or 1]."""

    out: torch.Tensor
    gates: torch.Tensor | None


@executor(PROMPT, Attention)
class PromptAttention(Staged):
    """h += attention(norm(h)). Keys and values in float16, or in the cache's dtype where that is
    bfloat16.

    If only last rows are needed after it, only these have queries; the other rows only have keys
    and values. delta: the buffer of what it adds.
    """

    def __init__(self, branch: PlacedBranch, context: Context, delta: str = "delta"):
        m: Attention = branch.module
        check_norm(branch.branch.norm, context)
        linears = [x for x in ((m.q, m.k, m.v) if m.qkv is None else (m.qkv,)) if x is not None]
        n_rot = 0 if m.rope is None else m.rope.n_rot
        if not (
            prompt_attention.heads_fit(m.spec.key_length, n_rot)
            and prompt_attention.heads_fit(m.spec.value_length, 0)
        ):
            raise Slow(f"heads of {m.spec.key_length} and {m.spec.value_length}")
        if not m.switches.flash_attention:
            raise Slow("-fa off keeps the matrix of scores")
        own = m.spec.kv_from is None
        if own and (
            (m.q_norm is None) != (m.k_norm is None)
            or (m.q_norm is not None and m.k_norm is not None and m.q_norm.eps != m.k_norm.eps)
        ):
            raise Slow("norms of queries and keys differ")
        self.branch, self.norm, self.m, self.context = branch, branch.branch.norm, m, context
        self.qkv = Product("qkv", linears, context)
        n = m.spec.query_rows
        if m.qkv is None:
            self.q = Product("last queries", linears[:1], context)
            self.kv = Product("qkv", linears[1:], context) if own else None
        else:
            self.q = Product("last queries", linears, context, slice(0, n))
            self.kv = Product("qkv", linears, context, slice(n, None))
        self.gate = None if m.gate is None else Product("gates", [m.gate], context, uneven=True)
        self.output = Product(delta, [m.output], context)
        self.heads, self.post_norm = Heads(m, context), branch.post_norm
        self.sinks = None if m.sinks is None else m.sinks.float()

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        again = not (self.branch.is_summed and self.context.defers(self.output.rows))
        own = self._own_type(batch) is not None
        same = own and may_hold(self.context, batch)
        keeps = own and batch.states is not None and self.m.spec.kv_from is None
        store = [(False, self._store)] if keeps else []
        return [(True, self._project), (same, self._mix), *store, (again, self._join)]

    def _own_type(self, batch: Batch) -> torch.dtype | None:
        """Return the type of keys and values in a pass that reads no others than its own, from
        buffers, so that it is the same every time; None where it is not, or where these would be
        more than OWN_BYTES to copy.
        """
        s, states = self.m.spec, batch.states
        if not batch.begins:
            return None
        source = self.branch.layer if s.kv_from is None else s.kv_from
        if (s.kv_shared or s.kv_from is not None) and not self.context.shares(source):
            return None
        if not has_flash(s, self.context.device):  # scores in memory, which graphs would hold
            return None
        if states is None:
            settings = batch.settings
            if settings is None:
                return torch.float16
            return _stored(settings.k.dtype, settings.v.dtype)
        cache = states[0].layers[source]
        if not isinstance(cache, KVCache) or not _reads(cache):
            return None
        n_bytes = batch.n_tokens * s.kv_heads * (s.key_length + s.value_length) * cache.k.itemsize
        return _stored(cache.k.dtype, cache.v.dtype) if n_bytes <= OWN_BYTES else None

    def _project(self, stream: Stream, batch: Batch) -> None:
        x = stream.normed(self.norm)
        if stream.narrows:
            stream.keep_last(batch.n_sequences)
            if self.kv is not None:
                self.kv(x)
            self.q(last_rows(x, batch.n_sequences))
        else:
            self.qkv(x)
        if self.gate is not None:
            self.gate(last_rows(x, batch.n_sequences) if stream.narrows else x)

    def _mix(self, stream: Stream, batch: Batch) -> None:
        """Read the products from their buffers: a graph may have computed them."""
        rows = batch.n_sequences * batch.n_tokens
        if not stream.narrows:
            products = Products(self.qkv.out(rows))
        elif self.kv is None:
            products = Products(self.q.out(len(stream.h)))
        else:
            products = Products(self.kv.out(rows), self.q.out(len(stream.h)))
        gates = self.heads.gates(products)
        if self.gate is not None:
            s, gates = self.m.spec, self.gate.out(len(stream.h))
            gates = gates[:, : s.heads * s.gate_length].unflatten(1, (s.heads, -1))
        out = self._mixed(stream)  # in the dtype of activations, in a buffer that stays
        to, own = _Results(out, gates), self._own_type(batch)
        source = self.m.spec.kv_from
        if own is not None:
            k, v = self._keys_and_values(rows, own)
            if source is None:
                q = self.heads.stored(products, k, v, 0, batch)
            else:  # a layer before, of the same heads, has left them there
                q = self.heads.queries(products.joined, batch, own)
            mixed = self._attend(q, k, v, batch, to)
        elif source is not None:
            mixed = self._borrowed(products, batch, source, to)
        elif batch.states is None:
            mixed = self._fresh(products, batch, to)
        else:
            mixed = self._cached(products, batch, to)
        if mixed is not out:
            prompt_rows.converted(mixed if gates is None else gated(mixed, gates, self.m.spec), out)

    def _store(self, stream: Stream, batch: Batch) -> None:
        """Keep the keys and values of a pass that has read its own."""
        cache, n = batch.state, batch.n_tokens
        own = self._keys_and_values(n, cache.k.dtype)
        copy_together([cache.k[:n], cache.v[:n]], own)

    def _join(self, stream: Stream, batch: Batch) -> None:
        stream.add_product(self.output, self._mixed(stream), self.post_norm)

    def _mixed(self, stream: Stream) -> torch.Tensor:
        return self.context.buffer("mixed", (len(stream.h), self.output.cols), self.context.dtype)

    def _fresh(self, qkv: Products, batch: Batch, to: _Results) -> torch.Tensor:
        """Sequences that begin here and are not kept. Keys and values are what a cache with the
        settings of the batch would return.
        """
        m, total = self.m, len(qkv.joined)
        settings = batch.settings
        dtype = torch.float16 if settings is None else _stored(settings.k.dtype, settings.v.dtype)
        if dtype is None:
            if settings is None:
                raise TypeError("keys and values without settings are float16")
            cache = m.new_cache(total, settings, qkv.joined.device)
            return self._converted(qkv, cache, 0, total, batch)
        k, v = self._keys_and_values(total, dtype)
        q = self.heads.stored(qkv, k, v, 0, batch)
        if m.spec.kv_shared:
            batch.scratch["kv", batch.layer] = k, v, None
        return self._attend(q, k, v, batch, to)

    def _keys_and_values(self, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return buffers for keys and values [rows, kv_heads, length], of layers that share them
        until the last of these has run.
        """
        s = self.m.spec
        source = self.branch.layer if s.kv_from is None else s.kv_from
        owner = f" of layer {source}" if s.kv_shared or s.kv_from is not None else ""
        k, v = (
            self.context.buffer(f"{name}{owner}", (rows, s.kv_heads, length), dtype)
            for name, length in (("keys", s.key_length), ("values", s.value_length))
        )
        return k, v

    def _borrowed(self, qkv: Products, batch: Batch, source: int, to: _Results) -> torch.Tensor:
        """Attention to keys and values that the layer `source` has stored in this pass."""
        cache: KVCache | None
        if batch.states is None:
            k, v, cache = batch.scratch["kv", source]
        else:
            held, n = batch.states[0].layers[source], batch.start + batch.n_tokens
            if not isinstance(held, KVCache):
                raise TypeError(f"layer {source} keeps no keys and values")
            first = self._first_seen(batch.start)
            if _reads(held):
                k, v, cache = held.k[first:n], held.v[first:n], None
            else:
                (k, v), cache = cached.load(held, n, first, self.context), held
        k, v = (x.to(self.context.device) for x in (k, v))
        if k.dtype not in _FLOATS:
            k, v = k.half(), v.half()
        q = self.heads.queries(qkv.joined, batch, k.dtype if cache is None else torch.float32)
        if cache is None:
            return self._attend(q, k, v, batch, to)
        return cache.result(self._attend(cache.query(q).to(k.dtype), k, v, batch).float())

    def _cached(self, qkv: Products, batch: Batch, to: _Results) -> torch.Tensor:
        """Tokens of one sequence after those in its cache, which first stores their keys and
        values.
        """
        cache, n = batch.state, batch.start + batch.n_tokens
        seen = slice(self._first_seen(batch.start), n)
        if not _reads(cache):
            return self._converted(qkv, cache, batch.start, n, batch)
        return self._attend(
            self.heads.stored(qkv, cache.k, cache.v, batch.start, batch),
            cache.k[seen],
            cache.v[seen],
            batch,
            to,
        )

    def _first_seen(self, start: int) -> int:
        """Return the first position that the token at `start` sees."""
        return self.m.spec.first_seen(start)

    def _converted(
        self, qkv: Products, cache: KVCache, first: int, n: int, batch: Batch
    ) -> torch.Tensor:
        """Other caches get what is stored in them from float32; attention reads them in float16."""
        m = self.m
        k, v = (
            torch.empty(len(qkv.joined), m.spec.kv_heads, length, device=qkv.joined.device)
            for length in (m.spec.key_length, m.spec.value_length)
        )
        q = self.heads.stored(qkv, k, v, 0, batch)
        cached.store(cache, first, k, v)
        # Shared ones are kept until later layers have run.
        kept = m.spec.kv_shared and batch.states is None
        k, v = cached.load(cache, n, self._first_seen(first), None if kept else self.context)
        if kept:
            batch.scratch["kv", batch.layer] = k, v, cache
        return cache.result(self._attend(cache.query(q).half(), k, v, batch).float())

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        to: _Results | None = None,
    ) -> torch.Tensor:
        """Return [S, n, heads, length] in the dtype of q, for rows of all sequences; or the buffer
        of `to`, where it is given, with that times its gates.
        """
        q, k, v = (x.unflatten(0, (batch.n_sequences, -1)) for x in (q, k, v))
        first = self._first_seen(batch.start) if self.m.spec.chunked else 0
        return attend(q, k, v, self.m.spec, self.sinks, *(to or ()), first=first)


def sources(branches: Sequence[PlacedBranch], executors: Sequence[object]) -> frozenset[int]:
    """Return the layers whose keys and values others use, if all of these have an executor here."""
    found, others = set(), set()
    for branch, made in zip(branches, executors, strict=True):
        module = branch.branch.module
        if not isinstance(module, Attention):
            continue
        source = branch.layer if module.spec.kv_from is None else module.spec.kv_from
        (found if isinstance(made, PromptAttention) else others).add(source)
    return frozenset(found - others)


def _reads(cache: KVCache) -> bool:
    """Return whether attention can read keys and values of a cache as they are."""
    return cache.is_whole and _stored(cache.k.dtype, cache.v.dtype) is not None


def _stored(k: torch.dtype, v: torch.dtype) -> torch.dtype | None:
    """The dtype in which attention can read a cache as it is."""
    return k if k == v and k in _FLOATS else None
