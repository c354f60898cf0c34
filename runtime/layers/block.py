"""One step of the residual stream."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .batch import Batch
from .norm import RMSNorm


class Block:
    """h += mixer(norm(h)); h += ffn(norm(h)). The mixer may be attention or anything else that takes (x, batch)."""

    def __init__(self, mixer_norm: RMSNorm, mixer: Callable[[torch.Tensor, Batch], torch.Tensor], ffn_norm: RMSNorm,
                 ffn: Callable[[torch.Tensor], torch.Tensor]):
        self.mixer_norm, self.mixer, self.ffn_norm, self.ffn = mixer_norm, mixer, ffn_norm, ffn

    def __call__(self, h: torch.Tensor, batch: Batch) -> torch.Tensor:
        h = h + self.mixer(self.mixer_norm(h), batch)
        return h + self.ffn(self.ffn_norm(h))
