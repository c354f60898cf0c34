"""The choice of positions of sparse attention (DeepSeek-V3.2, 2025): a small attention whose scores
only say which positions the large one sees.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from ..weights.linear import Linear
from .batch import Batch
from .norm import LayerNorm
from .rope import Rope
from .specs import IndexerSpec


class Indexer:
    """score(t, j) = sum over heads of w_h(t) * relu(q_h(t) . k(j)), divided by sqrt(heads *
    key_length); every token sees the `top_k` positions with the largest scores.

    Queries come from the latent query, `k` and `weights` from the hidden state. The first
    `rope.n_rot` elements of queries and keys are rotated, or the last ones (`rope_last`).
    """

    def __init__(
        self,
        spec: IndexerSpec,
        *,
        q: Linear,
        k: Linear,
        k_norm: LayerNorm,
        weights: Linear,
        rope: Rope,
    ):
        self.spec, self.q, self.k, self.k_norm, self.weights, self.rope = (
            spec,
            q,
            k,
            k_norm,
            weights,
            rope,
        )

    @property
    def kept_length(self) -> int:
        """Elements that are kept of a position."""
        return self.spec.key_length

    def project(
        self, x: torch.Tensor, q_latent: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries float32[rows, heads, key_length], keys float32[rows, key_length] and
        weights of heads float32[rows, heads].
        """
        s = self.spec
        q = self.q(q_latent).view(len(x), s.heads, s.key_length)
        k = self.k_norm(self.k(x))[:, None]
        if s.rope_length:
            angles = batch.angles(self.rope)
            q, k = self._rotated(q, angles), self._rotated(k, angles)
        k = k[:, 0]
        return q, k, self.weights(x) * (s.heads * s.key_length) ** -0.5

    def _rotated(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return x float32[rows, heads, key_length] with its first or last elements rotated."""
        if not self.spec.rope_last:
            return self.rope(x, angles)
        kept = x.shape[-1] - self.rope.n_rot
        return torch.cat([x[..., :kept], self.rope(x[..., kept:].contiguous(), angles)], dim=-1)

    def select(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return bool[n, total]: the positions that the last n of `total` see, for q and weights of
        n tokens and keys of all positions.
        """
        return best_positions(head_scores(q, k, weights), self.spec.top_k)


class PooledIndexer(Indexer):
    """The choice of pools of positions (GLM-5.3, 2026): so many positions each, from the first one
    of a sequence on. The key of a pool is the sum of those of its positions, each element weighted
    by the softmax over the positions of gate(x) + offsets. A token sees the positions of the
    top_k / pool pools with the largest scores among those that end at it or before, and all that
    follow the last of these.

    offsets: float32[pool, key_length].
    """

    def __init__(self, *args: Any, gate: Linear, offsets: torch.Tensor, **parts: Any):
        super().__init__(*args, **parts)
        self.gate, self.offsets = gate, offsets

    @property
    def kept_length(self) -> int:
        """A key and a gate."""
        return 2 * self.spec.key_length

    def project(
        self, x: torch.Tensor, q_latent: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `Indexer.project`, but every key is followed by its gate."""
        q, k, weights = super().project(x, q_latent, batch)
        return q, torch.cat([k, self.gate(x)], dim=1), weights

    def select(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return bool[n, total]: the positions that the last n of `total` see, for q and weights of
        n tokens, and keys with gates of all positions.
        """
        total, pool = len(k), len(self.offsets)
        n_pools = total // pool
        values, gates = k[: n_pools * pool].unflatten(0, (n_pools, pool)).chunk(2, dim=-1)
        keys = weighted_sum(values, gates + self.offsets)
        return seen_pools(head_scores(q, keys, weights), total, pool, self.spec.top_k)


def seen_pools(scores: torch.Tensor, total: int, pool: int, top_k: int) -> torch.Tensor:
    """Return bool[n, total]: which positions the last n of `total` see, for scores float32[n,
    pools] of the pools of `pool` positions each, the first of which begins at the first position:
    those of the top_k / pool best pools among those that end at a token or before, and all that
    follow the last of these.
    """
    n, n_pools = scores.shape
    counts = [(position + 1) // pool for position in range(total - n, total)]
    chosen = best_positions(scores, top_k // pool, counts)
    every, ends = torch.arange(total, device=scores.device), torch.tensor(counts)
    ends = ends.to(scores.device)[:, None]
    seen = (every >= pool * ends) & (every <= every[total - n :, None])
    seen[:, : n_pools * pool] |= chosen.repeat_interleave(pool, dim=1)
    return seen


def head_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return sums over heads of weights * relu(q . key), float32[n, keys], for q float32[n, heads,
    length], keys float32[keys, length] and weights float32[n, heads].
    """
    scores = q.new_zeros(len(q), len(keys))
    for head in range(q.shape[1]):
        scores += weights[:, head, None] * (q[:, head] @ keys.T).relu_()
    return scores


def weighted_sum(values: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return float32[runs, length]: the sum over each run of values float32[runs, positions,
    length], each element weighted by the softmax of its scores over the run.
    """
    return (values * scores.softmax(dim=1)).sum(dim=1)


def best_positions(
    scores: torch.Tensor, top_k: int, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Return bool[n, total]: which of those that it may see are the `top_k` best positions of each
    of n tokens, for scores float32[n, total]. counts: each may see so many of the first positions,
    never fewer than the token before; None: all up to itself, and the tokens are the last ones.

    Scores are equal where all heads ignore a position: they are 0. Then `torch.topk` chooses, as in
    transformers. Its choice depends on the length of a row, so rows are cut to the multiple of
    `top_k` after the token, however many positions follow. It also depends on the device: what is
    not decided by scores alone is chosen on the CPU.
    """
    n, total = scores.shape
    if counts is None:
        counts = range(total - n + 1, total + 1)
    ends = torch.tensor(counts, device=scores.device)
    seen, row = torch.arange(total, device=scores.device) < ends[:, None], 0
    while row < n:
        width = -(-counts[row] // top_k) * top_k
        rows = slice(row, bisect_right(counts, width))
        if width > top_k:
            here = min(width, total)
            padded = scores.new_full((rows.stop - row, width), float("-inf"))
            padded[:, :here] = scores[rows, :here].masked_fill(~seen[rows, :here], float("-inf"))
            chosen = torch.zeros_like(padded, dtype=torch.bool)
            best = padded.topk(top_k, dim=-1)
            if not padded.is_cpu and (padded >= best.values[:, -1:]).sum() > best.values.numel():
                best = padded.cpu().topk(top_k, dim=-1)
            chosen.scatter_(1, best.indices.to(padded.device), True)
            seen[rows, :here] &= chosen[:, :here]
        row = rows.stop
    return seen
