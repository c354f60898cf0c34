"""The choice of positions of sparse attention over many rows."""

from __future__ import annotations

import torch

from .....cuda_kernels.attention import index
from ....layers.batch import Batch
from ....layers.indexer import Indexer
from ....state.cache import CacheSettings, KVCache
from ....state.latent import read_keys, settings_of, write_keys
from ...common.context import Context
from ...common.registry import Placed, Slow
from ...step.index import shape_of
from ..common.stream import last_rows
from ..common.weights import Product

SCORE_BYTES = 256 * 2**20  # of products of queries and keys at a time


class PromptIndexer:
    """Scores in float32, as small errors would change which positions are seen."""

    def __init__(self, indexer: Indexer, context: Context):
        if indexer.k_norm.weight.device != context.device:
            raise Placed(f"the norm of the indexer's keys is not on {context.device}")
        if not shape_of(indexer, "F16").fits:
            raise Slow(f"an indexer with {indexer.spec.heads} heads")
        self.indexer, self.context = indexer, context
        self.k = Product("index k", [indexer.k], context, exact=True)
        self.weights = Product("index weights", [indexer.weights], context, exact=True)
        self.q = Product("index q", [indexer.q], context, exact=True)

    def project(self, x: torch.Tensor, q_latent: torch.Tensor, keys_only: bool) -> None:
        """Compute the products of x half[rows, width] and of the latent queries of all rows, or of
        the last row of each sequence. keys_only: where nothing is chosen.
        """
        self.k(x)
        if keys_only:
            return
        self.weights(x if len(q_latent) == len(x) else last_rows(x, len(q_latent)))
        self.q(q_latent)

    def own_keys(self, batch: Batch, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Compute the keys float32[rows, length] of all rows, in a buffer."""
        i, rows = self.indexer, batch.n_sequences * batch.n_tokens
        turns = _repeated(angles, batch.n_sequences)
        keys = i.rope(i.k_norm(self.k.out(rows).float())[:, None], turns)[:, 0]
        return self._keys(rows).copy_(keys)

    def store(self, batch: Batch) -> None:
        """Keep what `own_keys` has computed, of a pass that begins at position 0."""
        write_keys(batch.state.index_keys, 0, self._keys(batch.n_tokens))

    def _keys(self, rows: int) -> torch.Tensor:
        shape = rows, self.indexer.spec.key_length
        return self.context.buffer("index keys", shape, torch.float32)

    def __call__(
        self, batch: Batch, angles: tuple[torch.Tensor, torch.Tensor], n_queries: int
    ) -> torch.Tensor | None:
        """Store the keys of all rows, and return int32[n_queries, top_k], the positions that the
        rows with queries see, ascending, -1 after the last; None if all see all.
        """
        i, s, n_sequences = self.indexer, self.indexer.spec, batch.n_sequences
        rows, total = n_sequences * batch.n_tokens, batch.start + batch.n_tokens
        keys = self._kept(self.own_keys(batch, angles), batch)
        if total <= s.top_k:
            return None
        turns = _repeated(angles, n_sequences)
        positions = batch.sequence_positions.int()
        if n_queries < rows:
            positions = positions[-1:]
            turns = _repeated((angles[0][-1:], angles[1][-1:]), n_sequences)
        q = i.rope(self.q.out(n_queries).float().view(-1, s.heads, s.key_length), turns)
        weights = self.weights.out(n_queries).float()
        chosen = self.context.buffer("chosen positions", (n_queries, s.top_k), torch.int32)
        each = n_queries // n_sequences
        for n in range(n_sequences):
            own = slice(n * each, (n + 1) * each)
            mine = keys if batch.state is not None else keys[n * total : (n + 1) * total]
            self._select(q[own], weights[own], mine, positions, chosen[own])
        return chosen

    def _kept(self, keys: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return keys float32[positions, length] as a cache returns them: of all tokens of the
        sequence, or of new sequences that are not kept.
        """
        if batch.state is not None:
            cache = batch.state.index_keys
            write_keys(cache, batch.start, keys)
            return read_keys(cache, batch.start + batch.n_tokens)
        settings = settings_of(batch.settings or CacheSettings())[1]
        cache = KVCache.alone(len(keys), 1, keys.shape[1], 0, settings, keys.device)
        write_keys(cache, 0, keys)
        return read_keys(cache, len(keys))

    def _select(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        """Choose for the rows of one sequence, which are at positions int32[rows]."""
        s, shape = self.indexer.spec, shape_of(self.indexer, "F16")
        step = max(1, SCORE_BYTES // (4 * s.heads * len(keys)))
        for first in range(0, len(q), step):
            part = slice(first, min(first + step, len(q)))
            n = part.stop - part.start
            # Of its largest size from the beginning: see `PromptLatent._reserve`.
            self.context.buffer("index dots", (SCORE_BYTES // 4,), torch.float32)
            dots = self.context.buffer("index dots", (n * s.heads, len(keys)), torch.float32)
            torch.mm(q[part].flatten(0, 1), keys.t(), out=dots)
            dots = dots.relu_().view(n, s.heads, len(keys))
            scores = torch.bmm(weights[part, None], dots)[:, 0]
            at = positions[part.start : part.start + 1]
            index.index_select(shape, scores, at, chosen[part], pdl=False)


def _repeated(
    angles: tuple[torch.Tensor, torch.Tensor], n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the positions of n sequences."""
    cos, sin = angles
    return cos.repeat(n, 1), sin.repeat(n, 1)
