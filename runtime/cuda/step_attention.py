"""The executor of attention in a decoding step."""

from __future__ import annotations

import torch

from ...cuda_kernels import matvec
from ...cuda_kernels.matvec_plan import NORM_MATVEC
from ...cuda_kernels.step_attention import AttentionShape, fits, shared_limit
from ..layers.attention import Attention
from ..ranges import ranged
from ..state.cache import CacheSettings, KVCache
from .context import Context
from .executor import operation
from .registry import STEP, PlacedBranch, Slow, executor
from .step_frame import Frame
from .step_layers import StepBranch, StepSum, on_device


@executor(STEP, Attention)
class StepAttentionLayer(StepBranch):
    """q, k and v in one launch; biases, norms, rotation, cache, attention and gates in one; the
    output projection onto h.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        a: Attention = branch.module
        if a.rope is None or a.q is None or a.k is None or a.v is None:
            raise Slow("no rotation, or no projections for each of query, key and value")
        self.a, self.rope = a, a.rope
        linears = (a.q, a.k, a.v)
        self.qkv = [on_device(x, context, NORM_MATVEC, biased=True) for x in linears]
        self.biases = _all_biases([x.bias for x in linears], self.qkv)
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
            self.rope.n_rot,
            self.rope.style == "neox",
            a.q_norm is not None,
            cache.hadamard_k,
            cache.hadamard_v,
            biases=self.biases is not None,
            gate=s.gate,
            sinks=s.sinks,
            window=s.window,
            temperature=None if t is None else (t.scale, t.original_context),
        )

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        a, cache = self.a, state.layers[self.layer]
        q, k, v = outs = [
            frame.buffer(name, m.rows) for name, m in zip(("q", "k", "v"), self.qkv, strict=True)
        ]
        mixed = frame.buffer("mixed", a.spec.heads * a.spec.value_length)
        operation(matvec.norm_matvec, h, self.norm, self.eps, self.qkv, outs)
        eps = 0.0 if a.q_norm is None else a.q_norm.eps
        frame.attention(self._shape(frame.n, cache), cache.capacity)(
            q,
            k,
            v,
            *self.norms,
            eps,
            frame.angles(self.rope),
            cache.k,
            cache.v,
            frame.positions,
            a.spec.scale,
            mixed,
            biases=self.biases,
            sinks=a.sinks,
        )
        self.output(frame, mixed, h)


def _all_biases(
    biases: list[torch.Tensor | None], matrices: list
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return a bias for each product if one of them has one; zeros for the others."""
    if all(bias is None for bias in biases):
        return None
    q, k, v = (
        torch.zeros(m.rows, device=m.device) if bias is None else bias
        for bias, m in zip(biases, matrices, strict=True)
    )
    return q, k, v
