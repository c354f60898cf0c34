"""Causal softmax attention with grouped key/value heads."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..state.cache import CacheSettings, KVCache, KVStorage
from ..state.layer_state import Storage
from ..state.table import Table
from ..weights.linear import Linear
from ..weights.switches import Switches
from .attend import attend, attend_with_scores, temperature
from .batch import Batch
from .costs import LooksBack, pairs
from .norm import HeadLayerNorm, RMSNorm, normed_together
from .rope import Rope
from .specs import AttentionSpec


class Attention(LooksBack):
    """softmax(scale * Q K^T + causal mask) V, heads joined in head order and projected by `output`.

    `q_norm` and `k_norm` act on each head, before the rotation or after it, or on all together with
    `joined_norms`. Without `v`, values are what `k` gives, before norm and rotation. `qkv` gives
    all three in one product. `gate` gives gates where queries are not followed by them. `sinks`
    float32[heads].
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        output: Linear,
        q: Linear | None = None,
        k: Linear | None = None,
        v: Linear | None = None,
        qkv: Linear | None = None,
        gate: Linear | None = None,
        rope: Rope | None = None,
        q_norm: RMSNorm | HeadLayerNorm | None = None,
        k_norm: RMSNorm | HeadLayerNorm | None = None,
        value_eps: float = 0.0,
        sinks: torch.Tensor | None = None,
        switches: Switches = Switches(),
    ):
        self.spec, self.q, self.k, self.v, self.qkv, self.output = spec, q, k, v, qkv, output
        self.gate = gate
        self.rope, self.q_norm, self.k_norm, self.value_eps = rope, q_norm, k_norm, value_eps
        self.sinks, self.switches = sinks, switches

    @property
    def window(self) -> int:
        return self.spec.window

    def new_storage(
        self, n_rows: int, settings: CacheSettings, device: torch.device
    ) -> KVStorage | None:
        """Memory for keys and values of `n_rows` positions; None if another layer has them."""
        s = self.spec
        if s.kv_from is not None:
            return None
        return KVStorage(n_rows, s.kv_heads, s.key_length, s.value_length, settings, device)

    def new_state(
        self, storage: Storage | None, table: Table, device: torch.device
    ) -> KVCache | None:
        return None if storage is None else KVCache(storage, table)  # pyright: ignore[reportArgumentType]  see `new_storage`

    def new_cache(self, capacity: int, settings: CacheSettings, device: torch.device) -> KVCache:
        """An empty cache with its own memory."""
        sizes = self.spec.kv_heads, self.spec.key_length, self.spec.value_length
        return KVCache.alone(capacity, *sizes, settings, device)

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that a sequence of `capacity` positions takes."""
        s = self.spec
        if s.kv_from is not None:
            return 0
        return capacity * KVStorage.bytes_per_token(
            s.kv_heads, s.key_length, s.value_length, settings
        )

    def score_bytes(self, rows: int, keys: int, precision: str) -> int:
        """Return the bytes of scores, and of keys and values read from the cache, which the
        reference path repeats for all heads.
        """
        s, size = self.spec, self.spec.key_length + self.spec.value_length
        if precision == "f32":
            return 8 * s.heads * rows * keys + 4 * (s.heads + s.kv_heads) * keys * size
        return 2 * s.kv_heads * keys * size

    @property
    def pair_flop(self) -> float:
        """Return the operations of a score and of adding a value, for all heads."""
        return 2.0 * self.spec.heads * (self.spec.key_length + self.spec.value_length)

    def read_bytes(self, n_past: int, n: int, settings: CacheSettings) -> float:
        """Return the bytes of keys and values, of whatever layer, that n tokens read one by one."""
        s = self.spec
        size = KVStorage.bytes_per_token(s.kv_heads, s.key_length, s.value_length, settings)
        return size * pairs(n_past, n, self.window)

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width]; rows as `batch` says."""
        q, gate, k, v = self.project(x, batch)
        mix = self._fresh if batch.states is None else self._cached
        mixed = mix(q, k, v, batch)
        if gate is not None:
            mixed = mixed * self.spec.opened(gate)
        return self.output(mixed.reshape(len(x), self.spec.heads * self.spec.value_length))

    def project(
        self, x: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Queries [rows, heads, key_length], gates [rows, heads, value_length or 1] or None, keys
        [rows, kv_heads, key_length] and values [rows, kv_heads, value_length], normed and rotated;
        None for keys and values if another layer has them.
        """
        s, rows = self.spec, len(x)
        q, k, v = self._products(x)
        if s.joined_norms:
            of_queries, of_keys = (None, None) if s.own is None else (s.own.queries, s.own.keys)
            q = normed_together(q, self.q_norm, of_queries, s.key_length)
            k = None if k is None else normed_together(k, self.k_norm, of_keys, s.key_length)
        q, gate = q.view(rows, s.heads, -1), None
        if self.gate is not None:
            gate = self.gate(x).view(rows, s.heads, s.gate_length)
        elif s.gate:
            q, gate = q.chunk(2, dim=-1)
        if k is not None:
            k = k.view(rows, s.kv_heads, s.key_length)
            v = k if v is None else v.view(rows, s.kv_heads, s.value_length)
            if s.value_norm:
                v = F.rms_norm(v, (s.value_length,), None, self.value_eps)
        if not (s.norms_last or s.joined_norms):
            q, k = self._normed(q, k)
        if self.rope is not None:
            angles = batch.angles(self.rope)
            q = self.rope(q, angles)
            k = k if k is None else self.rope(k, angles)
        if s.norms_last:
            q, k = self._normed(q, k)
        if s.temperature is not None:
            q = q * temperature(s.temperature, batch.positions)[:, None, None]
        return q, gate, k, v

    def _normed(
        self, q: torch.Tensor, k: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q = q if self.q_norm is None else self.q_norm(q)
        return q, k if k is None or self.k_norm is None else self.k_norm(k)

    def _products(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        s = self.spec
        if self.qkv is not None:
            q, k, v = self.qkv(x).split((s.query_rows, s.key_rows, s.value_rows), dim=-1)
            return q, k, v
        if self.q is None:
            raise TypeError("attention needs a query projection")
        k = None if self.k is None else self.k(x)
        return self.q(x), k, None if self.v is None else self.v(x)

    def _cached(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """Every sequence sees what its cache holds, these tokens included.

        They are read back as well: what a token sees must not depend on which call it came in.
        """
        s, states = self.spec, batch.states or ()
        layer, mixed = batch.layer if s.kv_from is None else s.kv_from, []
        for state, (rows, start) in zip(states, batch.spans(), strict=True):
            cache, stop = state.layers[layer], start + rows.stop - rows.start
            if not isinstance(cache, KVCache):
                raise TypeError(f"layer {layer} keeps no keys and values")
            if k is not None and v is not None:
                cache.write(start, k[rows], v[rows])
            # Keys and values of another layer can be on its device.
            first = s.first_seen(start)
            keys, values = (x.to(q.device)[None] for x in cache.read(stop, first))
            found = self._attend(cache.query(q[rows])[None], keys, values, start, first)
            mixed.append(cache.result(found[0]))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _fresh(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """Sequences begin here, and nothing is kept unless later layers of this pass use it."""
        s, cache = self.spec, None
        if s.kv_from is not None:
            k, v, cache = batch.scratch["kv", s.kv_from]
        elif batch.settings is not None and k is not None and v is not None:
            # Rows are stored one by one, of whatever sequence they are.
            cache = self.new_cache(len(k), batch.settings, k.device)
            cache.write(0, k, v)
            k, v = cache.read(len(k))
        if k is None or v is None:
            raise TypeError("attention needs keys and values")
        if s.kv_shared:
            batch.scratch["kv", batch.layer] = k, v, cache
        k, v = k.to(q), v.to(q)  # of another device, or of the fast path in half precision
        q, mixed = q if cache is None else cache.query(q), []
        for rows, n_sequences, _ in batch.even_spans():
            each_q, each_k, each_v = (x[rows].unflatten(0, (n_sequences, -1)) for x in (q, k, v))
            mixed.append(self._attend(each_q, each_k, each_v, 0, 0))
        found = torch.cat([m.flatten(0, 1) for m in mixed])
        return found if cache is None else cache.result(found)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, first: int
    ) -> torch.Tensor:
        """Queries [sequences, n, ...] of positions from `start` on; keys and values from `first`
        on.
        """
        s, found = self.spec, []
        for at, seen in s.in_chunks(start, start + q.shape[1]):
            rows, keys = slice(at.start - start, at.stop - start), slice(seen - first, None)
            found.append(
                self._attend_from_one(
                    q[:, rows], *(x[:, keys][:, : at.stop - seen] for x in (k, v))
                )
            )
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _attend_from_one(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        s = self.spec
        window = 0 if s.chunked else s.window
        if self.switches.flash_attention and not s.softcap and self.sinks is None:
            return attend(q, k, v, s.scale, window)
        most = 0 if self.switches.flash_attention else self.switches.attention_buffer
        return attend_with_scores(
            q, k, v, s.scale, most, window=window, softcap=s.softcap, sinks=self.sinks
        )
