"""Entries: one vector for a run of positions, and which of them a token sees."""

from __future__ import annotations

import torch

from ...weights.linear import Linear
from ..batch import Batch
from ..indexer import best_positions, head_scores, weighted_sum
from ..norm import RMSNorm
from ..rope import Rope
from ..specs import IndexerSpec


def rotated(rope: Rope, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return x float32[n, heads, length] with the last elements of each head rotated."""
    kept = x.shape[-1] - rope.n_rot
    return torch.cat([x[..., :kept], rope(x[..., kept:].contiguous(), angles)], dim=-1)


class Compressor:
    """Entry w = norm(sum over the run of softmax(gate x + bias) * kv x), for each element alone;
    bias float32[ratio, ...] belongs to the place in the run. It is rotated by the first position of
    the run.

    overlaps: the projections give two vectors of a position. The first takes part in the entry of
    the next run, the second in that of its own.
    """

    def __init__(
        self,
        *,
        kv: Linear,
        gate: Linear,
        bias: torch.Tensor,
        norm: RMSNorm,
        rope: Rope,
        overlaps: bool,
    ):
        self.kv, self.gate, self.bias, self.norm, self.rope = kv, gate, bias, norm, rope
        self.ratio, self.overlaps = len(bias), overlaps

    @property
    def length(self) -> int:
        """Elements of an entry."""
        return self.norm.weight.numel()

    @property
    def inputs(self) -> int:
        """Elements that a position gives: values and their scores."""
        return 2 * self.kv.rows

    def project(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return values and scores float32[rows, inputs] of hidden rows x, float32[rows, width]."""
        scores = self.gate(x)
        for n, (span, start) in zip(batch.lengths, batch.spans(), strict=True):
            seen = 0 if batch.states is None else start
            scores[span] += self.bias[torch.arange(seen, seen + n, device=x.device) % self.ratio]
        return torch.cat([self.kv(x), scores], dim=1)

    def first_needed(self, n: int) -> int:
        """Return the first position whose values and scores the next entry after n positions
        needs.
        """
        return max(0, n // self.ratio - self.overlaps) * self.ratio

    def entries(self, rows: torch.Tensor, runs: range, origin: int) -> torch.Tensor:
        """Return the entries of some runs, float32[len(runs), length]. rows: values and scores from
        the first position on that these need. origin: the position of the first token.
        """
        if not runs:
            return rows.new_empty(0, self.length)
        needed = len(runs) * self.ratio
        skipped = runs.start > 0 and self.overlaps
        own = rows[self.ratio * skipped :][:needed].unflatten(0, (-1, self.ratio))
        values, scores = own.chunk(2, dim=-1)
        if self.overlaps:
            before = rows[: needed - self.ratio * (not skipped)].unflatten(0, (-1, self.ratio))
            old, old_scores = before.chunk(2, dim=-1)
            if not skipped:  # nothing is before the first run
                nothing = values.new_zeros(1, *values.shape[1:])
                old = torch.cat([nothing, old])
                old_scores = torch.cat([nothing + float("-inf"), old_scores])
            n = self.length
            values = torch.cat([old[..., :n], values[..., n:]], dim=1)
            scores = torch.cat([old_scores[..., :n], scores[..., n:]], dim=1)
        found = self.norm(weighted_sum(values, scores))
        positions = origin + torch.arange(runs.start, runs.stop, device=rows.device) * self.ratio
        return rotated(self.rope, found[:, None], self.rope.angles(positions))[:, 0]


class EntryIndexer:
    """score(t, w) = sum over heads of w_h(t) * relu(q_h(t) . k(w)), divided by sqrt(heads *
    key_length), for entries k of a compressor of its own; every token sees the `top_k` entries with
    the largest scores.
    """

    def __init__(
        self, spec: IndexerSpec, *, q: Linear, weights: Linear, compressor: Compressor, rope: Rope
    ):
        self.spec, self.q, self.weights = spec, q, weights
        self.compressor, self.rope = compressor, rope

    def project(
        self, x: torch.Tensor, q_latent: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries float32[rows, heads, key_length] and weights of heads float32[rows,
        heads].
        """
        s = self.spec
        q = self.q(q_latent).view(len(x), s.heads, s.key_length)
        weights = self.weights(x) * (s.heads * s.key_length) ** -0.5
        return rotated(self.rope, q, batch.angles(self.rope)), weights

    def select(
        self, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, counts: list[int]
    ) -> torch.Tensor | None:
        """Return bool[n, entries]: which of the first counts[i] entries token i sees, for q and
        weights of n tokens; None: all of them.
        """
        if len(keys) <= self.spec.top_k:
            return None
        return best_positions(head_scores(q, keys, weights), self.spec.top_k, counts)
