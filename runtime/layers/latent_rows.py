"""What the tokens of a batch see in a layer with latent attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..state.cache import CacheSettings, KVCache
from ..state.latent import LatentCache, read_keys, settings_of, write_keys
from .batch import Batch
from .indexer import Indexer


@dataclass(eq=False)
class LatentRows:
    """The rows of the batch that are of one sequence, and what the cache holds of it: rows
    float32[total, rope + rank] after a Hadamard transform in blocks of `block` (0: none). seen:
    bool[n, total], which of them a token sees; None: all up to itself.
    """

    span: slice
    rows: torch.Tensor
    block: int
    seen: torch.Tensor | None = None


@dataclass(frozen=True)
class Index:
    """Queries, keys and weights of an indexer for the rows of a batch."""

    indexer: Indexer
    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, indexer: Indexer, x: torch.Tensor, q_latent: torch.Tensor, batch: Batch) -> Index:
        """Return the indexer with its projections of hidden rows x, float32[rows, width], and
        latent queries, float32[rows, rank].
        """
        return cls(indexer, *indexer.project(x, q_latent, batch))

    def seen(self, span: slice, keys: torch.Tensor) -> torch.Tensor | None:
        """Return the positions of `keys` that the tokens of `span` see; None: all up to
        themselves.
        """
        if len(keys) <= self.indexer.spec.top_k:
            return None
        return self.indexer.select(self.q[span], keys, self.weights[span])


def latent_rows(rows: torch.Tensor, index: Index | None, batch: Batch) -> list[LatentRows]:
    """Return what each sequence of a batch sees, for its new rows float32[n, rope + rank]: what its
    cache holds, these tokens included.

    They are read back as well: what a token sees must not depend on which call it came in.
    """
    found, spans = [], batch.spans()
    if batch.states is not None:
        for state, (span, start) in zip(batch.states, spans, strict=True):
            cache, stop = state.layers[batch.layer], start + span.stop - span.start
            if not isinstance(cache, LatentCache):
                raise TypeError(f"layer {batch.layer} keeps no latent vectors")
            write_keys(cache.rows, start, rows[span])
            sequence = LatentRows(span, read_keys(cache.rows, stop), cache.rows.hadamard_k)
            if index is not None and cache.index_keys is not None:
                write_keys(cache.index_keys, start, index.k[span])
                sequence.seen = index.seen(span, read_keys(cache.index_keys, stop))
            found.append(sequence)
        return found
    block, keys = 0, None if index is None else index.k
    if batch.settings is not None:
        stored, of_index = settings_of(batch.settings)
        rows, block = _as_cached(rows, stored)
        keys = None if keys is None else _as_cached(keys, of_index)[0]
    for span, _ in spans:
        sequence = LatentRows(span, rows[span], block)
        if index is not None and keys is not None:
            sequence.seen = index.seen(span, keys[span])
        found.append(sequence)
    return found


def _as_cached(rows: torch.Tensor, settings: CacheSettings) -> tuple[torch.Tensor, int]:
    """Return rows float32[n, width] as a cache returns them, and the block of their Hadamard
    transform.
    """
    cache = KVCache.alone(len(rows), 1, rows.shape[1], 0, settings, rows.device)
    write_keys(cache, 0, rows)
    return read_keys(cache, len(rows)), cache.hadamard_k
