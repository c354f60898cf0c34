"""Memory for the sequences of a network: blocks of positions that its layers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...errors import UsageError
from .cache import CacheSettings, padded
from .sequence import State
from .table import BLOCK_TOKENS, Blocks, Table

if TYPE_CHECKING:
    from ..layers.block import Mixer


class Pool:
    """Keys and values of `n_tokens` positions for each layer, in blocks that sequences take as they
    grow. Layers with a sliding window have the window and `ubatch` positions of `n_sequences`
    sequences, unless `settings.swa_full`. n_layers: of the model, fewer than `mixers` where layers
    have two.
    """

    def __init__(
        self,
        mixers: Sequence[tuple[Mixer, torch.device]],
        settings: CacheSettings,
        n_tokens: int,
        n_sequences: int,
        ubatch: int,
        n_layers: int | None = None,
    ):
        self.n_layers = n_layers or len(mixers)
        self.mixers, self.settings, self.n_tokens = mixers, settings, padded(n_tokens)
        self.windows = [window_of(mixer, settings, self.n_tokens, ubatch) for mixer, _ in mixers]
        self._blocks = {
            window: Blocks(
                rows_of(window, self.n_tokens, ubatch)
                // BLOCK_TOKENS
                * (n_sequences if window else 1)
            )
            for window in {0, *self.windows}
        }
        self._storages = [
            mixer.new_storage(self._blocks[window].n_blocks * BLOCK_TOKENS, settings, device)
            for (mixer, device), window in zip(mixers, self.windows, strict=True)
        ]

    @property
    def n_free(self) -> int:
        """Positions that no sequence has taken."""
        return self._blocks[0].n_free * BLOCK_TOKENS

    def sequence(
        self, capacity: int | None = None, *, reserved: bool = False, context: int = 0
    ) -> State:
        """Return an empty sequence for at most `capacity` tokens (None: all of the pool).

        reserved: take the memory for all of them now and keep it, as kernels need. context: see
        `State`. Raise UsageError for a capacity that the pool cannot have.
        """
        capacity = self.n_tokens if capacity is None else capacity
        if not isinstance(capacity, int) or not 1 <= capacity <= self.n_tokens:
            raise UsageError(
                f"capacity is {capacity!r}, expected 1 to {self.n_tokens}, which the pool holds"
            )
        tables = {
            window: Table(blocks, capacity, window) for window, blocks in self._blocks.items()
        }
        if reserved:
            tables[0].reserve_all()
        layers = [
            mixer.new_state(storage, tables[window], device)
            for (mixer, device), window, storage in zip(
                self.mixers, self.windows, self._storages, strict=True
            )
        ]
        return State(
            capacity,
            layers,
            self.settings,
            tables,
            self.windows,
            context or capacity,
            [mixer for mixer, _ in self.mixers],
            self.n_layers,
        )

    def end(self, state: State) -> None:
        """Give back the memory of a sequence, which can no longer be used."""
        state.ended = True
        for table in state.tables.values():
            table.end()


def window_of(mixer: Mixer, settings: CacheSettings, capacity: int, ubatch: int) -> int:
    """The window of a layer; 0 if it keeps all positions, as it does where that takes no more."""
    window = 0 if settings.swa_full else mixer.window
    return window if window and rows_of(window, capacity, ubatch) < capacity else 0


def rows_of(window: int, capacity: int, ubatch: int) -> int:
    """Positions that a layer keeps of a sequence of `capacity`: whole blocks for the window and a
    pass of `ubatch` tokens.
    """
    if not window:
        return capacity
    return (-(-(window + ubatch) // BLOCK_TOKENS) + 1) * BLOCK_TOKENS
