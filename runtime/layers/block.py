"""One step of the residual stream."""

from __future__ import annotations

from typing import Protocol

import torch

from ..state.cache import CacheSettings, LayerState
from .batch import Batch
from .norm import RMSNorm


class Mixer(Protocol):
    """What mixes the tokens of a sequence: attention or another kind of layer."""

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width], rows as `batch` says. What the mixer
        keeps from call to call is `batch.state`.
        """
        ...

    def new_state(
        self, capacity: int, settings: CacheSettings, device: torch.device
    ) -> LayerState | None:
        """Return what the mixer keeps of one sequence of at most `capacity` tokens; None if it
        keeps nothing.
        """
        ...

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that `new_state` takes."""
        ...


class FeedForward(Protocol):
    """What works on every row alone."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width]."""
        ...


class Block:
    """h += mixer(norm(h)); h += ffn(norm(h)). A block computes on the device of its norms, which
    the placement chooses.
    """

    def __init__(
        self,
        mixer_norm: RMSNorm,
        mixer: Mixer,
        ffn_norm: RMSNorm,
        ffn: FeedForward,
    ):
        self.mixer_norm, self.mixer, self.ffn_norm, self.ffn = mixer_norm, mixer, ffn_norm, ffn

    @property
    def device(self) -> torch.device:
        return self.mixer_norm.weight.device

    def new_state(self, capacity: int, settings: CacheSettings) -> LayerState | None:
        """Return what the mixer keeps of one sequence of at most `capacity` tokens; None if it
        keeps nothing.
        """
        return self.mixer.new_state(capacity, settings, self.device)

    def __call__(self, h: torch.Tensor, batch: Batch) -> torch.Tensor:
        h = h + self.mixer(self.mixer_norm(h), batch)
        return h + self.ffn(self.ffn_norm(h))
