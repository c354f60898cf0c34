"""A dense feed-forward layer next to experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from ..weights.ranges import opened
from .block import FeedForward
from .moe import MoE
from .norm import Norm


class DenseAndExperts:
    """The sum of a dense feed-forward layer and of experts, each with norms before and after it.

    The router reads the residual stream, divided by its root mean square and multiplied by
    `router_scale` float32[width]. sum: adds what each gives on all tensor-parallel ranks, before
    the norms after it. moe: None if this rank has no part of the experts.
    """

    def __init__(
        self,
        dense: FeedForward,
        moe: MoE | None,
        router_scale: torch.Tensor,
        norms: tuple[Norm, Norm],
        post_norms: tuple[Norm, Norm],
        eps: float,
        sum: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self.dense, self.moe, self.router_scale, self.eps = dense, moe, router_scale, eps
        self.sum = sum
        self.norm, self.expert_norm = norms
        self.post_norm, self.expert_post_norm = post_norms

    @property
    def experts_used(self) -> int:
        return 1 if self.moe is None else self.moe.experts_used

    @property
    def expert_share(self) -> float:
        return 1.0 if self.moe is None else self.moe.expert_share

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """h float32[rows, width], not normed, to float32[rows, width]."""
        x = self.norm(h)
        with opened("", "GatedFFN"):
            x = self.dense(x)
        always = self.post_norm(self._summed(x))
        mixed = torch.zeros_like(h) if self.moe is None else self.mixed(self.moe, h)
        return always + self.expert_post_norm(self._summed(mixed))

    def mixed(self, moe: MoE, h: torch.Tensor) -> torch.Tensor:
        """Return what the experts of this rank give, before the sum over ranks and the norm."""
        seen = F.rms_norm(h, (h.shape[-1],), self.router_scale, self.eps)
        return moe.mix(self.expert_norm(h), *moe.router(seen))

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.sum is None else self.sum(x)
