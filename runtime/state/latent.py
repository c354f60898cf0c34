"""What layers with latent attention keep of a sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .cache import CacheSettings, KVCache, KVStorage
from .cache_tiles import RowLayout
from .table import Table


@dataclass(frozen=True)
class LatentStorage:
    """Memory of one layer for positions of any sequences.

    rows: the rotated key of all heads and the latent vector, as one key and without values.
    index_keys: keys of the indexer, in layers that have one.
    """

    rows: KVStorage
    index_keys: KVStorage | None = None

    @classmethod
    def make(
        cls,
        n_rows: int,
        width: int,
        index_width: int,
        settings: CacheSettings,
        device: torch.device,
    ) -> LatentStorage:
        """Return memory for `n_rows` positions. width: of a key and a latent vector together.
        index_width: of a key of the indexer, 0 for none.
        """
        latent, index = settings_of(settings)
        layout = RowLayout.FIELDS if device.type == "cuda" else RowLayout.BLOCKS
        return cls(
            KVStorage(n_rows, 1, width, 0, latent, device, layout),
            KVStorage(n_rows, 1, index_width, 0, index, device) if index_width else None,
        )

    @staticmethod
    def bytes_per_token(width: int, index_width: int, settings: CacheSettings) -> int:
        """Return the bytes of one position in one layer: a latent row of `width` elements, and one
        of the indexer's `index_width` if that is not 0.
        """
        latent, index = settings_of(settings)
        return KVStorage.bytes_per_token(1, width, 0, latent) + (
            KVStorage.bytes_per_token(1, index_width, 0, index) if index_width else 0
        )

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.rows.nbytes + (0 if self.index_keys is None else self.index_keys.nbytes)


class LatentCache:
    """Rows of one layer and one sequence, where `table` says."""

    by_position = True

    def __init__(self, storage: LatentStorage, table: Table):
        self.storage = storage
        self.rows = KVCache(storage.rows, table)
        self.index_keys = None if storage.index_keys is None else KVCache(storage.index_keys, table)
        self._caches = [c for c in (self.rows, self.index_keys) if c is not None]

    @property
    def nbytes(self) -> int:
        """Bytes in memory, of all sequences that share the storage."""
        return self.storage.nbytes

    def clear(self) -> None:
        """Nothing to do: new tokens overwrite the rows."""

    def save(self, first: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Return what `KVCache.save` returns for each kind of rows."""
        return tuple(x for cache in self._caches for x in cache.save(first, stop))

    def load(self, first: int, saved: tuple[torch.Tensor, ...]) -> None:
        """Put back rows that `save` returned."""
        for i, cache in enumerate(self._caches):
            cache.load(first, (saved[2 * i], saved[2 * i + 1]))


def settings_of(settings: CacheSettings) -> tuple[CacheSettings, CacheSettings]:
    """Return the settings of latent rows and of keys of the indexer.

    Latent rows have the type of keys. The keys of the indexer are not quantized, as small errors
    would change which positions are seen.
    """
    rows = replace(settings, type_v="f16", hadamard_v=False)
    index = rows if not rows.k.is_quantized else replace(rows, type_k="f16", hadamard_k=False)
    return rows, index


def write_keys(cache: KVCache, start: int, keys: torch.Tensor) -> None:
    """Store keys float32[n, width] at positions from `start`."""
    cache.write(start, keys[:, None], keys.new_empty(len(keys), 1, 0))


def read_keys(cache: KVCache, stop: int) -> torch.Tensor:
    """Return the keys of the first `stop` positions as they are stored, float32[stop, width]."""
    return cache.read(stop)[0][:, 0]
