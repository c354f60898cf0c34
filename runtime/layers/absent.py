"""What a tensor-parallel rank has in place of a layer of which it computes nothing."""

from __future__ import annotations

import torch

from ..state.cache import CacheSettings
from ..state.layer_state import Storage
from ..state.table import Table
from .batch import Batch


class AbsentMixer:
    """A mixer that adds nothing and keeps nothing."""

    window = 0

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return torch.zeros_like(x)

    def new_storage(self, n_rows: int, settings: CacheSettings, device: torch.device) -> None:
        """Return None: nothing is kept."""

    def new_state(self, storage: Storage | None, table: Table, device: torch.device) -> None:
        """Return None: nothing is kept."""

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        return 0

    def score_bytes(self, rows: int, keys: int, precision: str) -> int:
        return 0

    def flop(self, n_past: int, n: int) -> float:
        return 0.0

    def read_bytes(self, n_past: int, n: int, settings: CacheSettings) -> float:
        return 0.0


class AbsentRows:
    """A feed-forward layer that adds nothing."""

    experts_used, expert_share = 1, 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)
