"""The choice of positions of sparse attention in a decoding step."""

from __future__ import annotations

import torch

from ....cuda_kernels.attention import index
from ....cuda_kernels.attention.index import IndexShape
from ....cuda_kernels.matvec.plan import NORM_MATVEC
from ...layers.indexer import Indexer
from ...state.cache import CacheSettings, KVCache
from ...state.latent import settings_of
from ..common.context import Context
from ..common.registry import Placed, Slow
from .frame import Frame
from .layers import on_device


class StepIndexer:
    """Keys, scores and choice in three launches. Its products share launches with those of the
    attention: `inputs` read the hidden state, `q` the latent query.
    """

    def __init__(self, indexer: Indexer, context: Context):
        if indexer.k_norm.weight.device != context.device:
            raise Placed(f"the norm of the indexer's keys is not on {context.device}")
        self.indexer = indexer
        self.inputs = [on_device(x, context, NORM_MATVEC) for x in (indexer.k, indexer.weights)]
        self.q = on_device(indexer.q, context, NORM_MATVEC)
        settings = settings_of(context.settings or CacheSettings())[1]
        self._shape(settings.k.name)

    def check(self, cache: KVCache | None) -> None:
        """Slow if the cache of keys is none that kernels read."""
        if cache is None or not cache.is_whole:
            raise Slow("a cache whose positions do not follow each other")
        self._shape(cache.type_k.name)

    def _shape(self, type: str) -> IndexShape:
        shape = shape_of(self.indexer, type)
        if not shape.fits:
            raise Slow(
                f"an indexer with {shape.heads} heads of {shape.length} elements and a cache of"
                f" {type.lower()}"
            )
        return shape

    def __call__(
        self,
        frame: Frame,
        cache: KVCache,
        q: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
        context: int,
        chosen: torch.Tensor,
    ) -> None:
        """Write the positions that each row sees to chosen int32[n, top_k], for the products of
        `q` and `inputs`. context: the most tokens that the sequence can have.
        """
        shape, norm = self._shape(cache.type_k.name), self.indexer.k_norm
        angles = frame.angles(self.indexer.rope.of_context(context))
        index.index_rows(
            shape, q, k, norm.weight, norm.bias, norm.eps, angles, cache.k, frame.positions
        )
        scores = frame.buffer("index scores", cache.capacity)
        index.index_scores(shape, q, weights, cache.k, frame.positions, scores)
        index.index_select(shape, scores, frame.positions, chosen)


def shape_of(indexer: Indexer, type: str) -> IndexShape:
    """Return the shape of the kernels for a type of cache, by its ggml name."""
    s, rope = indexer.spec, indexer.rope
    return IndexShape(s.heads, s.key_length, rope.n_rot, type, s.top_k, rope.style == "neox")
