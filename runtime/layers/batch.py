"""What the rows of a hidden state are: which sequence and which position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..state.cache import CacheSettings


@dataclass(frozen=True)
class Batch:
    """`n_sequences` independent sequences of `n_tokens` each; row s * n_tokens + t of the hidden
    state is token t of sequence s.

    `positions` int64[n_tokens] are ascending and the same for every sequence, from `start` on.
    `state` is what the layer keeps from call to call (its mixer's `new_state`: keys and values, a
    recurrent state). It holds the `start` tokens before these, and the mixer adds these to it;
    there is one sequence then. Without a state, sequences begin here, and a mixer uses keys and
    values as a cache with `settings` would return them (None: as they are).
    """

    n_sequences: int
    n_tokens: int
    positions: torch.Tensor
    start: int = 0
    state: Any = None
    settings: CacheSettings | None = None

    @classmethod
    def of(
        cls,
        n_sequences: int,
        n_tokens: int,
        start: int,
        device: torch.device,
        settings: CacheSettings | None = None,
    ) -> Batch:
        return cls(
            n_sequences,
            n_tokens,
            torch.arange(start, start + n_tokens, device=device),
            start,
            None,
            settings,
        )

    def at(self, state: Any, device: torch.device) -> Batch:
        """The same rows as a layer on `device` with this state sees them."""
        positions = self.positions if self.positions.device == device else self.positions.to(device)
        return replace(self, positions=positions, state=state)
