"""What decoder-only transformers share: embedding, blocks, attention and dense feed-forward layers.

Architecture files describe only what differs. The keys that every architecture reads are in
`decoder_sizes.py`, experts in `expert_parts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import ConfigError
from ..layers.absent import AbsentMixer, AbsentRows
from ..layers.attention import Attention
from ..layers.block import AttentionAndFFN, AttentionAndStateSpace, Block, Branch
from ..layers.dense_and_experts import DenseAndExperts
from ..layers.ffn import GatedFFN, PlainFFN
from ..layers.layer_input import TokenMoE
from ..layers.norm import HeadLayerNorm, LayerNorm, NoNorm, Norm, RMSNorm
from ..layers.rope import Rope, Scaling
from ..layers.rowwise.sparse_gate import PARTS, AbsentSparseFFN, SparseGate
from ..layers.specs import AttentionSpec, FFNSpec
from ..layers.streams import Connection
from ..weights.linear import Linear
from .decoder_sizes import DecoderSizes
from .network import Network


class Decoder(DecoderSizes):
    """Builders of the parts of a decoder from the tensors of a block."""

    def network(
        self,
        block: Callable[[int], Block],
        *,
        logit_scale: float = 1.0,
        last_norm: str | None = "output_norm",
        **options: Any,
    ) -> Network:
        """Return a network of `block(layer)` for every layer. Its output matrix is the embedding if
        the file has no output tensor. logit_scale: multiplies logits. last_norm: the name of the
        norm before the output; None for none. options: those of `Network`.
        """
        n_vocab = self.p.integer("vocab_size", self.w.n_rows_of("token_embd.weight"))
        output = "output" if self.w.has("output.weight") else "token_embd"
        return Network(
            self.w.embedding("token_embd", n_vocab, self.width),
            [block(layer) for layer in range(self.n_layers)],
            self._no_norm() if last_norm is None else self.norm(last_norm),
            self.w.linear(
                output, self.width, n_vocab, role="output", split="column", factor=logit_scale
            ),
            n_vocab,
            **options,
            join=None if self.w.share is None else self.w.share.join,
        )

    def _no_norm(self) -> NoNorm:
        return NoNorm(torch.ones(self.width, device=self.w.placement.home("output_norm.weight")))

    def block(
        self,
        layer: int,
        mixer: Any,
        ffn: Any,
        *,
        norms: tuple[str | None, str | None] = ("attn_norm", "ffn_norm"),
        post_norms: tuple[str | None, str | None] = (None, None),
        more: tuple[Branch, ...] = (),
        first: tuple[Branch, ...] = (),
        output_scale: torch.Tensor | None = None,
        streams: tuple[Connection | None, Connection | None] = (None, None),
    ) -> Block:
        """A block of a mixer, a feed-forward layer, and `first` branches before and `more` after
        them. norms, post_norms: the names of the norms before and after the two; None for none.
        streams: what is around the two where there are several residual streams.
        """
        at = f"blk.{layer}"
        before, after = (
            [None if name is None else self.norm(f"{at}.{name}") for name in names]
            for names in (norms, post_norms)
        )
        share = self.w.share
        total = None if share is None else share.meeting.sum
        branches = (
            *first,
            Branch(before[0], mixer, after[0], mixer=True, sum=total, streams=streams[0]),
            Branch(
                before[1],
                ffn,
                after[1],
                takes_batch=isinstance(ffn, TokenMoE),
                sum=None if isinstance(ffn, DenseAndExperts) else total,
                streams=streams[1],
            ),
            *more,
        )
        return Block(branches, self.w.placement.layer(layer), output_scale)

    def single_block(self, layer: int, module: Any, *, mixer: bool) -> Block:
        """A block of one module after `attn_norm`. mixer: it mixes tokens."""
        total = None if self.w.share is None else self.w.share.meeting.sum
        branch = Branch(self.norm(f"blk.{layer}.attn_norm"), module, mixer=mixer, sum=total)
        return Block((branch,), self.w.placement.layer(layer))

    def parallel_block(self, layer: int, mixer: Any, ffn: Any) -> Block:
        """A block of attention and a feed-forward layer that read the same `attn_norm` of the
        stream.
        """
        absent = isinstance(mixer, AbsentMixer) and isinstance(ffn, AbsentRows)
        module = mixer if absent else AttentionAndFFN(mixer, ffn)
        total = None if self.w.share is None else self.w.share.meeting.sum
        branch = Branch(self.norm(f"blk.{layer}.attn_norm"), module, mixer=True, sum=total)
        return Block((branch,), self.w.placement.layer(layer))

    def side_by_side(self, layer: int, attention: Any, states: Any) -> Any:
        """Attention and a state-space layer that read the same rows."""
        if isinstance(attention, AbsentMixer) and isinstance(states, AbsentMixer):
            return attention
        return AttentionAndStateSpace(attention, states, self.n_layers + layer)

    def norm(self, name: str, n: int | None = None) -> Norm:
        """Return the norm `<name>.weight` over `n` elements (default: the width)."""
        if not self.layer_norm:
            return self.rms_norm(name, n)
        size = n or self.width
        bias = self.w.optional_vector(f"{name}.bias", size)
        return LayerNorm(self.w.vector(f"{name}.weight", size), bias, self.eps, name)

    def rms_norm(self, name: str, n: int | None = None) -> RMSNorm:
        """Return the RMS norm `<name>.weight` over `n` elements (default: the width)."""
        # Some of those that llama.cpp writes have no suffix.
        suffix = "" if self.w.has(name) else ".weight"
        return RMSNorm(self.w.vector(name + suffix, n or self.width), self.eps, name, suffix)

    def rope(
        self,
        style: str,
        *,
        head: int | None = None,
        n_rot: int | None = None,
        base: float | None = None,
        factors: torch.Tensor | None = None,
        own_factors: bool = True,
        scaling: Scaling | None = None,
    ) -> Rope:
        """Read the rotation of heads of `head` elements, with the frequency factors of
        `rope_freqs.weight` if the file has them, unless `own_factors` is False. Arguments replace
        what the keys say. Raise ConfigError for an odd number of rotated elements, or more than a
        head has.
        """
        head = head or self.key_length
        n_rot = n_rot or self.p.integer("rope.dimension_count", head, most=head)
        if n_rot % 2:
            raise ConfigError(
                f"metadata key '{self.p.architecture}.rope.dimension_count' is {n_rot}, expected an"
                " even number",
                file=self.p.file,
            )
        if factors is None and own_factors:
            factors = self.w.optional_vector("rope_freqs.weight", n_rot // 2)
        return Rope(
            style,
            n_rot,
            base or self.p.number("rope.freq_base", 10000.0, above=1),
            factors,
            scaling or Scaling.read(self.p),
        )

    def attention(
        self,
        layer: int,
        rope: Rope | None,
        *,
        head_norms: bool = False,
        plain_head_norms: bool = False,
        key_length: int | None = None,
        value_length: int | None = None,
        scale: float | None = None,
        value_eps: float = 0.0,
        result_scale: float = 1.0,
        **spec: Any,
    ) -> Any:
        """`attn_q`, `attn_k`, `attn_v` (or `attn_qkv`) and `attn_output` of a block, with biases
        where the file has them; with `head_norms` or `joined_norms` also `attn_q_norm` and
        `attn_k_norm`, over a head or over all; with `sinks` `attn_sinks`, with `gate_apart`
        `attn_gate`. Where norms are
        LayerNorms, those of heads have weights for each head. plain_head_norms: norms of heads have
        no weights. scale: default 1 / sqrt(key_length). result_scale: multiplies what is added.
        spec: other fields of `AttentionSpec`.
        """
        at, w = f"blk.{layer}", self.w
        key_length, value_length = key_length or self.key_length, value_length or self.value_length
        s = AttentionSpec(
            self.heads[layer],
            self.kv_heads[layer],
            key_length,
            value_length,
            key_length**-0.5 if scale is None else scale,
            **spec,
        )
        local = s if w.share is None else w.share.attention(layer, s)
        if local is None:
            return AbsentMixer()
        products: dict[str, Linear] = {}
        sizes = {"q": s.query_rows, "k": s.key_rows, "v": s.value_rows}
        normed = {x: sizes[x] if s.joined_norms else key_length for x in ("q", "k")}
        if w.has(f"{at}.attn_qkv.weight"):
            sizes = {"qkv": sum(sizes.values())}
        elif s.kv_from is not None:
            sizes = {"q": s.query_rows}
        elif s.value_norm and not w.has(f"{at}.attn_v.weight"):
            del sizes["v"]
        for name, n_out in sizes.items():
            split = "replicated" if s.joined_norms and name in normed else "column"
            products[name] = w.linear(
                f"{at}.attn_{name}", self.width, n_out, role=f"attn_{name}", split=split
            )
        if s.gate_apart:
            n_out = s.heads * s.gate_length
            products["gate"] = w.linear(
                f"{at}.attn_gate", self.width, n_out, role="attn_gate", split="column"
            )
        q_norm, k_norm = (
            self._head_norm(f"{at}.attn_{x}_norm", heads, normed[x])
            if (head_norms or s.joined_norms) and (x == "q" or s.kv_from is None)
            else None
            for x, heads in (("q", s.heads), ("k", s.kv_heads))
        )
        if plain_head_norms:
            ones = torch.ones(key_length, device=self.w.placement.layer(layer))
            q_norm, k_norm = (RMSNorm(ones, self.eps, f"{at}.attn_{x}_norm") for x in "qk")
        return Attention(
            local,
            output=w.linear(
                f"{at}.attn_output",
                s.heads * value_length,
                self.width,
                role="attn_output",
                split="row",
                factor=result_scale,
            ),
            rope=rope,
            value_eps=value_eps,
            sinks=w.vector(f"{at}.attn_sinks.weight", s.heads, masks=True) if s.sinks else None,
            switches=w.switches,
            q_norm=q_norm,
            k_norm=k_norm,
            **products,
        )

    def _head_norm(self, name: str, heads: int, n: int) -> RMSNorm | HeadLayerNorm:
        if not self.layer_norm:
            return self.rms_norm(name, n)
        return HeadLayerNorm(self.w.values(f"{name}.weight", (heads, n)), self.eps, name)

    def ffn(
        self,
        layer: int,
        hidden: int,
        spec: FFNSpec = FFNSpec(),
        suffix: str = "",
        factor: float = 1.0,
    ) -> Any:
        """`ffn_gate`, `ffn_up`, `ffn_down` of a block, with `suffix` after each name. Without
        `ffn_gate`, `ffn_up` has the rows of the gate first. factor: multiplies the result.
        """
        at, w = f"blk.{layer}", self.w
        sparse = spec.cutoff is not None
        gather = None if w.share is None or not sparse else w.share.gather_each(PARTS)
        if w.share is not None and not w.share.has_ffn(layer, bool(suffix)):
            return AbsentRows() if gather is None else AbsentSparseFFN(gather)
        cut = None if spec.cutoff is None else SparseGate(spec.cutoff, gather)
        down = w.linear(
            f"{at}.ffn_down{suffix}",
            hidden,
            self.width,
            role=f"ffn_down{suffix}",
            split="row",
            factor=factor,
        )

        def product(name: str, n_out: int, split: str = "column") -> Linear:
            return w.linear(
                f"{at}.ffn_{name}{suffix}",
                self.width,
                n_out,
                role=f"ffn_{name}{suffix}",
                split=split,
            )

        if not spec.gated:
            return PlainFFN(product("up", hidden), down, spec)
        if w.has(f"{at}.ffn_gate{suffix}.weight"):
            gate, up = product("gate", hidden), product("up", hidden)
            return GatedFFN(down, gate, up, spec=spec, cut=cut)
        both = product("up", 2 * hidden, "gate_up")
        return GatedFFN(down, gate_up=both, spec=spec, cut=cut)
