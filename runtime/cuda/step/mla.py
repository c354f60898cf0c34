"""The executor of latent attention in a decoding step."""

from __future__ import annotations

import torch

from ....cuda_kernels.attention.mla import StepLatentAttention, splits_of
from ....cuda_kernels.attention.mla_shape import LatentShape, fits
from ....cuda_kernels.attention.shape import shared_limit
from ....cuda_kernels.matvec import products as matvec
from ....cuda_kernels.matvec.plan import NORM_MATVEC
from ....cuda_kernels.step import between as step_between
from ...layers.mla import MLA
from ...state.cache import CacheSettings
from ...state.latent import LatentCache, settings_of
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.executor import operation
from ..common.latent_weights import HeadMatrices
from ..common.registry import STEP, Placed, PlacedBranch, Slow, executor
from .frame import STEP_ROWS, Frame
from .index import StepIndexer
from .layers import StepBranch, StepSum, on_device


@executor(STEP, MLA)
class StepLatentLayer(StepBranch):
    """The absorbed form. Queries, latent vector and rotated key in one launch (two if queries have
    a latent vector); norm, rotation, cache and attention to latent vectors in three; the output
    projection onto h. With an indexer three more for the choice of positions, which layers without
    one take over; with gates of heads one more.

    W_k and W_v are kept in half besides the packed ones: 2 bytes for each of their elements.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        m: MLA = branch.module
        self.m, self.spec, self.rope = m, m.spec, m.rope
        if not m.switches.flash_attention:
            raise Slow("scores in memory (-fa 0)")
        for norm in (m.kv_norm, m.q_norm):
            if norm is not None and norm.weight.device != context.device:
                raise Placed(f"a norm of latent vectors is not on {context.device}")
        if (m.q_a is None) != (m.q_norm is None):
            raise Slow("latent vectors of queries without a norm")
        first = m.q if m.q_a is None else m.q_a
        self.first = [on_device(x, context, NORM_MATVEC) for x in (first, m.kv_a)]
        self.q = None if m.q_a is None else on_device(m.q, context, NORM_MATVEC)
        self.index = None if m.indexer is None else StepIndexer(m.indexer, context)
        if self.index is not None:
            if self.q is None:
                raise Slow("an indexer without latent vectors of queries")
            self.first += self.index.inputs
        names = ("latent q", "latent kv", *(("index k", "index weights") if self.index else ()))
        self.names = names
        if m.gate is not None:
            self.first.append(on_device(m.gate, context, NORM_MATVEC))
            self.names = (*names, "gates")
        self.output = StepSum(m.output, branch, context)
        matrices = HeadMatrices(m, context)
        self._limit = shared_limit(context.device)
        self._half = torch.float16
        rows = settings_of(context.settings or CacheSettings())[0]
        self._check(rows.k.name, rows.block_of_keys(self.spec.cache_width))
        self.keys, self.values = matrices.kept()
        self._half = self.keys.dtype

    def check(self, state) -> None:
        cache = state.layers[self.layer]
        if not isinstance(cache, LatentCache) or not cache.rows.is_whole:
            raise Slow("a cache whose positions do not follow each other")
        self._check(cache.rows.type_k.name, cache.rows.hadamard_k)
        if self.index is not None:
            self.index.check(cache.index_keys)

    def _check(self, type: str, hadamard: int) -> None:
        if not fits(self._shape(STEP_ROWS, type, hadamard), self._limit):
            s = self.spec
            turned = f" in Hadamard blocks of {hadamard}" if hadamard else ""
            raise Slow(
                f"latent vectors of {s.kv_rank}, keys of {s.rope_length} and a cache of"
                f" {type.lower()}{turned}: no kernel, or too little shared memory for it"
            )

    def _shape(self, n: int, type: str, hadamard: int) -> LatentShape:
        s, t = self.spec, self.spec.temperature
        return LatentShape(
            n,
            s.heads,
            s.nope_length,
            s.rope_length,
            s.kv_rank,
            s.value_length,
            type,
            self._half,
            self.rope.style == "neox",
            None if t is None else (t.scale, t.original_context),
            self.m.top_k,
            hadamard,
        )

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        m, s, kept = self.m, self.spec, state.layers[self.layer]
        cache, index = kept.rows, self.index
        q, kv, *more = outs = [
            frame.buffer(name, matrix.rows)
            for name, matrix in zip(self.names, self.first, strict=True)
        ]
        operation(matvec.norm_matvec, h, self.norm, self.eps, self.first, outs)
        if self.q is not None and m.q_norm is not None:
            latent, norm = q, m.q_norm
            matrices = [self.q] if index is None else [self.q, index.q]
            outs = [
                frame.buffer(name, matrix.rows)
                for name, matrix in zip(("q", "index q"), matrices, strict=False)
            ]
            operation(matvec.norm_matvec, latent, norm.weight, norm.eps, matrices, outs)
            q = outs[0]
            if index is not None:
                k, weights = more[:2]
                chosen = self._chosen(frame)
                index(frame, kept.index_keys, outs[1], k, weights, state.context, chosen)
        mixed = frame.buffer("mixed", s.heads * s.value_length)
        attention(frame, self._shape(frame.n, cache.type_k.name, cache.hadamard_k), cache.capacity)(
            q,
            kv,
            m.kv_norm.weight,
            m.kv_norm.eps,
            frame.angles(self.rope.of_context(state.context)),
            self.keys,
            self.values,
            cache.k,
            frame.positions,
            s.scale,
            mixed,
            *([self._chosen(frame)] if m.top_k else []),
        )
        if m.gate is not None:
            step_between.gate_heads(mixed, more[-1])
        self.output(frame, mixed, h)

    def _chosen(self, frame: Frame) -> torch.Tensor:
        """The positions that rows see, int32[n, top_k], of this or the last layer with an
        indexer.
        """
        return frame.buffer("chosen positions", self.m.top_k, torch.int32)


def attention(frame: Frame, shape: LatentShape, capacity: int) -> StepLatentAttention:
    """Return the kernels that sequences of this capacity share."""
    splits = splits_of(shape, capacity, frame.device)
    return frame.once(
        ("latent attention", shape, splits),
        lambda: StepLatentAttention(shape, splits, frame.device),
    )
