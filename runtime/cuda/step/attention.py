"""The executor of attention in a decoding step."""

from __future__ import annotations

from itertools import accumulate

import torch

from ....cuda_kernels.attention.shape import AttentionShape, fits, shared_limit
from ....cuda_kernels.matvec.operands import NextAttention, RowRange
from ....cuda_kernels.matvec.plan import NORM_MATVEC
from ....cuda_kernels.packed.matrix import PackedMatrix
from ....cuda_kernels.step import between as step_between
from ...layers.attention import Attention
from ...state.cache import CacheSettings, KVCache
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.joined_norms import JoinedNorms
from ..common.registry import STEP, Placed, PlacedBranch, Slow, executor
from .frame import Frame
from .layers import StepBranch, StepInput, StepSum, on_device


@executor(STEP, Attention)
class StepAttentionLayer(StepBranch):
    """q, k and v in one launch; biases, norms, rotation, cache, attention and gates in one; the
    output projection onto h. One more launch for norms over all heads together.
    """

    joins = True

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        a: Attention = branch.module
        s = a.spec
        self.a, self.rope, self.device = a, a.rope, context.device
        self.input = StepInput(branch.branch.norm, context)
        # Rows of queries, keys and values.
        self.sizes = s.query_rows, s.key_rows, s.value_rows
        self.qkv, biases = self._projections(context)
        self.biases = _all_biases(biases, self.sizes, context.device)
        self.gate = None if a.gate is None else on_device(a.gate, context, NORM_MATVEC)
        self.output = StepSum(a.output, branch, context)
        if not a.switches.flash_attention:
            raise Slow("scores in memory (-fa 0)")
        self.joined = JoinedNorms.of(a, context.device)
        if self.joined is not None and self.biases is not None:
            raise Slow("biases before norms over all heads")
        # Keys of another layer have their norm; the kernel does not use this one then.
        k_norm = a.k_norm if s.kv_from is None else a.q_norm
        if (a.q_norm is None) != (k_norm is None):
            raise Slow("head norms of two kinds")
        all_eps = {norm.eps for norm in (a.q_norm, k_norm) if norm is not None}
        all_eps |= {a.value_eps} if s.value_norm else set()
        if len(all_eps) > 1:
            raise Slow("head norms of two kinds")
        self.head_eps = next(iter(all_eps), 0.0)
        self.norms = (
            None if a.q_norm is None or s.joined_norms else a.q_norm.weight,
            None if k_norm is None or s.joined_norms else k_norm.weight,
        )
        self._limit = shared_limit(context.device)
        self._check(a.new_cache(0, context.settings or CacheSettings(), torch.device("cpu")))

    def _projections(
        self, context: Context
    ) -> tuple[list[PackedMatrix | RowRange], list[torch.Tensor | None]]:
        """Return the matrices of queries, keys and values, and their biases."""
        a = self.a
        if a.qkv is not None:
            joined = on_device(a.qkv, context, NORM_MATVEC, biased=True)
            first = accumulate(self.sizes, initial=0)
            ranges = [RowRange(joined, at, n) for at, n in zip(first, self.sizes, strict=False)]
            bias = a.qkv.bias
            return list(ranges), [None] * 3 if bias is None else list(bias.split(self.sizes))
        linears = [x for x in (a.q, a.k, a.v) if x is not None]
        matrices = [on_device(x, context, NORM_MATVEC, biased=True) for x in linears]
        biases = [x.bias for x in linears]
        if len(linears) < 3 and any(bias is not None for bias in biases):
            raise Slow("biases, and no projections for each of query, key and value")
        return list(matrices), biases

    def check(self, state) -> None:
        cache = self._cache(state)
        device = cache.storage.k.device
        if device != self.device:
            raise Placed(f"its keys and values are on {device}")
        self._check(cache)

    def _cache(self, state) -> KVCache:
        """Return the cache of this layer, or of the layer whose keys and values it uses."""
        source = self.a.spec.kv_from
        return state.layers[self.layer if source is None else source]

    def _check(self, cache: KVCache) -> None:
        s = self.a.spec
        if not cache.is_whole:
            raise Slow("a cache whose positions do not follow each other")
        if not fits(self._shape(1, cache), self._limit):
            names = (type.name.lower() for type in (cache.type_k, cache.type_v))
            types = " and ".join(dict.fromkeys(names))
            sizes = " and ".join(map(str, dict.fromkeys((s.key_length, s.value_length))))
            raise Slow(
                f"{s.group} heads of {sizes} elements to a head of keys, and a"
                f" cache of {types}: no kernel, or too little shared memory for it"
            )

    def _shape(self, n: int, cache: KVCache) -> AttentionShape:
        a, s = self.a, self.a.spec
        t = s.temperature
        return AttentionShape(
            n,
            s.group,
            s.kv_heads,
            s.key_length,
            s.value_length,
            cache.type_k.name,
            cache.type_v.name,
            0 if self.rope is None else self.rope.n_rot,
            self.rope is not None and self.rope.style == "neox",
            a.q_norm is not None and not s.joined_norms,
            cache.hadamard_k,
            cache.hadamard_v,
            biases=self.biases is not None,
            gate=s.gate,
            gate_apart=s.gate_apart,
            head_gates=s.head_gates,
            softplus_gates=s.softplus_gates,
            sinks=s.sinks,
            window=s.window,
            chunked=s.chunked,
            softcap=s.softcap,
            value_norm=s.value_norm and s.kv_from is None,
            own_kv=s.kv_from is None,
            norms_last=s.norms_last,
            temperature=None if t is None else (t.scale, t.original_context, t.offset),
        )

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        a, cache = self.a, self._cache(state)
        names = ("q", "k", "v")[: len(self.qkv)]
        outs = [frame.buffer(name, rows) for name, rows in zip(names, self.sizes, strict=False)]
        # Values can be keys before norm and rotation. What another layer has stored is not read.
        q, k, v = (outs + 2 * outs[-1:])[:3]
        mixed = frame.buffer("mixed", a.spec.heads * a.spec.value_length)
        gates = None
        if self.gate is not None:
            gates = frame.buffer("gates", self.gate.rows)
            self.input(frame, [self.gate], [gates])
        attention = frame.attention(self._shape(frame.n, cache), cache.capacity)
        following = None
        if attention.full_from is not None and self.joined is None:
            following = NextAttention(frame.positions, attention.full_from)
        self.input(frame, self.qkv, outs, attention=following)
        if (joined := self.joined) is not None:
            heads, size = (a.spec.heads, a.spec.kv_heads), a.spec.key_length
            own = [frame.buffer(f"normed {x}", n * size) for x, n in zip("qk", heads, strict=True)]
            step_between.norm_heads(q, k, *joined.weights, joined.eps, size, joined.own, *own)
            q, k = own
        attention(
            q,
            k,
            v,
            *self.norms,
            self.head_eps,
            None if self.rope is None else frame.angles(self.rope.of_context(state.context)),
            cache.k,
            cache.v,
            frame.positions,
            a.spec.scale,
            mixed,
            biases=self.biases,
            sinks=a.sinks,
            **({} if gates is None else {"gates": gates}),
        )
        self.output(frame, mixed, frame.h)


def _all_biases(
    biases: list[torch.Tensor | None], sizes: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return a bias for each product if one of them has one; zeros for the others."""
    if all(bias is None for bias in biases):
        return None
    q, k, v = (
        torch.zeros(rows, device=device) if bias is None else bias.contiguous()
        for bias, rows in zip(biases, sizes, strict=True)
    )
    return q, k, v
