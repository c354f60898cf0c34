"""The executor of attention in a decoding step."""

from __future__ import annotations

from itertools import accumulate

import torch

from ...cuda_kernels.matvec import RowRange
from ...cuda_kernels.matvec_plan import NORM_MATVEC
from ...cuda_kernels.ops import PackedMatrix
from ...cuda_kernels.step_attention import AttentionShape, fits, shared_limit
from ..layers.attention import Attention
from ..state.cache import CacheSettings, KVCache
from ..weights.ranges import ranged
from .context import Context
from .registry import STEP, PlacedBranch, Slow, executor
from .step_frame import Frame
from .step_layers import StepBranch, StepInput, StepSum, on_device


@executor(STEP, Attention)
class StepAttentionLayer(StepBranch):
    """q, k and v in one launch; biases, norms, rotation, cache, attention and gates in one; the
    output projection onto h.
    """

    joins = True

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        a: Attention = branch.module
        s = a.spec
        self.a, self.rope, self.input = a, a.rope, StepInput(branch.norm, context)
        # Rows of queries, keys and values.
        self.sizes = s.query_rows, s.kv_heads * s.key_length, s.kv_heads * s.value_length
        self.qkv, biases = self._projections(context)
        self.biases = _all_biases(biases, self.sizes, context.device)
        self.output = StepSum(a.output, branch, context)
        if not a.switches.flash_attention:
            raise Slow("scores in memory (-fa 0)")
        if (a.q_norm is None) != (a.k_norm is None) or (
            a.q_norm is not None and a.k_norm is not None and a.q_norm.eps != a.k_norm.eps
        ):
            raise Slow("head norms of two kinds")
        self.norms = (
            None if a.q_norm is None else a.q_norm.weight,
            None if a.k_norm is None else a.k_norm.weight,
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
        if a.q is None or a.k is None or a.v is None:
            raise Slow("no projections for each of query, key and value")
        linears = a.q, a.k, a.v
        matrices = [on_device(x, context, NORM_MATVEC, biased=True) for x in linears]
        return list(matrices), [x.bias for x in linears]

    def check(self, state) -> None:
        self._check(state.layers[self.layer])

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
            a.q_norm is not None,
            cache.hadamard_k,
            cache.hadamard_v,
            biases=self.biases is not None,
            gate=s.gate,
            sinks=s.sinks,
            window=s.window,
            softcap=s.softcap,
            temperature=None if t is None else (t.scale, t.original_context),
        )

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        a, cache = self.a, state.layers[self.layer]
        q, k, v = outs = [
            frame.buffer(name, rows) for name, rows in zip(("q", "k", "v"), self.sizes, strict=True)
        ]
        mixed = frame.buffer("mixed", a.spec.heads * a.spec.value_length)
        self.input(frame, self.qkv, outs)
        eps = 0.0 if a.q_norm is None else a.q_norm.eps
        frame.attention(self._shape(frame.n, cache), cache.capacity)(
            q,
            k,
            v,
            *self.norms,
            eps,
            None if self.rope is None else frame.angles(self.rope.of_context(state.context)),
            cache.k,
            cache.v,
            frame.positions,
            a.spec.scale,
            mixed,
            biases=self.biases,
            sinks=a.sinks,
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
