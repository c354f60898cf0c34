"""Keys and values of attention layers, and the contract for whatever else mixers keep of a
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...errors import UsageError, printable
from .cache_types import BLOCK, CACHE_TYPES, CacheType
from .hadamard import hadamard, hadamard_block
from .table import Table

PADDING = 256  # capacities are multiples of this, so that kernels may read whole tiles


@dataclass(frozen=True)
class CacheSettings:
    """Storage types of keys and values (names in any case), and whether quantized ones are turned
    by a Hadamard matrix first.

    swa_full: layers with a sliding window keep all positions, not only their window.

    UsageError for a type that a cache cannot have. Hadamard on a type that is not quantized changes
    nothing, as in the reference.
    """

    type_k: str = "f16"
    type_v: str = "f16"
    hadamard_k: bool = False
    hadamard_v: bool = False
    swa_full: bool = False

    def __post_init__(self):
        for what, name in (("keys", self.type_k), ("values", self.type_v)):
            if name.lower() not in CACHE_TYPES:
                raise UsageError(
                    f"cache type '{printable(name, 40)}' of {what} is not known; known are"
                    f" {', '.join(CACHE_TYPES)}"
                )
        if self.v.name == "Q8_KV":
            raise UsageError("cache type 'q8_kv' is for keys only: its scale covers a whole row")

    @property
    def k(self) -> CacheType:
        return CACHE_TYPES[self.type_k.lower()]

    @property
    def v(self) -> CacheType:
        return CACHE_TYPES[self.type_v.lower()]

    def block_of_keys(self, length: int) -> int:
        """Return the block of the Hadamard transform of keys of `length`, 0 for none."""
        return hadamard_block(length) if self.hadamard_k and self.k.is_quantized else 0


class Storage(Protocol):
    """Memory of one layer for positions of any sequences."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        ...


class LayerState(Protocol):
    """What one layer keeps of a sequence."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        ...

    @property
    def by_position(self) -> bool:
        """Whether later positions can be cut off: True for caches, False for recurrent states."""
        ...

    def clear(self) -> None:
        """Forget everything: the next token is the first one."""
        ...

    def save(self, first: int, stop: int) -> Any:
        """Return a copy of what is kept: of positions first..stop, or of a recurrent state."""
        ...

    def load(self, first: int, saved: Any) -> None:
        """Put back what `save` returned for positions from `first`."""
        ...


class KVStorage:
    """Keys and values of one attention layer for `n_rows` positions of any sequences.

    `k`, `v`: [n_rows, n_kv_heads, head size] in the type's own dtype, or uint8[n_rows, n_kv_heads,
    row_bytes] of a quantized type, on a GPU with its fields together (`CacheType.by_fields`). Keys
    are stored after norm and rotation, and after the Hadamard transform in blocks of `hadamard_k`
    where that is not 0; values after that in blocks of `hadamard_v`. Rows that no token has written
    are zero or left over.

    by_fields: whether fields stand together; None: on a GPU alone.
    """

    def __init__(
        self,
        n_rows: int,
        n_kv_heads: int,
        key_length: int,
        value_length: int,
        settings: CacheSettings,
        device: torch.device,
        by_fields: bool | None = None,
    ):
        self.n_rows, self.key_length, self.value_length, self.settings = (
            n_rows,
            key_length,
            value_length,
            settings,
        )
        self.type_k, self.type_v = settings.k, settings.v
        self.hadamard_k = settings.block_of_keys(key_length)
        self.hadamard_v = (
            hadamard_block(value_length)
            if settings.hadamard_v and self.type_v.is_quantized and value_length
            else 0
        )
        self.k = _rows(self.type_k, n_rows, n_kv_heads, key_length, device)
        self.v = _rows(self.type_v, n_rows, n_kv_heads, value_length, device)
        self.by_fields = device.type == "cuda" if by_fields is None else by_fields

    @staticmethod
    def bytes_per_token(
        n_kv_heads: int, key_length: int, value_length: int, settings: CacheSettings
    ) -> int:
        return n_kv_heads * (
            _row_bytes(settings.k, key_length) + _row_bytes(settings.v, value_length)
        )

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


class KVCache:
    """Keys and values of one attention layer and one sequence: the rows of `storage` that `table`
    says.
    """

    by_position = True

    def __init__(self, storage: KVStorage, table: Table):
        self.storage, self.table, self.capacity = storage, table, table.capacity
        self.key_length, self.value_length = storage.key_length, storage.value_length
        self.settings, self.type_k, self.type_v = storage.settings, storage.type_k, storage.type_v
        self.hadamard_k, self.hadamard_v = storage.hadamard_k, storage.hadamard_v

    @classmethod
    def alone(
        cls,
        capacity: int,
        n_kv_heads: int,
        key_length: int,
        value_length: int,
        settings: CacheSettings,
        device: torch.device,
        by_fields: bool | None = None,
    ) -> KVCache:
        """A cache of one sequence with its own memory."""
        storage = KVStorage(
            capacity, n_kv_heads, key_length, value_length, settings, device, by_fields
        )
        return cls(storage, Table.alone(capacity))

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    @property
    def is_whole(self) -> bool:
        """Whether positions 0 to `capacity` are rows one after the other for as long as the
        sequence lives, as `k` and `v` need.
        """
        return self.table.run is not None

    @property
    def k(self) -> torch.Tensor:
        """Keys of all positions, [capacity, n_kv_heads, ...] as they are stored, if `is_whole`."""
        return self.storage.k[self.table.run]

    @property
    def v(self) -> torch.Tensor:
        """Values of all positions, [capacity, n_kv_heads, ...] as they are stored, if
        `is_whole`.
        """
        return self.storage.v[self.table.run]

    def write(self, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k float32[n, n_kv_heads, key_length] and v float32[n, n_kv_heads, value_length] at
        positions from `start`. ShapeError for positions that the table does not have.
        """
        rows = self._on_device(self.table.rows(start, start + len(k)))
        if self.hadamard_k:
            k = hadamard(k, self.hadamard_k)
        if self.hadamard_v:
            v = hadamard(v, self.hadamard_v)
        for type, storage, x in (
            (self.type_k, self.storage.k, k),
            (self.type_v, self.storage.v, v),
        ):
            encoded = (x if type.encode is None else type.encode(x)).to(storage.dtype)
            storage[rows] = self._as_stored(type, encoded)

    def read(self, stop: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions first..stop, float32[n, n_kv_heads, head size], as stored:
        see `query` and `result`.
        """
        k, v = self._in_blocks(first, stop)
        return _decoded(self.type_k, k), _decoded(self.type_v, v)

    def _as_stored(self, type: CacheType, rows: torch.Tensor) -> torch.Tensor:
        return type.by_fields(rows) if self._is_rearranged(type, rows) else rows

    def _is_rearranged(self, type: CacheType, rows: torch.Tensor) -> bool:
        return self.storage.by_fields and type.is_quantized and rows.shape[-1] > 0

    def _in_blocks(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows of positions, those of quantized types made of blocks."""
        rows, held = self._on_device(self.table.rows(first, stop)), self.storage
        found = (self.type_k, held.k[rows]), (self.type_v, held.v[rows])
        k, v = (type.in_blocks(x) if self._is_rearranged(type, x) else x for type, x in found)
        return k, v

    def _on_device(self, rows: slice | torch.Tensor) -> slice | torch.Tensor:
        return rows if isinstance(rows, slice) else rows.to(self.storage.k.device)

    def clear(self) -> None:
        """Nothing to do: new tokens overwrite the rows."""

    def save(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of rows, those of quantized types made of blocks."""
        k, v = self._in_blocks(first, stop)
        return k.clone(), v.clone()

    def load(self, first: int, saved: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Put back rows that `save` returned, which can be on another device."""
        rows = self._on_device(self.table.rows(first, first + len(saved[0])))
        held, (k, v) = self.storage, (x.to(self.storage.k.device) for x in saved)
        held.k[rows] = self._as_stored(self.type_k, k)
        held.v[rows] = self._as_stored(self.type_v, v)

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [..., key_length] turned as the stored keys are, so that products stay what they
        were.
        """
        return hadamard(q, self.hadamard_k) if self.hadamard_k else q

    def result(self, mixed: torch.Tensor) -> torch.Tensor:
        """Mixtures of stored values [..., value_length] turned back."""
        return hadamard(mixed, self.hadamard_v) if self.hadamard_v else mixed


def _decoded(type: CacheType, stored: torch.Tensor) -> torch.Tensor:
    return stored.float() if type.decode is None else type.decode(stored)


def padded(n_tokens: int) -> int:
    """The capacity that holds `n_tokens`."""
    return -(-n_tokens // PADDING) * PADDING


def _row_bytes(type: CacheType, n: int) -> int:
    if type.is_quantized and n % BLOCK:
        raise UsageError(
            f"cache type '{type.name.lower()}' stores heads in blocks of {BLOCK}, and the head size"
            f" of this model is {n}"
        )
    return type.row_bytes(n) if n else 0


def _rows(type: CacheType, n_rows: int, n_heads: int, n: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(
        (n_rows, n_heads, _row_bytes(type, n) // type.dtype.itemsize),
        dtype=type.dtype,
        device=device,
    )
