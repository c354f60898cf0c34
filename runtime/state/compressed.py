"""What a layer with compressed keys and values keeps of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...errors import UsageError
from .cache import CacheSettings, KVStorage
from .hadamard import hadamard

_LEAST_ROWS = 64  # that memory grows by


@dataclass(frozen=True)
class EntryRows:
    """A kind of entries: their `length`, how many `inputs` a position gives, for how many positions
    an entry is, and whether it is made of the run before as well.
    """

    length: int
    inputs: int
    ratio: int
    overlaps: bool

    @property
    def pending_bytes(self) -> int:
        """Bytes of the inputs that wait, at most."""
        return 4 * self.inputs * self.ratio * (1 + self.overlaps)


@dataclass(frozen=True)
class CompressedStorage:
    """How sequences are kept. They have memory of their own, which grows with them.

    settings: of keys, and of each kind of entries.
    """

    settings: tuple[CacheSettings, ...]
    nbytes: int = 0


class CachedRows:
    """Vectors of `width` elements, one after the other, stored as a cache of keys stores them.
    Memory is not written twice: what `stored` has returned stays as it is.
    """

    def __init__(self, width: int, settings: CacheSettings, device: torch.device):
        self.row_bytes = KVStorage.bytes_per_token(1, width, 0, settings)
        self._type, self._block = settings.k, settings.block_of_keys(width)
        self._columns = self.row_bytes // self._type.dtype.itemsize
        self._device, self.n = device, 0
        self._memory = self._empty(0)

    def _empty(self, n: int) -> torch.Tensor:
        return torch.empty(n, self._columns, dtype=self._type.dtype, device=self._device)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._memory.nbytes

    @property
    def stored(self) -> torch.Tensor:
        """The rows as they are stored."""
        return self._memory[: self.n]

    @stored.setter
    def stored(self, rows: torch.Tensor) -> None:
        """Keep copies of these rows instead. UsageError for those of another type or width."""
        if rows.dtype != self._type.dtype or rows.shape[1:] != (self._columns,):
            raise UsageError(
                f"rows of {list(rows.shape[1:])} {rows.dtype} were saved, expected"
                f" {[self._columns]} {self._type.dtype}"
            )
        self._memory, self.n = rows.to(self._device, copy=True), len(rows)

    def append(self, x: torch.Tensor) -> None:
        """Add rows x, float32[n, width]."""
        if self._block:
            x = hadamard(x, self._block)
        x = x.to(self._type.dtype) if self._type.encode is None else self._type.encode(x)
        if self.n + len(x) > len(self._memory):
            more = max(len(x), self.n // 4, _LEAST_ROWS)
            self._memory = torch.cat([self.stored, self._empty(more)])
        self._memory[self.n : self.n + len(x)] = x
        self.n += len(x)

    def keep_last(self, n: int) -> None:
        """Forget all rows but the last n."""
        if self.n > n:
            self._memory, self.n = self.stored[self.n - n :].clone(), n

    def read(self) -> torch.Tensor:
        """Return all rows, float32[n, width]."""
        rows = self.stored
        x = rows.float() if self._type.decode is None else self._type.decode(rows)
        return hadamard(x, self._block) if self._block else x


class CompressedState:
    """The last `window` keys of a sequence, of `length` elements; entries of some `kinds`; and for
    each of these the inputs of positions whose entries are not complete, float32[n, inputs].
    settings: of keys, and of each kind of entries.
    """

    by_position = False

    def __init__(
        self,
        window: int,
        length: int,
        kinds: Sequence[EntryRows],
        settings: Sequence[CacheSettings],
        device: torch.device,
    ):
        self._window, self._length, self._kinds = window, length, tuple(kinds)
        self._settings, self._device = tuple(settings), device
        self.clear()

    def clear(self) -> None:
        """Set the state to that before the first token."""
        of_keys, *of_entries = self._settings
        self.near = CachedRows(self._length, of_keys, self._device)
        self.entries = [
            CachedRows(kind.length, settings, self._device)
            for kind, settings in zip(self._kinds, of_entries, strict=True)
        ]
        self.pending = [torch.empty(0, kind.inputs, device=self._device) for kind in self._kinds]
        self.n_seen, self._changing = 0, False

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        cached = sum(rows.nbytes for rows in (self.near, *self.entries))
        return cached + sum(rows.nbytes for rows in self.pending)

    def begin_pass(self, start: int, layer: int) -> None:
        """The state will change until `end_pass`. UsageError if the next token is not at position
        `start`, or if a pass was left, as one that failed.
        """
        if self._changing or start != self.n_seen:
            raise UsageError(
                f"the compressed state of layer {layer} has seen {self.n_seen} tokens"
                f"{', or more' * self._changing}, and the next token is at position {start}:"
                " restore a snapshot, or clear the sequence"
            )
        self._changing = True

    def save(self, first: int, stop: int) -> tuple[int | torch.Tensor, ...]:
        """Return the whole state, whatever the positions, in memory that stays as it is."""
        entries = [rows.stored for rows in self.entries]
        return self.n_seen, self.near.stored, *entries, *self.pending

    def load(self, first: int, saved: tuple) -> None:
        """Put back a state that `save` returned. UsageError for one of other sizes."""
        n_kinds = len(self._kinds)
        if len(saved) != 2 + 2 * n_kinds:
            raise UsageError(f"{len(saved)} values were saved, expected {2 + 2 * n_kinds}")
        n_seen, near, *rest = saved
        pending = rest[n_kinds:]
        for rows, kind in zip(pending, self._kinds, strict=True):
            if rows.dtype != torch.float32 or rows.shape[1:] != (kind.inputs,):
                raise UsageError(
                    f"inputs of {list(rows.shape[1:])} {rows.dtype} were saved, expected"
                    f" {[kind.inputs]} torch.float32"
                )
        self.near.stored = near
        for rows, stored in zip(self.entries, rest, strict=False):
            rows.stored = stored
        self.pending = [rows.to(self._device) for rows in pending]
        self.n_seen, self._changing = n_seen, False

    def end_pass(self, n: int) -> None:
        """The pass has added n tokens: forget the keys that no later one sees."""
        self.near.keep_last(self._window)
        self.n_seen, self._changing = self.n_seen + n, False
