"""The choice of positions of sparse attention (DeepSeek-V3.2, 2025): a small attention whose scores
only say which positions the large one sees.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

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
    `rope.n_rot` elements of queries and keys are rotated.
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

    def project(
        self, x: torch.Tensor, q_latent: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries float32[rows, heads, key_length], keys float32[rows, key_length] and
        weights of heads float32[rows, heads].
        """
        s, angles = self.spec, batch.angles(self.rope)
        q = self.rope(self.q(q_latent).view(len(x), s.heads, s.key_length), angles)
        k = self.rope(self.k_norm(self.k(x))[:, None], angles)[:, 0]
        return q, k, self.weights(x) * (s.heads * s.key_length) ** -0.5

    def select(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return bool[n, total]: the positions that the last n of `total` see, for q and weights of
        n tokens and keys of all positions.
        """
        n, total = len(q), len(k)
        scores = q.new_zeros(n, total)
        for head in range(self.spec.heads):
            scores += weights[:, head, None] * (q[:, head] @ k.T).relu_()
        return best_positions(scores, self.spec.top_k)


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
