"""Keys and values of attention layers: settings, memory, and the rows of one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import ShapeError, UsageError, printable
from .cache_tiles import TILE, RowLayout, get, put, shape_of
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
        """The type of keys."""
        return CACHE_TYPES[self.type_k.lower()]

    @property
    def v(self) -> CacheType:
        """The type of values."""
        return CACHE_TYPES[self.type_v.lower()]

    def block_of_keys(self, length: int) -> int:
        """Return the block of the Hadamard transform of keys of `length`, 0 for none."""
        return hadamard_block(length) if self.hadamard_k and self.k.is_quantized else 0

    def block_of_values(self, length: int) -> int:
        """Return the block of the Hadamard transform of values of `length`, 0 for none."""
        turns = self.hadamard_v and self.v.is_quantized and length
        return hadamard_block(length) if turns else 0


class KVStorage:
    """Keys and values of one attention layer for `n_rows` positions of any sequences.

    `k`, `v`: [n_rows, n_kv_heads, head size] in the type's own dtype, or bytes of a quantized type,
    arranged as `layout` says. Keys are stored after norm and rotation, and after the Hadamard
    transform in blocks of `hadamard_k` where that is not 0; values after that in blocks of
    `hadamard_v`. Rows that no token has written are zero or left over.

    layout: None stands for tiles on a GPU, and for ggml's blocks elsewhere.
    """

    def __init__(
        self,
        n_rows: int,
        n_kv_heads: int,
        key_length: int,
        value_length: int,
        settings: CacheSettings,
        device: torch.device,
        layout: RowLayout | None = None,
    ):
        on_gpu = device.type == "cuda"
        self.layout = layout or (RowLayout.TILES if on_gpu else RowLayout.BLOCKS)
        self.n_rows, self.key_length, self.value_length, self.settings = (
            n_rows,
            key_length,
            value_length,
            settings,
        )
        self.type_k, self.type_v = settings.k, settings.v
        self.hadamard_k = settings.block_of_keys(key_length)
        self.hadamard_v = settings.block_of_values(value_length)
        self.k = self._memory(self.type_k, n_kv_heads, key_length, device)
        self.v = self._memory(self.type_v, n_kv_heads, value_length, device)

    @staticmethod
    def bytes_per_token(
        n_kv_heads: int, key_length: int, value_length: int, settings: CacheSettings
    ) -> int:
        """Return the bytes of one position in one layer."""
        return n_kv_heads * (
            _row_bytes(settings.k, key_length) + _row_bytes(settings.v, value_length)
        )

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.k.nbytes + self.v.nbytes

    def put(self, rows: slice | torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values [n, n_kv_heads, ...], those of quantized types in ggml's blocks, to
        rows: a slice, or int64[n] on the device.
        """
        for type, memory, x in (self.type_k, self.k, k), (self.type_v, self.v, v):
            put(self._layout(type), type, memory, rows, x.to(memory.dtype))

    def get(self, rows: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `put` has written to rows."""
        k = get(self._layout(self.type_k), self.type_k, self.k, rows)
        return k, get(self._layout(self.type_v), self.type_v, self.v, rows)

    def part(self, run: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory of keys and of values of rows that follow each other. They begin where
        a tile does.
        """
        return self.rows_of(self.type_k, self.k, run), self.rows_of(self.type_v, self.v, run)

    def rows_of(self, type: CacheType, memory: torch.Tensor, run: slice) -> torch.Tensor:
        """Return those rows of `memory`, which is that of keys or of values of this type."""
        if self._layout(type) is RowLayout.TILES:
            run = slice(run.start // TILE, -(-run.stop // TILE))
        return memory[run]

    def _layout(self, type: CacheType) -> RowLayout:
        return self.layout if type.is_quantized else RowLayout.BLOCKS

    def _memory(
        self, type: CacheType, n_heads: int, length: int, device: torch.device
    ) -> torch.Tensor:
        row_bytes = _row_bytes(type, length)
        size = row_bytes // type.dtype.itemsize
        shape = shape_of(self._layout(type), self.n_rows, n_heads, size)
        return torch.zeros(shape, dtype=type.dtype, device=device)


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
        layout: RowLayout | None = None,
    ) -> KVCache:
        """A cache of one sequence with its own memory."""
        storage = KVStorage(
            capacity, n_kv_heads, key_length, value_length, settings, device, layout
        )
        return cls(storage, Table.alone(capacity))

    @property
    def nbytes(self) -> int:
        """Bytes in memory, of all sequences that share the storage."""
        return self.storage.nbytes

    @property
    def is_whole(self) -> bool:
        """Whether positions 0 to `capacity` are rows one after the other for as long as the
        sequence lives, as `k` and `v` need.
        """
        return self.table.run is not None

    @property
    def k(self) -> torch.Tensor:
        """Keys of all positions as they are stored, if `is_whole`: [capacity, n_kv_heads, ...], or
        tiles.
        """
        return self.storage.rows_of(self.type_k, self.storage.k, self._run)

    @property
    def v(self) -> torch.Tensor:
        """Values of all positions as they are stored, if `is_whole`: [capacity, n_kv_heads, ...],
        or tiles.
        """
        return self.storage.rows_of(self.type_v, self.storage.v, self._run)

    @property
    def _run(self) -> slice:
        if self.table.run is None:
            raise ShapeError("the positions of a sequence do not follow each other in memory")
        return self.table.run

    def write(self, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k float32[n, n_kv_heads, key_length] and v float32[n, n_kv_heads, value_length] at
        positions from `start`. ShapeError for positions that the table does not have.
        """
        rows = self._on_device(self.table.rows(start, start + len(k)))
        if self.hadamard_k:
            k = hadamard(k, self.hadamard_k)
        if self.hadamard_v:
            v = hadamard(v, self.hadamard_v)
        k, v = (
            x if type.encode is None else type.encode(x)
            for type, x in ((self.type_k, k), (self.type_v, v))
        )
        self.storage.put(rows, k, v)

    def read(self, stop: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions first..stop, float32[n, n_kv_heads, head size], as stored:
        see `query` and `result`.
        """
        k, v = self.storage.get(self._on_device(self.table.rows(first, stop)))
        return _decoded(self.type_k, k), _decoded(self.type_v, v)

    def _on_device(self, rows: slice | torch.Tensor) -> slice | torch.Tensor:
        return rows if isinstance(rows, slice) else rows.to(self.storage.k.device)

    def clear(self) -> None:
        """Nothing to do: new tokens overwrite the rows."""

    def save(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of rows, those of quantized types in ggml's blocks."""
        k, v = self.storage.get(self._on_device(self.table.rows(first, stop)))
        return k.clone(), v.clone()

    def load(self, first: int, saved: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Put back rows that `save` returned, which can be on another device."""
        rows = self._on_device(self.table.rows(first, first + len(saved[0])))
        k, v = (x.to(self.storage.k.device) for x in saved)
        self.storage.put(rows, k, v)

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
