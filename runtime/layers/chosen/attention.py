"""Softmax attention of which every token sees some blocks of positions."""

from __future__ import annotations

import torch

from ...state.cache import CacheSettings, KVCache, KVStorage
from ...state.latent import LatentCache, LatentStorage, read_keys, settings_of, write_keys
from ...state.layer_state import Storage
from ...state.table import Table
from ..attend import attend, attend_with_scores
from ..attention import Attention
from ..batch import Batch
from ..costs import pairs
from .indexer import BlockIndexer


class BlockAttention:
    """What `attention` gives where tokens see the positions that `indexer` chooses."""

    window = 0

    def __init__(self, attention: Attention, indexer: BlockIndexer):
        self.attention, self.indexer = attention, indexer

    def new_storage(
        self, n_rows: int, settings: CacheSettings, device: torch.device
    ) -> LatentStorage:
        """Return memory for keys and values of `n_rows` positions, and for keys of the indexer."""
        s, length = self.attention.spec, self.indexer.spec.key_length
        index = settings_of(settings)[1]
        return LatentStorage(
            KVStorage(n_rows, s.kv_heads, s.key_length, s.value_length, settings, device),
            KVStorage(n_rows, 1, length, 0, index, device),
        )

    def new_state(self, storage: Storage | None, table: Table, device: torch.device) -> LatentCache:
        """Return what one sequence has in `storage`. TypeError for that of another layer."""
        if not isinstance(storage, LatentStorage):
            raise TypeError("the storage is not one of keys, values and keys of an indexer")
        return LatentCache(storage, table)

    def _index_bytes(self, settings: CacheSettings) -> int:
        length = self.indexer.spec.key_length
        return KVStorage.bytes_per_token(1, length, 0, settings_of(settings)[1])

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that a sequence of `capacity` positions takes."""
        of_keys = self.attention.state_bytes(capacity, settings)
        return of_keys + capacity * self._index_bytes(settings)

    def score_bytes(self, rows: int, keys: int, precision: str) -> int:
        """Return the bytes of scores of attention and of the indexer, and of what a token sees."""
        s = self.indexer.spec
        chosen = rows * (12 * (keys // self.indexer.block) + 2 * keys)
        return self.attention.score_bytes(rows, keys, "f32") + chosen + 8 * keys * s.key_length

    @property
    def _most(self) -> int:
        """The most positions that a token sees."""
        return self.indexer.spec.top_k + self.indexer.block - 1

    def flop(self, n_past: int, n: int) -> float:
        """Return the operations for n tokens after n_past others; the indexer looks at all
        blocks.
        """
        s = self.indexer.spec
        index = 2.0 * s.heads * s.key_length * pairs(n_past, n) / self.indexer.block
        return self.attention.pair_flop * pairs(n_past, n, self._most) + index

    def read_bytes(self, n_past: int, n: int, settings: CacheSettings) -> float:
        """Return the bytes of keys and values that tokens see, and of all keys of the indexer."""
        of_keys = self.attention.state_bytes(1, settings) * pairs(n_past, n, self._most)
        return of_keys + self._index_bytes(settings) * pairs(n_past, n)

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width]; rows as `batch` says."""
        attention, s = self.attention, self.attention.spec
        q, gate, k, v = attention.project(x, batch)
        if k is None or v is None:
            raise TypeError("attention needs keys and values")
        queries, keys = self.indexer.project(x, batch)
        mixed = torch.empty(len(x), s.heads, s.value_length, device=x.device)
        for i, (rows, start) in enumerate(batch.spans()):
            n = rows.stop - rows.start
            cache = self._cache(batch, i, n, x.device)
            first, origin = (0, start) if batch.states is None else (start, 0)
            own, index = (k[rows], v[rows]), keys[rows]
            if cache is not None:  # and read back, whatever call they came in
                cache[0].write(first, *own)
                write_keys(cache[1], first, index)
                own, index = cache[0].read(first + n), read_keys(cache[1], first + n)
            seen = self.indexer.select(queries[rows], index, origin)
            turned = q[rows] if cache is None else cache[0].query(q[rows])
            found = self._attend(turned[None], own[0][None], own[1][None], seen)[0]
            mixed[rows] = found if cache is None else cache[0].result(found)
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        return attention.output(mixed.flatten(1))

    def _cache(
        self, batch: Batch, i: int, n: int, device: torch.device
    ) -> tuple[KVCache, KVCache] | None:
        """Return where keys and values, and keys of the indexer, of sequence i of the batch are:
        in new memory for its n rows where sequences begin here; None if nothing rounds them.
        """
        if batch.states is not None:
            state = batch.kept(batch.states[i])
            if not isinstance(state, LatentCache) or state.index_keys is None:
                raise TypeError(f"layer {batch.layer} keeps no keys of an indexer")
            return state.rows, state.index_keys
        if batch.settings is None:
            return None
        made = LatentCache(self.new_storage(n, batch.settings, device), Table.alone(n))
        return None if made.index_keys is None else (made.rows, made.index_keys)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None
    ) -> torch.Tensor:
        switches, scale = self.attention.switches, self.attention.spec.scale
        if switches.flash_attention:
            return attend(q, k, v, scale, mask=seen)
        return attend_with_scores(q, k, v, scale, switches.attention_buffer, mask=seen)
