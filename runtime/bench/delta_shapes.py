"""Shapes of models with gated delta nets, with and without experts, and of those that have several
residual streams besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...formats.types import GGMLType
from ...formats.values import Value, ValueType, array, boolean, f32, u32
from .hybrid_shapes import HybridShape
from .mixer_sizes import (
    DeltaSizes,
    GatedStreamSizes,
    IndexerSizes,
    KimiDeltaSizes,
    LatentSizes,
    NgramSizes,
    StreamSizes,
)
from .shape import Shape


@dataclass(frozen=True)
class StreamsShape(HybridShape):
    """The shape of a model with several residual streams, which end in their mean. Nothing of its
    heads is rotated.
    """

    streams: StreamSizes = field(default_factory=StreamSizes)

    def _mixer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self.streams.around("attn", self.width)
        yield from super()._mixer(layer)

    def _feed_forward(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self.streams.around("ffn", self.width)
        yield from super()._feed_forward(layer)

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        """Keys of a file whose matrices are of this type."""
        own = {**self.streams.keys, "rope.dimension_count": u32(0)}
        found = {f"{self.architecture}.{key}": value for key, value in own.items()}
        return super().metadata(type) | found


@dataclass(frozen=True)
class NgramShape(Shape):
    """The shape of a model with several residual streams and no other norms between layers, whose
    attention sees blocks of `block` positions that an indexer chooses, `top_k` positions at most;
    one layer adds embeddings of n-grams.
    """

    streams: GatedStreamSizes = field(default_factory=GatedStreamSizes)
    ngrams: NgramSizes = field(default_factory=lambda: NgramSizes(0, 1, 1))
    index_heads: int = 4
    index_length: int = 128
    top_k: int = 2048
    block: int = 4

    @property
    def least_layers(self) -> int:
        """Return the fewest layers that have both kinds, and the one with n-grams."""
        return max(super().least_layers, self.ngrams.layer + 1)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of all tensors, in the order of a converted file."""
        yield from super().tensors()
        yield from self.streams.ends(self.width)
        yield "per_layer_token_embd.weight", self.ngrams.table

    def _mixer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self.streams.around("attn", self.width)
        if layer == self.ngrams.layer:
            yield from self.ngrams.tensors(self.width, self.streams.n)
        yield from super()._mixer(layer)

    def _attention(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from super()._attention()
        length = self.index_length
        yield "indexer.q_proj.weight", (self.index_heads * length, self.width)
        yield "indexer.k_proj.weight", (length, self.width)
        yield "indexer.q_norm.weight", (length,)
        yield "indexer.k_norm.weight", (length,)

    def _feed_forward(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self.streams.around("ffn", self.width)
        yield from super()._feed_forward(layer)

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        """Keys of a file whose matrices are of this type."""
        interval = 1 if self.delta is None else self.delta.interval
        own = {
            **self.streams.keys,
            **self.ngrams.keys,
            "attention.indexer.head_count": u32(self.index_heads),
            "attention.indexer.key_length": u32(self.index_length),
            "attention.indexer.top_k": u32(self.top_k),
            "attention.compress_ratios": array(
                ValueType.INT32,
                [0 if (layer + 1) % interval else self.block for layer in range(self.n_layers)],
            ),
        }
        found = {f"{self.architecture}.{key}": value for key, value in own.items()}
        return super().metadata(type) | found


DELTA_SHAPES: dict[str, Shape] = {
    "qwen3.5-35b-a3b": Shape(
        "qwen35moe",
        "35B.A3B",
        40,
        2048,
        16,
        2,
        256,
        512,
        248320,
        10000000.0,
        262144,
        1e-6,
        256,
        8,
        shared=512,
        shared_gate=True,
        merged=True,
        gate=True,
        delta=DeltaSizes(16, 32, 128),
        rotated=64,
        head_norms=True,
        ffn_norm="post_attention_norm",
        keys={
            "expert_shared_feed_forward_length": u32(512),
            "rope.dimension_sections": array(ValueType.INT32, [11, 11, 10, 0]),
        },
    ),
    "qwen3.5-27b": Shape(
        "qwen35",
        "27B",
        64,
        5120,
        24,
        4,
        256,
        17408,
        248320,
        10000000.0,
        262144,
        1e-6,
        gate=True,
        delta=DeltaSizes(16, 48, 128),
        rotated=64,
        head_norms=True,
        ffn_norm="post_attention_norm",
        keys={"rope.dimension_sections": array(ValueType.INT32, [11, 11, 10, 0])},
    ),
    "qwen35-tiny": Shape(
        "qwen35",
        "tiny",
        4,
        256,
        4,
        2,
        64,
        512,
        512,
        10000000.0,
        8192,
        1e-6,
        gate=True,
        delta=DeltaSizes(2, 4, 64),
        rotated=32,
        head_norms=True,
        ffn_norm="post_attention_norm",
        keys={"rope.dimension_sections": array(ValueType.INT32, [6, 5, 5, 0])},
    ),
    "qwen3-next-80b-a3b": Shape(
        "qwen3next",
        "80B.A3B",
        48,
        2048,
        16,
        2,
        256,
        512,
        151936,
        10000000.0,
        262144,
        1e-6,
        512,
        10,
        shared=512,
        shared_gate=True,
        gate=True,
        delta=DeltaSizes(16, 32, 128, joined=True),
        rotated=64,
        head_norms=True,
        ffn_norm="post_attention_norm",
        keys={"expert_shared_feed_forward_length": u32(512)},
    ),
    "qwen3.8-flash-next": NgramShape(
        *("qwen4exp", "125B.A6B", 48, 2560, 24, 2, 256, 640, 248320),
        *(10000000.0, 262144, 1e-6, 512, 10),
        shared=640,
        shared_gate=True,
        gate=True,
        delta=DeltaSizes(16, 48, 128),
        rotated=64,
        head_norms=True,
        attn_norm="",
        ffn_norm="",
        last_norm="",
        # 51 billion parameters besides the 125 of the name.
        ngrams=NgramSizes(1, 20_000_096, 160),
        keys={
            "expert_shared_feed_forward_length": u32(640),
            "rope.dimension_sections": array(ValueType.INT32, [11, 11, 10, 0]),
        },
    ),
    "glm-5.3-flash": StreamsShape(
        *("glm5-next", "320B.A18B", 45, 4096, 64, 1, 256, 2048, 154880),
        *(10000.0, 1 << 20, 1e-5, 288, 8),
        n_dense=3,
        dense_hidden=12288,
        shared=2048,
        choice_bias=True,
        latent=LatentSizes(1536, 512, 256, 0, 256),
        indexer=IndexerSizes(32, 128, 2048, pool=16),
        attending=tuple(range(3, 45, 4)),
        recurrent=KimiDeltaSizes(64, 128, bound=-5.0, rate_columns=False),
        keys={
            "expert_gating_func": u32(2),
            "expert_shared_count": u32(1),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(2.5),
            "swiglu_clamp_exp": f32(10.0),
            "swiglu_clamp_shexp": f32(10.0),
        },
    ),
}
