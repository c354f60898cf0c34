"""Builders of layers with compressed keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...errors import ConfigError
from ..layers.absent import AbsentMixer
from ..layers.compressed.attention import CompressedAttention
from ..layers.compressed.entries import Compressor, EntryIndexer
from ..layers.compressed.specs import CompressedSpec
from ..layers.rope import Rope, Scaling
from ..layers.specs import IndexerSpec
from .decoder import Decoder

_OVERLAPPING = 4  # the ratio of layers whose entries overlap, and which have an indexer


@dataclass(frozen=True)
class CompressedParts:
    """Builders of the attention of a block. spec: of a layer with a window only. index: of layers
    with an indexer. ratios: of all layers. near_rope, rope: of layers with a window only, and of
    the others.
    """

    d: Decoder
    spec: CompressedSpec
    index: IndexerSpec
    ratios: tuple[int, ...]
    near_rope: Rope
    rope: Rope

    @classmethod
    def read(cls, d: Decoder) -> CompressedParts:
        """ConfigError for sizes that contradict each other."""
        p = d.p
        rotated = p.integer("rope.dimension_count", least=2, most=d.key_length)
        groups = p.integer("attention.output_group_count")
        if len(set(d.heads)) != 1 or set(d.kv_heads) != {1} or d.heads[0] % groups:
            raise ConfigError(
                f"heads {d.heads[0]} and key/value heads {d.kv_heads[0]}: expected a multiple of"
                f" {groups} heads, and 1, in every layer",
                file=p.file,
            )
        if d.value_length != d.key_length:
            raise ConfigError(
                f"values of {d.value_length} elements and keys of {d.key_length}, which are the"
                " same here",
                file=p.file,
            )
        index = IndexerSpec(
            p.integer("attention.indexer.head_count"),
            p.integer("attention.indexer.key_length", least=rotated),
            rotated,
            p.integer("attention.indexer.top_k"),
        )
        spec = CompressedSpec(
            d.heads[0],
            d.key_length,
            rotated,
            p.integer("attention.q_lora_rank"),
            p.integer("attention.sliding_window"),
            groups,
            p.integer("attention.output_lora_rank"),
        )
        ropes = (
            d.rope("norm", head=rotated, n_rot=rotated, scaling=Scaling(), own_factors=False),
            d.rope(
                "norm",
                head=rotated,
                n_rot=rotated,
                base=p.number("attention.compress_rope_freq_base", above=1),
                # Their magnitude is 1, also with YaRN.
                scaling=replace(Scaling.read(p, own_magnitude=False), magnitude=1.0),
                own_factors=False,
            ),
        )
        ratios = p.at_least_per_layer("attention.compress_ratios", d.n_layers)
        return cls(d, spec, index, ratios, *ropes)

    def attention(self, layer: int) -> Any:
        """The attention of a block."""
        d, w, at, ratio = self.d, self.d.w, f"blk.{layer}", self.ratios[layer]
        overlaps = ratio == _OVERLAPPING
        s = replace(
            self.spec, ratio=ratio, overlaps=overlaps, index=self.index if overlaps else None
        )
        local = s if w.share is None else w.share.compressed(layer, s)
        if local is None:
            return AbsentMixer()
        rope = self.rope if ratio else self.near_rope
        compressor = indexer = None
        if ratio:
            compressor = self._compressor(layer, "attn_compressor", s.key_length, s)
        if overlaps:
            indexer = self._indexer(layer, s)
        return CompressedAttention(
            local,
            q_a=self._copied(layer, "attn_q_a", d.width, s.q_rank),
            q_norm=d.rms_norm(f"{at}.attn_q_a_norm", s.q_rank),
            q=w.linear(
                f"{at}.attn_q_b", s.q_rank, s.heads * s.key_length, role="attn_q_b", split="column"
            ),
            kv=self._copied(layer, "attn_kv", d.width, s.key_length),
            kv_norm=d.rms_norm(f"{at}.attn_kv_a_norm", s.key_length),
            output_a=w.heads(
                f"{at}.attn_output_a",
                s.groups,
                s.heads // s.groups * s.key_length,
                s.out_rank,
                role="attn_output_a",
                split="column",
                together=True,
            ),
            output_b=w.linear(
                f"{at}.attn_output_b",
                s.groups * s.out_rank,
                d.width,
                role="attn_output_b",
                split="row",
            ),
            rope=rope,
            sinks=w.vector(f"{at}.attn_sinks.weight", s.heads, masks=True),
            compressor=compressor,
            indexer=indexer,
        )

    def _copied(self, layer: int, name: str, n_in: int, n_out: int):
        return self.d.w.linear(f"blk.{layer}.{name}", n_in, n_out, role=name, split="replicated")

    def _compressor(self, layer: int, name: str, length: int, s: CompressedSpec) -> Compressor:
        d, rows = self.d, length * (1 + s.overlaps)
        return Compressor(
            kv=self._copied(layer, f"{name}_kv", d.width, rows),
            gate=self._copied(layer, f"{name}_gate", d.width, rows),
            bias=d.w.values(f"blk.{layer}.{name}_ape.weight", (s.ratio, rows)),
            norm=d.rms_norm(f"blk.{layer}.{name}_norm", length),
            rope=self.rope,
            overlaps=s.overlaps,
        )

    def _indexer(self, layer: int, s: CompressedSpec) -> EntryIndexer:
        i = self.index
        return EntryIndexer(
            i,
            q=self._copied(layer, "indexer.attn_q_b", s.q_rank, i.heads * i.key_length),
            weights=self._copied(layer, "indexer.proj", self.d.width, i.heads),
            compressor=self._compressor(layer, "indexer_compressor", i.key_length, s),
            rope=self.rope,
        )
