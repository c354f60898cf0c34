"""What decoders with latent attention share: sizes, scale, and the layers of a block, in the
layouts of llama.cpp and of ik_llama.cpp.

llama.cpp describes the attention as one key/value head of the latent vector's size; the sizes of
the heads have keys of their own, `*_mla`. ik_llama.cpp describes the heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ConfigError
from ..layers.absent import AbsentMixer
from ..layers.indexer import Indexer, PooledIndexer
from ..layers.latent import Joined, PerHead, UpProjection
from ..layers.mla import MLA
from ..layers.norm import LayerNorm, RMSNorm
from ..layers.rope import Rope, Scaling
from ..layers.specs import FFNSpec, IndexerSpec, MLASpec, RouterSpec, Temperature
from ..weights.hyperparameters import Hyperparameters
from .decoder import Decoder
from .expert_parts import moe, router_spec

# The norms of latent vectors have the eps of their class in transformers, whatever the model's is
# (1e-5 in GLM-5). Files have one key, for the others.
_LATENT_EPS = 1e-6
_KEY_EPS = 1e-6  # of the norm of the indexer's keys, for which there is no key in files either


@dataclass(frozen=True)
class LatentParts:
    """Builders of the layers of a block. `dense`: so many layers have no experts."""

    d: Decoder
    spec: MLASpec
    rope: Rope
    dense: int
    eps: float = _LATENT_EPS

    @classmethod
    def read(
        cls,
        d: Decoder,
        temperature: Temperature | None = None,
        *,
        rotates: bool = True,
        rope: Rope | None = None,
        eps: float = _LATENT_EPS,
        element_gates: bool = False,
    ) -> LatentParts:
        """rotates: heads know their positions. rope: how they rotate, where that is not pairs of
        neighbours with the scaling of the file. eps: of norms of latent vectors. element_gates:
        gates are for each element of the results of heads. ConfigError for
        sizes that contradict each other.
        """
        p = d.p
        key_length = p.integer("attention.key_length_mla", d.key_length)
        least = 2 if rotates else 0
        rotated = p.integer("rope.dimension_count", least=least, most=key_length - 1)
        if len(set(d.heads)) != 1:
            raise ConfigError("layers with different numbers of heads", file=p.file)
        scale = key_length**-0.5
        if rope is None and (scaling := _scaling(p)).kind == "yarn":
            scale *= (1 + _magnitude(p) * math.log(max(1.0, scaling.factor))) ** 2
        spec = MLASpec(
            d.heads[0],
            p.integer("attention.q_lora_rank", 0, least=0),
            p.integer("attention.kv_lora_rank"),
            key_length - rotated,
            rotated,
            p.integer("attention.value_length_mla", d.value_length),
            scale,
            absorb=d.w.switches.absorb,
            temperature=temperature,
        )
        if element_gates:
            spec = replace(spec, gate_length=spec.value_length)
        if rope is None:
            rope = cls._rope(d, rotated, "norm") if rotates else Rope.none("norm", rotated)
        dense = p.integer("leading_dense_block_count", 0, least=0)
        return cls(d, spec, rope, min(dense, d.n_layers), eps)

    @staticmethod
    def _rope(d: Decoder, rotated: int, style: str) -> Rope:
        return d.rope(style, head=rotated, n_rot=rotated, scaling=_scaling(d.p))

    def attention(self, layer: int, indexer: Indexer | None = None, *, top_k: int = 0) -> Any:
        """The attention of a block: queries directly or through a latent vector, the up-projection
        per head, joined, or both, and gates and sinks of heads if the file has them. top_k: see
        `MLA`.
        """
        d, s, at, w = self.d, self.spec, f"blk.{layer}", self.d.w
        local = s if w.share is None else w.share.latent(layer, s)
        if local is None:
            return AbsentMixer()
        head_rows = s.heads * s.key_length
        more: dict[str, Any] = {}
        if s.q_rank and w.has(f"{at}.attn_q_a.weight"):
            more["q_a"] = self._product(layer, "attn_q_a", d.width, s.q_rank, "replicated")
            more["q_norm"] = self._norm(f"{at}.attn_q_a_norm", s.q_rank)
            q = self._product(layer, "attn_q_b", s.q_rank, head_rows)
        else:
            q = self._product(layer, "attn_q", d.width, head_rows)
        if w.has(f"{at}.attn_gate.weight"):
            rows = s.heads * s.gate_length
            more["gate"] = self._product(layer, "attn_gate", d.width, rows)
        if w.has(f"{at}.attn_sinks.weight"):
            more["sinks"] = w.vector(f"{at}.attn_sinks.weight", s.heads, masks=True)
        return MLA(
            local,
            q=q,
            kv_a=self._product(layer, "attn_kv_a_mqa", d.width, s.cache_width, "replicated"),
            kv_norm=self._norm(f"{at}.attn_kv_a_norm", s.kv_rank),
            up=self._up(layer, local),
            output=self._product(layer, "attn_output", s.heads * s.value_length, d.width, "row"),
            rope=self.rope,
            indexer=indexer,
            top_k=top_k,
            switches=w.switches,
            **more,
        )

    def _up(self, layer: int, local: MLASpec) -> UpProjection:
        s, at, w = self.spec, f"blk.{layer}", self.d.w
        joined = f"{at}.attn_kv_b"
        if not w.has(f"{at}.attn_k_b.weight"):
            rows = s.heads * (s.nope_length + s.value_length)
            return Joined(self._product(layer, "attn_kv_b", s.kv_rank, rows), local)
        k_b, v_b = (
            w.heads(f"{at}.{name}", s.heads, n_in, n_out, role=name, split="column")
            for name, n_in, n_out in (
                ("attn_k_b", s.nope_length, s.kv_rank),
                ("attn_v_b", s.kv_rank, s.value_length),
            )
        )
        if not w.has(f"{joined}.weight"):
            return PerHead(k_b, v_b)
        # The same numbers again. One of them serves prompts and steps, so that they agree.
        w.skip(f"{joined}.")
        return PerHead(k_b, v_b, f"{joined}.weight", w.observe)

    def chooses(
        self,
        owners: Collection[int],
        style: str,
        *,
        pools: bool = False,
        rope_last: bool = False,
        key_eps: float = _KEY_EPS,
    ) -> Callable[[int], Any]:
        """Return the attention of a block, by its number, to positions that an indexer chooses: its
        own in the blocks `owners`, in others the last one before. style: how the indexers rotate.
        pools: they choose pools of positions, if the file says so. rope_last: they rotate the last
        elements. key_eps: of the norm of their keys. ConfigError for sizes that contradict each
        other.
        """
        p, sparse, s = self.d.p, self.d.w.switches.sparse_attention, self.spec
        spec = IndexerSpec(
            p.integer("attention.indexer.head_count"),
            p.integer("attention.indexer.key_length"),
            s.rope_length,
            p.integer("attention.indexer.top_k"),
            rope_last=rope_last,
        )
        pool = p.integer("attention.indexer.kpool", 0, least=0) if pools else 0
        if pool and (spec.top_k % pool or not p.flag("attention.indexer.kpool_select_tail", False)):
            raise ConfigError(
                f"an indexer of pools of {pool} that chooses {spec.top_k} positions, or leaves out"
                " those after the last pool",
                file=p.file,
            )
        # It turns by the same angles as heads do.
        rope = self.rope if style == self.rope.style else self._rope(self.d, s.rope_length, style)

        def attention(layer: int) -> Any:
            indexer = None
            if sparse and layer in owners:
                indexer = self._indexer(layer, spec, rope, key_eps, pool)
            else:
                self.d.w.skip(f"blk.{layer}.indexer.")
                if pool:
                    self.d.w.skip(f"blk.{layer}.indexer_compressor_")
            return self.attention(layer, indexer, top_k=spec.top_k if sparse else 0)

        return attention

    def _indexer(
        self, layer: int, spec: IndexerSpec, rope: Rope, key_eps: float, pool: int
    ) -> Indexer:
        """pool: so many positions have one key together; 0: each has its own."""
        d, at = self.d, f"blk.{layer}.indexer"

        def product(name: str, n_in: int, n_out: int):
            role = f"indexer{name}"
            return d.w.linear(f"blk.{layer}.{role}", n_in, n_out, role=role, split="replicated")

        norm, n = f"{at}.k_norm", spec.key_length
        bias = d.w.optional_vector(f"{norm}.bias", n)
        parts: dict[str, Any] = {
            "q": product(".attn_q_b", self.spec.q_rank, spec.heads * n),
            "k": product(".attn_k", d.width, n),
            "k_norm": LayerNorm(d.w.vector(f"{norm}.weight", n), bias, key_eps, norm),
            "weights": product(".proj", d.width, spec.heads),
            "rope": rope,
        }
        if not pool:
            return Indexer(spec, **parts)
        gate = product("_compressor_gate", d.width, n)
        offsets = d.w.values(f"{at}_compressor_ape.weight", (pool, n))
        return PooledIndexer(spec, gate=gate, offsets=offsets, **parts)

    def router(self, score: str, **spec: Any) -> RouterSpec | None:
        """Read how tokens choose experts; None if no layer has any. Arguments: as for
        `expert_parts.router_spec`.
        """
        if self.dense == self.d.n_layers:
            return None
        return router_spec(self.d, score, norm=False, **spec)

    def ffn(
        self,
        layer: int,
        router: RouterSpec | None,
        *,
        ffn: FFNSpec = FFNSpec(),
        shared_ffn: FFNSpec | None = None,
    ) -> Any:
        """The feed-forward layer of a block: dense, or experts with shared ones. ffn: what experts
        do. shared_ffn: what shared ones and dense layers do, where that is not `ffn`.
        """
        p, d = self.d.p, self.d
        if router is None or layer < self.dense:
            hidden = p.per_layer("feed_forward_length", d.n_layers)
            return d.ffn(layer, hidden[layer], shared_ffn or ffn)
        hidden = p.integer("expert_feed_forward_length")
        shared = p.integer("expert_shared_count", 0, least=0, most=1024)
        shared *= hidden
        return moe(d, layer, hidden, router, ffn=ffn, shared=shared, shared_ffn=shared_ffn)

    def _product(self, layer: int, name: str, n_in: int, n_out: int, split: str = "column"):
        return self.d.w.linear(f"blk.{layer}.{name}", n_in, n_out, role=name, split=split)

    def _norm(self, name: str, n: int) -> RMSNorm:
        return RMSNorm(self.d.w.vector(f"{name}.weight", n), self.eps, name)


def _magnitude(p: Hyperparameters) -> float:
    """Return 0.1 times the model's `mscale_all_dim`."""
    return p.number("rope.scaling.yarn_log_multiplier", 0.0)


def _scaling(p: Hyperparameters) -> Scaling:
    return Scaling.read(p, own_magnitude=not _magnitude(p))
