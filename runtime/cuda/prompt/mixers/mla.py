"""Latent attention over many rows, in the naive form: keys and values of all heads are computed
from the latent vectors of the cache. Few rows after many (`is_absorbed`), to chosen positions,
and while observers read the inputs of `attn_k_b` and `attn_v_b`, which the absorbed form alone has,
attend in the absorbed form.
"""

from __future__ import annotations

import torch

from .....cuda_kernels.attention import mla_shape
from .....cuda_kernels.attention.shape import shared_limit
from .....cuda_kernels.prompt import flash as prompt_flash
from .....cuda_kernels.prompt import flash_plan
from .....cuda_kernels.prompt import mla as prompt_mla
from ....layers.batch import Batch
from ....layers.latent import PerHead
from ....layers.mla import MLA
from ....state.cache import KVCache
from ....state.hadamard import hadamard
from ....state.latent import LatentCache, read_keys, settings_of
from ...common import cached
from ...common.context import Context
from ...common.latent_weights import HeadMatrices
from ...common.registry import PROMPT, Placed, PlacedBranch, Slow, executor
from ..common.graphs import Stage, Staged, may_hold
from ..common.stream import Stream, check_norm, last_rows
from ..common.weights import Product
from .index import PromptIndexer
from .latent_absorbed import AbsorbedRows, attend_shown, is_absorbed
from .scores import attend_in_memory

BUFFER_BYTES = 512 * 2**20  # of keys and values of heads at a time
_MOST_HEAD = 256  # elements, of flash attention
_FLOATS = (torch.float16, torch.bfloat16)


@executor(PROMPT, MLA)
class PromptLatent(Staged):
    """h += attention(norm(h)). Keys and values in float16, or in the cache's dtype where that is
    bfloat16.

    If only last rows are needed after it, only these have queries. If an indexer chooses positions,
    this layer's or that of the last layer with one, a pass in which it leaves some out computes no
    keys and values.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        m: MLA = branch.module
        s = m.spec
        check_norm(branch.norm, context)
        if not m.switches.flash_attention:
            raise Slow("-fa off keeps the matrix of scores")
        self.neox = m.rope.style == "neox"
        if not prompt_mla.fits(s.nope_length, s.rope_length, s.kv_rank, self.neox):
            raise Slow(f"heads of {s.nope_length} and {s.rope_length}, rank {s.kv_rank}")
        if s.value_length > s.key_length or s.value_length % 8:
            raise Slow(f"heads of {s.key_length} and {s.value_length}")
        if (m.q_a is None) != (m.q_norm is None):
            raise Slow("latent vectors of queries without a norm")
        for norm in (m.kv_norm, m.q_norm):
            if norm is not None and norm.weight.device != context.device:
                raise Placed(f"a norm of latent vectors is not on {context.device}")
        self.branch, self.norm, self.m, self.context = branch, branch.norm, m, context
        first = m.q if m.q_a is None else m.q_a
        self.both = Product("latent q and kv", [first, m.kv_a], context)
        self.kv = Product("latent q and kv", [m.kv_a], context)
        self.first = Product("latent q", [first], context)
        self.q = None if m.q_a is None else Product("queries of latent", [m.q], context)
        self.matrices = HeadMatrices(m, context)
        self.index = None if m.indexer is None else PromptIndexer(m.indexer, context)
        if self.index is not None and self.q is None:
            raise Slow("an indexer without latent vectors of queries")
        self.absorbed = AbsorbedRows(m, context)
        if m.top_k and not mla_shape.fits(
            self.absorbed.shape("F16", 1), shared_limit(context.device)
        ):
            raise Slow(f"latent vectors of {s.kv_rank} of chosen positions")
        self.gate = None if m.gate is None else Product("gates", [m.gate], context, uneven=True)
        self.output = Product("delta", [m.output], context)
        self.post_norm = branch.post_norm

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        again = not (self.branch.is_summed and self.context.defers(self.output.rows))
        own = self._own_type(batch) is not None
        same = own and may_hold(self.context, batch)
        store = [(False, self._store)] if own and batch.states is not None else []
        return [(True, self._project), (same, self._mix), *store, (again, self._join)]

    def _own_type(self, batch: Batch) -> torch.dtype | None:
        """Return the type of latent vectors in a pass that reads no others than its own, from a
        buffer, so that it is the same every time; None where it is not.
        """
        s, top_k = self.m.spec, self.m.top_k
        if not batch.begins or self.context.shows or (top_k and batch.n_tokens > top_k):
            return None
        if s.key_length > _MOST_HEAD or is_absorbed(batch.n_tokens, batch.n_tokens, s.heads):
            return None
        if batch.states is None:
            dtype = _type_without_cache(batch)
        else:
            held = batch.states[0].layers[self.branch.layer]
            if not isinstance(held, LatentCache) or not held.rows.is_whole:
                return None
            dtype = held.rows.storage.k.dtype
        return dtype if dtype in _FLOATS else None

    def _project(self, stream: Stream, batch: Batch) -> None:
        x = stream.normed(self.norm)
        if stream.narrows:
            stream.keep_last(batch.n_sequences)
            self.kv(x)
            q = self.first(last_rows(x, batch.n_sequences))
        else:
            q = self.both(x)
        if self.gate is not None:
            self.gate(last_rows(x, batch.n_sequences) if stream.narrows else x)
        if self.q is not None and self.m.q_norm is not None:
            shape = (len(q), self.q.cols)
            latent = self.context.buffer("query latent", shape, self.context.dtype)
            norm = self.m.q_norm
            prompt_mla.norm_rows(q[:, : self.q.cols], norm.weight, norm.eps, latent)
            self.q(latent)
            if self.index is not None:
                self.index.project(x, latent, keys_only=self._own_type(batch) is not None)

    def _mix(self, stream: Stream, batch: Batch) -> None:
        """Read the products from their buffers: a graph may have computed them."""
        s, rows = self.m.spec, batch.n_sequences * batch.n_tokens
        if stream.narrows:
            q, kv = self.first.out(len(stream.h)), self.kv.out(rows)
        else:
            both = self.both.out(rows)
            q, kv = both[:, : self.first.rows], both[:, self.first.rows :]
        if self.q is not None:
            q = self.q.out(len(stream.h))
        own = self._own_type(batch)
        if own is not None:
            stored = self._rows(kv, self._latents(rows, own), 0, batch)
            if self.index is not None and batch.states is not None:
                self.index.own_keys(batch, self._angles(batch))
        else:
            stored = self._fresh(kv, batch) if batch.state is None else self._cached(kv, batch)
        heads = self.context.buffer("queries", (len(q), s.heads, s.key_length), dtype=stored.dtype)
        cos, sin, factors = *self._angles(batch), None
        positions = self.context.positions(batch.sequence_positions)
        if stream.narrows:
            cos, sin, positions = cos[-1:], sin[-1:], positions[-1:]
        if s.temperature is not None:
            factors = self.context.temperatures(s.temperature, batch.sequence_positions)
            factors = factors[-len(positions) :]
        prompt_mla.latent_heads(q, cos, sin, factors, heads, self.neox)
        # Where only own rows are read, all of them are seen.
        chosen = self._choose(batch, len(q)) if self.m.top_k and own is None else None
        if chosen is not None:
            w = self.matrices.decoded(stored.dtype, self.context)
            n = batch.n_sequences
            self.absorbed.to_chosen(heads, stored, chosen, positions, n, w, self._mixed(stream))
        elif self._is_absorbed(heads, stored, batch):
            w = self.matrices.decoded(stored.dtype, self.context)
            self.absorbed.to_all(heads, stored, positions, w, self._mixed(stream))
        else:
            self._attend(heads, stored, batch, self._mixed(stream))
        if self.gate is not None:
            mixed = self._mixed(stream)
            gates = self.gate.out(len(mixed))[:, : s.heads]
            mixed.unflatten(1, (s.heads, -1)).mul_(gates.sigmoid()[..., None])

    def _choose(self, batch: Batch, n_queries: int) -> torch.Tensor | None:
        """Return int32[n_queries, top_k], the positions that rows with queries see; None for all
        before them. Layers of a pass without an indexer see those of the last layer that has one.
        """
        if self.index is not None:
            found = self.index(batch, self._angles(batch), n_queries)
            # Layers in turn: other passes use the buffer before the next layer.
            batch.scratch["chosen"] = (
                found.clone() if found is not None and self.context.showing else found
            )
        chosen = batch.scratch["chosen"]
        if chosen is not None and len(chosen) > n_queries:
            return last_rows(chosen, batch.n_sequences).contiguous()
        return chosen

    def _store(self, stream: Stream, batch: Batch) -> None:
        """Keep the latent vectors of a pass that has read its own."""
        cache, n = batch.state.rows, batch.n_tokens
        cache.k[:n, 0].copy_(self._latents(n, cache.storage.k.dtype))
        if self.index is not None:
            self.index.store(batch)

    def _latents(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        return self.context.buffer("latents", (rows, self.m.spec.cache_width), dtype)

    def _join(self, stream: Stream, batch: Batch) -> None:
        stream.add_product(self.output, self._mixed(stream), self.post_norm)

    def _mixed(self, stream: Stream) -> torch.Tensor:
        return self.context.buffer("mixed", (len(stream.h), self.output.cols), self.context.dtype)

    def _angles(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        rope = self.m.rope.of_context(batch.contexts[0])
        return self.context.angles(rope, batch.sequence_positions)

    def _rows(self, kv: torch.Tensor, rows: torch.Tensor, first: int, batch: Batch) -> torch.Tensor:
        norm = self.m.kv_norm
        cos, sin = self._angles(batch)
        prompt_mla.latent_rows(kv, norm.weight, norm.eps, cos, sin, rows, first, self.neox)
        new = rows[first : first + len(kv), self.m.spec.rope_length :]
        self.context.taps.show(self.m.up.latent_inputs, new)
        return rows

    def _fresh(self, kv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return rows of sequences that begin here and are not kept, as a cache with the settings
        of the batch would return them.
        """
        dtype = _type_without_cache(batch)
        if batch.settings is not None and dtype not in _FLOATS:
            settings = settings_of(batch.settings)[0]
            cache = KVCache.alone(len(kv), 1, self.m.spec.cache_width, 0, settings, kv.device)
            return self._converted(kv, cache, 0, len(kv), batch)
        return self._rows(kv, self._latents(len(kv), dtype), 0, batch)

    def _cached(self, kv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Store rows of new tokens, and return those of all tokens of the sequence."""
        cache, n = batch.state.rows, batch.start + batch.n_tokens
        if not cache.is_whole or cache.storage.k.dtype not in _FLOATS:
            return self._converted(kv, cache, batch.start, n, batch)
        return self._rows(kv, cache.k[:, 0], batch.start, batch)[:n]

    def _converted(
        self, kv: torch.Tensor, cache: KVCache, first: int, n: int, batch: Batch
    ) -> torch.Tensor:
        """Other caches get what is stored in them from float32, and are read in float16."""
        width = self.m.spec.cache_width
        rows = torch.empty(len(kv), width, device=kv.device)
        keys = self._rows(kv, rows, 0, batch)[:, None]
        cached.store(cache, first, keys, keys.new_empty(len(keys), 1, 0))
        if cache.hadamard_k:
            return hadamard(read_keys(cache, n), cache.hadamard_k).half()
        return cached.load(cache, n, 0, self.context)[0][:, 0]

    def _is_absorbed(self, q: torch.Tensor, rows: torch.Tensor, batch: Batch) -> bool:
        return (
            batch.state is not None
            and batch.n_sequences == 1
            and not self.context.shows
            and is_absorbed(len(q), len(rows), self.m.spec.heads)
            and self.absorbed.has_kernels(rows.dtype, len(q))
        )

    def _attend(self, q: torch.Tensor, rows: torch.Tensor, batch: Batch, out: torch.Tensor) -> None:
        """Write the results of all heads to out half[rows of q, heads * value length].

        Values are as long as keys for torch's FlashAttention-2 (Dao, 2023); what is beyond their
        own length is arbitrary, and so are the results there.
        """
        s, n_sequences = self.m.spec, batch.n_sequences
        w_k, w_v = self.matrices.decoded(rows.dtype, self.context)
        if self.context.shows and isinstance(self.m.up, PerHead):
            attend_shown(self.m, q, rows, (w_k, w_v), n_sequences, out, self.context)
            return
        latents, per_head = rows[:, s.rope_length :], 4 * len(rows) * s.key_length
        step = max(1, min(s.heads, BUFFER_BYTES // max(1, per_head)))
        by_head = out.view(n_sequences, -1, s.heads, s.value_length)
        queries = q.unflatten(0, (n_sequences, -1))
        self._reserve(n_sequences * batch.contexts[0], rows.dtype)
        for first in range(0, s.heads, step):
            heads = slice(first, min(first + step, s.heads))
            shape = (len(rows), heads.stop - first, s.key_length)
            k = self.context.buffer("keys", shape, rows.dtype)
            own = flash_plan.fits(s.key_length, s.value_length, rows.device)
            v = self.context.buffer(
                "values", (*shape[:2], s.value_length if own else s.key_length), rows.dtype
            )
            c = latents.expand(shape[1], *latents.shape)
            torch.bmm(c, w_k[heads], out=k[..., : s.nope_length].transpose(0, 1))
            torch.bmm(c, w_v[heads].mT, out=v[..., : s.value_length].transpose(0, 1))
            prompt_mla.latent_keys(rows, s.rope_length, k)
            k, v = (x.unflatten(0, (n_sequences, -1)) for x in (k, v))
            part = queries[:, :, heads]
            if own:
                prompt_flash.flash_attention(part, k, v, by_head[:, :, heads], scale=s.scale)
                continue
            if s.key_length > _MOST_HEAD:
                for n in range(n_sequences):
                    values = v[n][..., : s.value_length]
                    by_head[n, :, heads].copy_(attend_in_memory(part[n], k[n], values, s.scale))
                continue
            mixed = torch.ops.aten._flash_attention_forward(
                part,
                k,
                v,
                None,
                None,
                part.shape[1],
                k.shape[1],
                0.0,
                True,
                False,
                scale=s.scale,
            )[0]
            by_head[:, :, heads].copy_(mixed[..., : s.value_length])

    def _reserve(self, positions: int, dtype: torch.dtype) -> None:
        """Let the buffers of keys and values have the size for so many positions now: the memory
        of buffers that grow from pass to pass stays with the allocator.
        """
        most = min(BUFFER_BYTES // 2, 2 * positions * self.m.spec.heads * self.m.spec.key_length)
        for name in ("keys", "values"):
            self.context.buffer(name, (most // dtype.itemsize,), dtype)


def _type_without_cache(batch: Batch) -> torch.dtype:
    """Return the type of latent vectors of sequences that are not kept."""
    return torch.float16 if batch.settings is None else settings_of(batch.settings)[0].k.dtype
