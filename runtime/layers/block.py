"""One step of the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..cache import CacheSettings
from .batch import Batch
from .norm import RMSNorm


class Block:
    """h += mixer(norm(h)); h += ffn(norm(h)). The mixer may be attention or anything else that
    takes (x, batch).

    A mixer that carries something from call to call has `new_state(capacity, settings, device)` and
    `state_bytes(capacity, settings)`, and finds its state in the batch. A block works where its
    norms are: placement decides that.
    """

    def __init__(
        self,
        mixer_norm: RMSNorm,
        mixer: Callable[[torch.Tensor, Batch], torch.Tensor],
        ffn_norm: RMSNorm,
        ffn: Callable[[torch.Tensor], torch.Tensor],
    ):
        self.mixer_norm, self.mixer, self.ffn_norm, self.ffn = mixer_norm, mixer, ffn_norm, ffn

    @property
    def device(self) -> torch.device:
        return self.mixer_norm.weight.device

    def new_state(self, capacity: int, settings: CacheSettings) -> Any:
        """What the mixer keeps of one sequence of at most `capacity` tokens; None if it keeps
        nothing.
        """
        return (
            self.mixer.new_state(capacity, settings, self.device)
            if hasattr(self.mixer, "new_state")
            else None
        )

    def __call__(self, h: torch.Tensor, batch: Batch) -> torch.Tensor:
        h = h + self.mixer(self.mixer_norm(h), batch)
        return h + self.ffn(self.ffn_norm(h))
