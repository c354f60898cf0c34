"""What a sequence carries from call to call: keys and values of attention layers, and whatever else
other mixers keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from ...errors import ShapeError, UsageError, printable
from .cache_types import BLOCK, CACHE_TYPES, CacheType
from .hadamard import hadamard, hadamard_block

PADDING = 256  # capacities are multiples of this, so that kernels may read whole tiles


@dataclass(frozen=True)
class CacheSettings:
    """Storage types of keys and values (names in any case), and whether quantized ones are turned
    by a Hadamard matrix first.

    UsageError for a type that a cache cannot have. Hadamard on a type that is not quantized changes
    nothing, as in the reference.
    """

    type_k: str = "f16"
    type_v: str = "f16"
    hadamard_k: bool = False
    hadamard_v: bool = False

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


class LayerState(Protocol):
    """What one layer keeps of a sequence."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        ...

    def clear(self) -> None:
        """Forget everything: the next token is the first one."""
        ...


class KVCache:
    """Keys and values of one attention layer and one sequence.

    `k`, `v`: [capacity, n_kv_heads, head size] in the type's own dtype, or uint8[capacity,
    n_kv_heads, row_bytes] of a quantized type. Keys are stored after norm and rotation, and after
    the Hadamard transform in blocks of `hadamard_k` where that is not 0; values after that in
    blocks of `hadamard_v`. Rows from the number of tokens on are zero or left over.
    """

    def __init__(
        self,
        capacity: int,
        n_kv_heads: int,
        key_length: int,
        value_length: int,
        settings: CacheSettings,
        device: torch.device,
    ):
        self.capacity, self.key_length, self.value_length, self.settings = (
            capacity,
            key_length,
            value_length,
            settings,
        )
        self.type_k, self.type_v = settings.k, settings.v
        self.hadamard_k = (
            hadamard_block(key_length) if settings.hadamard_k and self.type_k.is_quantized else 0
        )
        self.hadamard_v = (
            hadamard_block(value_length) if settings.hadamard_v and self.type_v.is_quantized else 0
        )
        if self.type_k.name == "Q8_KV" and torch.device(device).type != "cpu":
            raise UsageError(
                f"cache type 'q8_kv' is for layers on the CPU; on {device} q8_0 takes its place"
            )
        self.k = _storage(self.type_k, capacity, n_kv_heads, key_length, device)
        self.v = _storage(self.type_v, capacity, n_kv_heads, value_length, device)

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

    def write(self, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k float32[n, n_kv_heads, key_length] and v float32[n, n_kv_heads, value_length] at
        positions from `start`.
        """
        stop = start + len(k)
        if stop > self.capacity:
            raise ShapeError(
                f"positions {start} to {stop - 1} do not fit a cache for {self.capacity} tokens"
            )
        if self.hadamard_k:
            k = hadamard(k, self.hadamard_k)
        if self.hadamard_v:
            v = hadamard(v, self.hadamard_v)
        for type, storage, x in ((self.type_k, self.k, k), (self.type_v, self.v, v)):
            storage[start:stop] = x if type.encode is None else type.encode(x)

    def read(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first n positions, float32[n, n_kv_heads, head size], as stored:
        see `query` and `result`.
        """
        return _decoded(self.type_k, self.k[:n]), _decoded(self.type_v, self.v[:n])

    def clear(self) -> None:
        """Nothing to do: new tokens overwrite the rows."""

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [..., key_length] turned as the stored keys are, so that products stay what they
        were.
        """
        return hadamard(q, self.hadamard_k) if self.hadamard_k else q

    def result(self, mixed: torch.Tensor) -> torch.Tensor:
        """Mixtures of stored values [..., value_length] turned back."""
        return hadamard(mixed, self.hadamard_v) if self.hadamard_v else mixed


@dataclass
class State:
    """One sequence: `n_past` tokens of at most `capacity` are in it. `layers[i]` is what mixer i
    made by `new_state`.
    """

    capacity: int
    layers: list[LayerState | None]
    settings: CacheSettings = field(default_factory=CacheSettings)
    n_past: int = 0

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers if layer is not None)

    def clear(self) -> None:
        """Start over with an empty sequence."""
        self.n_past = 0
        for layer in self.layers:
            if layer is not None:
                layer.clear()


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
    return type.row_bytes(n)


def _storage(
    type: CacheType, capacity: int, n_heads: int, n: int, device: torch.device
) -> torch.Tensor:
    return torch.zeros(
        (capacity, n_heads, _row_bytes(type, n) // type.dtype.itemsize),
        dtype=type.dtype,
        device=device,
    )
