"""Sequences: what a model keeps of their tokens, and going back in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch

from ...errors import IqforgeError, UsageError
from .cache import CacheSettings
from .layer_state import LayerState
from .table import Table


@dataclass(eq=False)
class Snapshot:
    """A sequence as it was after `n_past` tokens. Belongs to the `State` that made it."""

    n_past: int
    # Layer to (first position, what `LayerState.save` returned).
    _saved: dict[int, tuple[int, Any]]
    _intact: int  # caches still have the first so many positions as they were


@dataclass(eq=False)
class State:
    """One sequence: `n_past` tokens of at most `capacity` are in it. `layers[i]` is what mixer i
    keeps of them (None for nothing), in the rows that one of the `tables`, by window, says.

    context: the tokens that were asked for, of which `capacity` is rounded up. mixers: those of the
    network that it belongs to, the second ones of its `n_layers` after the first. ended: the pool
    has the memory back. A pass calls `reserve` before and `advance` after it.
    """

    capacity: int
    layers: list[LayerState | None]
    settings: CacheSettings
    tables: dict[int, Table]
    windows: list[int]  # of each layer, as in `tables`
    context: int
    mixers: list[Any]
    n_layers: int
    n_past: int = 0
    ended: bool = False
    _snapshots: WeakSet[Snapshot] = field(default_factory=WeakSet)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, shared with the other sequences of the pool."""
        return sum(layer.nbytes for layer in self.layers if layer is not None)

    def reserve(self, n: int) -> None:
        """Take memory for `n` more tokens. ShapeError for more than `capacity`, UsageError if the
        pool has no more, or if the sequence has ended.
        """
        self._check_not_ended()
        for table in self.tables.values():
            table.reserve(self.n_past + n)

    def release_unused(self) -> None:
        """Give back memory that was taken for tokens which did not come."""
        for table in self.tables.values():
            table.truncate(self.n_past)

    def advance(self, n: int) -> None:
        """`n` more tokens are in the sequence. What no later token can see is released."""
        self.n_past += n
        for table in self.tables.values():
            if table.window:
                table.release_unseen(self.n_past)

    def truncate(self, n: int) -> None:
        """Cut the sequence back to its first `n` tokens.

        UsageError if that is not possible: a recurrent state has no earlier positions, and a layer
        with a sliding window keeps only its window. `snapshot` before, and `restore`.
        """
        if n == self.n_past:
            return
        if not 0 <= n < self.n_past:
            raise UsageError(f"a sequence of {self.n_past} tokens cannot be cut to {n}")
        if n == 0:
            self.clear()
            return
        for i, layer in enumerate(self.layers):
            if layer is not None and not layer.by_position:
                raise UsageError(
                    f"layer {i % self.n_layers} has a recurrent state, which cannot go back from"
                    f" token {self.n_past} to {n}: restore a snapshot"
                )
        for window, table in self.tables.items():
            if table.first_kept > table.first_needed(n):
                raise UsageError(
                    f"layers with a window of {window} no longer have what token {n} sees: restore"
                    " a snapshot, or keep all positions (--swa-full)"
                )
        self._keep_for_snapshots(n)
        for table in self.tables.values():
            table.truncate(n)
        self.n_past = n

    def clear(self) -> None:
        """Start over with an empty sequence."""
        self._keep_for_snapshots(0)
        for table in self.tables.values():
            table.truncate(0)
        for layer in self.layers:
            if layer is not None:
                layer.clear()
        self.n_past = 0

    def snapshot(self) -> Snapshot:
        """Remember the sequence as it is now. Recurrent states and windows are copied; positions of
        caches are copied only if `truncate` and later tokens would overwrite them.
        """
        saved: dict[int, tuple[int, Any]] = {}
        for i, layer in enumerate(self.layers):
            if layer is None:
                continue
            table = self.tables[self.windows[i]]
            if not layer.by_position:
                saved[i] = 0, layer.save(0, self.n_past)
            elif table.window:
                first = table.first_needed(self.n_past)
                saved[i] = first, layer.save(first, self.n_past)
        snapshot = Snapshot(self.n_past, saved, self.n_past)
        self._snapshots.add(snapshot)
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Go back, or forward, to where `snapshot` was taken. UsageError for one of another
        sequence.
        """
        self._check_not_ended()
        if snapshot not in self._snapshots:
            raise UsageError("the snapshot is of another sequence")
        n = snapshot.n_past
        overwritten = [
            first
            for i, (first, _) in snapshot._saved.items()
            if not self.tables[self.windows[i]].window and snapshot._intact < n
        ]
        self._keep_for_snapshots(min(n, self.n_past, *overwritten))
        for table in self.tables.values():
            if table.window:
                table.restart(n)
            else:
                table.truncate(n)
                table.reserve(n)
        for i, (first, saved) in list(snapshot._saved.items()):
            layer = self.layers[i]
            if layer is None:
                continue
            layer.load(first, saved)
            if layer.by_position and not self.tables[self.windows[i]].window:
                del snapshot._saved[i]  # the cache has them again
        self.n_past = snapshot._intact = n

    def save(self) -> dict[int, tuple[int, Any]]:
        """Return copies of all that layers keep: layer to (first position, what
        `LayerState.save` returns).
        """
        saved = {}
        for i, layer in enumerate(self.layers):
            if layer is not None:
                table = self.tables[self.windows[i]]
                first = table.first_needed(self.n_past) if table.window else 0
                saved[i] = first, layer.save(first, self.n_past)
        return saved

    def load(self, n: int, saved: dict[int, tuple[int, Any]]) -> None:
        """Fill this sequence, which is empty, with `n` tokens whose layers were saved by `save`,
        also of a sequence with another capacity: layers with a window keep what they need.

        ShapeError for more than `capacity`, UsageError for layers other than those here.
        """
        self._check_not_ended()
        if self.n_past or saved.keys() != {i for i, x in enumerate(self.layers) if x is not None}:
            raise UsageError("the layers are not those of this sequence, or it is not empty")
        for table in self.tables.values():
            if table.window:
                table.restart(n)
            else:
                table.reserve(n)
        for i, (first, values) in saved.items():
            layer, table = self.layers[i], self.tables[self.windows[i]]
            if layer is None:
                continue
            if layer.by_position:
                if {len(rows) for rows in values} != {n - first}:
                    raise UsageError(f"layer {i % self.n_layers} was saved with other positions")
                needed = table.first_needed(n) if table.window else 0
                skipped = max(0, needed - first)
                first, values = first + skipped, tuple(rows[skipped:] for rows in values)
            layer.load(first, values)
        self.n_past = n

    @property
    def can_be_cut(self) -> bool:
        """Whether every length of the past can be gone back to: no layer has a recurrent state or
        keeps only a window.
        """
        by_position = all(layer.by_position for layer in self.layers if layer is not None)
        return by_position and not any(self.windows)

    def _check_not_ended(self) -> None:
        if self.ended:
            raise UsageError("the sequence has ended: its memory was given back to the pool")

    def _keep_for_snapshots(self, n: int) -> None:
        """Positions from `n` on may be overwritten: copy what snapshots need of them."""
        for snapshot in self._snapshots:
            if snapshot._intact <= n:
                continue
            for i, layer in enumerate(self.layers):
                if layer is None or not layer.by_position or self.tables[self.windows[i]].window:
                    continue
                kept = snapshot._saved.get(i)
                stop = snapshot._intact if kept is None else kept[0]
                rows = layer.save(n, stop)
                if kept is not None:
                    rows = tuple(torch.cat([a, b]) for a, b in zip(rows, kept[1], strict=True))
                snapshot._saved[i] = n, rows
            snapshot._intact = n


def reserve(states: Sequence[State], lengths: Sequence[int]) -> None:
    """Take memory for more tokens of every sequence. If there is none for one of them, all stay as
    they are, and the error is that of `State.reserve`.
    """
    try:
        for state, n in zip(states, lengths, strict=False):
            state.reserve(n)
    except IqforgeError:
        for state in states:
            state.release_unused()
        raise
