"""Norms of queries and keys over all heads together, as kernels take them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...layers.attention import Attention
from .registry import Slow


class JoinedNorms(NamedTuple):
    """weights: float32 of queries and of keys. own: int32, the number of each query and then key
    head of this rank among those that the products give; None for all.
    """

    weights: tuple[torch.Tensor, torch.Tensor]
    eps: float
    own: torch.Tensor | None

    @classmethod
    def of(cls, module: Attention, device: torch.device) -> JoinedNorms | None:
        """Return those of a layer; None if it has none, or norms of heads. Slow for forms that
        kernels do not have.
        """
        s, q, k = module.spec, module.q_norm, module.k_norm
        if not s.joined_norms:
            return None
        if q is None or k is None or q.eps != k.eps or s.gated_queries:
            raise Slow("norms over all heads of two kinds, or over gates")
        if s.kv_from is not None or (module.v is None and module.qkv is None):
            raise Slow("norms over all heads, and no keys or values of its own")
        own = None
        if s.own is not None:
            own = torch.tensor((*s.own.queries, *s.own.keys), dtype=torch.int32, device=device)
        return cls((q.weight, k.weight), q.eps, own)
