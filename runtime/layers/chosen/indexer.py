"""The choice of blocks of positions."""

from __future__ import annotations

import torch

from ...weights.linear import Linear
from ..batch import Batch
from ..indexer import head_scores, seen_pools
from ..norm import RMSNorm
from ..rope import Rope
from ..specs import IndexerSpec


class BlockIndexer:
    """The choice of blocks of `block` positions (Qwen, 2026), from the first one of a sequence on.
    The key of a block is the mean of those of its positions, normed and then rotated by the first
    one. A token sees the top_k / block blocks with the largest sums over heads of relu(q . key)
    among those that end at it or before, and all positions that follow the last of these.
    """

    def __init__(
        self,
        spec: IndexerSpec,
        block: int,
        *,
        q: Linear,
        k: Linear,
        q_norm: RMSNorm,
        k_norm: RMSNorm,
        rope: Rope,
    ):
        self.spec, self.block, self.q, self.k = spec, block, q, k
        self.q_norm, self.k_norm, self.rope = q_norm, k_norm, rope

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of its tensors, which are whole on every rank."""
        return self.q.name, self.k.name, self.q_norm.tensor, self.k_norm.tensor

    def project(self, x: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries float32[rows, heads, key_length], and keys of positions float32[rows,
        key_length], which are kept as they are.
        """
        q = self.q_norm(self.q(x).view(len(x), self.spec.heads, self.spec.key_length))
        return self.rope(q, batch.angles(self.rope)), self.k(x)

    def select(self, q: torch.Tensor, k: torch.Tensor, origin: int) -> torch.Tensor | None:
        """Return bool[n, total]: the positions that the last n of `total` see, for q of n tokens
        and keys of all positions; None: all up to themselves. origin: the first position.
        """
        s, block = self.spec, self.block
        if (n_blocks := len(k) // block) * block <= s.top_k:
            return None
        means = k[: n_blocks * block].unflatten(0, (n_blocks, block)).mean(dim=1)
        starts = torch.arange(n_blocks, device=k.device) * block + origin
        keys = self.rope(self.k_norm(means)[:, None], self.rope.angles(starts))[:, 0]
        scores = head_scores(q, keys, q.new_ones(q.shape[:2])) * s.key_length**-0.5
        return seen_pools(scores, len(k), block, s.top_k)
