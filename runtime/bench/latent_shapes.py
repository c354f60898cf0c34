"""Shapes of models with latent attention, and of those with keys for runs of positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...formats.types import GGMLType
from ...formats.values import Value, ValueType, array, boolean, f32, string, u32
from .mixer_sizes import IndexerSizes, LatentSizes, StreamSizes
from .shape import Shape

_OVERLAPPING = 4  # the ratio of layers whose entries overlap, and which have an indexer


@dataclass(frozen=True)
class CompressedShape(Shape):
    """The shape of a model whose layers have `ratios` (0: a window only). Heads are in `groups`,
    each of which gives `out_rank` elements. The token chooses experts in the first `by_token`
    layers.
    """

    ratios: tuple[int, ...] = ()
    q_rank: int = 0
    groups: int = 1
    out_rank: int = 0
    index_heads: int = 0
    index_length: int = 0
    streams: StreamSizes = field(default_factory=StreamSizes)
    by_token: int = 0

    @property
    def least_layers(self) -> int:
        """Return the fewest layers that have all kinds."""
        return max(self.by_token, *(self.ratios.index(kind) for kind in set(self.ratios))) + 1

    def with_layers(self, n_layers: int) -> Shape:
        """Return the shape with its first layers only."""
        shape = super().with_layers(n_layers)
        return replace(shape, ratios=self.ratios[:n_layers])

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of all tensors, in the order of a converted file."""
        yield from super().tensors()
        yield from self.streams.ends(self.width)

    def _mixer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        rows, ratio = self.n_heads * self.head, self.ratios[layer]
        yield from self.streams.around("attn", self.width)
        yield from self._norm("attn_norm")
        yield "attn_sinks.weight", (self.n_heads,)
        yield "attn_q_a.weight", (self.q_rank, self.width)
        yield "attn_q_a_norm.weight", (self.q_rank,)
        yield "attn_q_b.weight", (rows, self.q_rank)
        yield "attn_kv.weight", (self.head, self.width)
        yield "attn_kv_a_norm.weight", (self.head,)
        yield "attn_output_a.weight", (self.groups * self.out_rank, rows // self.groups)
        yield "attn_output_b.weight", (self.width, self.groups * self.out_rank)
        if ratio:
            yield from self._compressor("attn_compressor", self.head, ratio)
        if ratio == _OVERLAPPING:
            yield from self._compressor("indexer_compressor", self.index_length, ratio)
            yield "indexer.attn_q_b.weight", (self.index_heads * self.index_length, self.q_rank)
            yield "indexer.proj.weight", (self.index_heads, self.width)

    def _compressor(
        self, name: str, length: int, ratio: int
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        rows = 2 * length if ratio == _OVERLAPPING else length
        yield f"{name}_kv.weight", (rows, self.width)
        yield f"{name}_gate.weight", (rows, self.width)
        yield f"{name}_ape.weight", (ratio, rows)
        yield f"{name}_norm.weight", (length,)

    def _feed_forward(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self.streams.around("ffn", self.width)
        if layer < self.by_token:
            yield "ffn_gate_tid2eid.weight", (self.n_vocab, self.n_used)
            for name, shape in super()._feed_forward(layer):
                if name != "exp_probs_b.bias":
                    yield name, shape
        else:
            yield from super()._feed_forward(layer)

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        """Keys of a file whose matrices are of this type."""
        own = {
            "attention.q_lora_rank": u32(self.q_rank),
            "attention.output_group_count": u32(self.groups),
            "attention.output_lora_rank": u32(self.out_rank),
            "attention.compress_ratios": array(ValueType.INT32, list(self.ratios)),
            "attention.indexer.head_count": u32(self.index_heads),
            "attention.indexer.key_length": u32(self.index_length),
            "hash_layer_count": u32(self.by_token),
            "embedding_length_out": u32(self.streams.n * self.width),
            **self.streams.keys,
        }
        found = {f"{self.architecture}.{key}": value for key, value in own.items()}
        return super().metadata(type) | found


_YARN = {
    "rope.scaling.type": string("yarn"),
    "rope.scaling.factor": f32(40.0),
    "rope.scaling.original_context_length": u32(4096),
}
_DEEPSEEK_V3 = Shape(
    "deepseek2",
    "671B.A37B",
    61,
    7168,
    128,
    1,
    192,
    2048,
    129280,
    10000.0,
    163840,
    1e-6,
    256,
    8,
    n_dense=3,
    dense_hidden=18432,
    shared=2048,
    rotated=64,
    choice_bias=True,
    latent=LatentSizes(1536, 512, 128, 64, 128),
    keys={
        "expert_gating_func": u32(2),
        "expert_shared_count": u32(1),
        "expert_group_count": u32(8),
        "expert_group_used_count": u32(4),
        "expert_weights_norm": boolean(True),
        "expert_weights_scale": f32(2.5),
        **_YARN,
        "rope.scaling.yarn_log_multiplier": f32(0.1),
    },
)


@dataclass(frozen=True)
class ChoosingShape(Shape):
    """The shape of a model with several residual streams, and indexers in the layers `owners`
    alone; those between use what the last one chose.
    """

    streams: StreamSizes = field(default_factory=StreamSizes)
    owners: tuple[int, ...] = ()

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of all tensors, in the order of a converted file."""
        yield from super().tensors()
        yield from self.streams.ends(self.width)

    def _mixer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self.streams.around("attn", self.width)
        for name, shape in super()._mixer(layer):
            if layer in self.owners or not name.startswith("indexer."):
                yield name, shape

    def _feed_forward(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self.streams.around("ffn", self.width)
        yield from super()._feed_forward(layer)

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        """Keys of a file whose matrices are of this type."""
        types = [layer in self.owners for layer in range(self.n_layers)]
        own = {"attention.indexer.types": array(ValueType.BOOL, types), **self.streams.keys}
        found = {f"{self.architecture}.{key}": value for key, value in own.items()}
        return super().metadata(type) | found


LATENT_SHAPES: dict[str, Shape] = {
    "deepseek-v2-lite": Shape(
        "deepseek2",
        "16B.A2.4B",
        27,
        2048,
        16,
        1,
        192,
        1408,
        102400,
        10000.0,
        163840,
        1e-6,
        64,
        6,
        n_dense=1,
        dense_hidden=10944,
        shared=2816,
        rotated=64,
        latent=LatentSizes(0, 512, 128, 64, 128),
        keys={
            "expert_gating_func": u32(1),
            "expert_shared_count": u32(2),
            "expert_weights_norm": boolean(False),
            "expert_weights_scale": f32(1.0),
            **_YARN,
            "rope.scaling.yarn_log_multiplier": f32(0.0707),
        },
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": Shape(
        "deepseek2",
        "1T.A32B",
        61,
        7168,
        64,
        1,
        192,
        2048,
        163840,
        50000.0,
        131072,
        1e-6,
        384,
        8,
        n_dense=1,
        dense_hidden=18432,
        shared=2048,
        rotated=64,
        choice_bias=True,
        latent=LatentSizes(1536, 512, 128, 64, 128),
        keys={
            "expert_gating_func": u32(2),
            "expert_shared_count": u32(1),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(2.827),
            **_YARN,
            "rope.scaling.factor": f32(32.0),
            "rope.scaling.yarn_log_multiplier": f32(0.1),
        },
    ),
    "mistral-small-4": Shape(
        "mistral4",
        "119B.A6B",
        36,
        4096,
        32,
        1,
        128,
        2048,
        131072,
        10000.0,
        1048576,
        1e-6,
        128,
        4,
        shared=2048,
        merged=True,
        rotated=64,
        latent=LatentSizes(1024, 256, 64, 64, 128),
        keys={
            "expert_gating_func": u32(1),
            "expert_shared_count": u32(1),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(1.0),
            **_YARN,
            "rope.scaling.factor": f32(128.0),
            "rope.scaling.original_context_length": u32(8192),
            "rope.scaling.yarn_log_multiplier": f32(0.1),
        },
    ),
    "minicpm3-4b": Shape(
        "minicpm3",
        "4B",
        *(62, 2560, 40, 40, 96, 6400, 73448),
        10000.0,
        32768,
        1e-5,
        rotated=32,
        value_head=64,
        tied=True,
        long_rope=True,
        latent=LatentSizes(768, 256, 64, 32, 64, joined=True),
    ),
    "deepseek-v3.2": replace(
        _DEEPSEEK_V3, architecture="deepseek32", indexer=IndexerSizes(64, 128, 2048)
    ),
    "glm-5": Shape(
        "glm-dsa",
        "744B.A40B",
        78,
        6144,
        64,
        1,
        256,
        2048,
        154880,
        1000000.0,
        202752,
        1e-5,
        256,
        8,
        n_dense=3,
        dense_hidden=12288,
        shared=2048,
        rotated=64,
        choice_bias=True,
        latent=LatentSizes(2048, 512, 192, 64, 256),
        indexer=IndexerSizes(32, 128, 2048),
        keys={
            "expert_gating_func": u32(2),
            "expert_shared_count": u32(1),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(2.5),
        },
    ),
    "deepseek-v4-flash": CompressedShape(
        *("deepseek4", "284B.A13B", 43, 4096, 64, 1, 512, 2048, 129280),
        *(10000.0, 1048576, 1e-6, 256, 6),
        shared=2048,
        rotated=64,
        choice_bias=True,
        ratios=(0, *(0 if layer == 1 else 4 if layer % 2 == 0 else 128 for layer in range(1, 43))),
        q_rank=1024,
        groups=8,
        out_rank=1024,
        index_heads=64,
        index_length=128,
        by_token=3,
        keys={
            "attention.sliding_window": u32(128),
            "attention.indexer.top_k": u32(512),
            "attention.compress_rope_freq_base": f32(160000.0),
            "expert_gating_func": u32(4),
            "expert_shared_count": u32(1),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(1.5),
            "swiglu_clamp_exp": f32(10.0),
            "rope.scaling.type": string("yarn"),
            "rope.scaling.factor": f32(16.0),
            "rope.scaling.original_context_length": u32(65536),
        },
    ),
    "hy4-preview": ChoosingShape(
        *("hy_v4", "770B.A49B", 78, 6144, 64, 1, 256, 2048, 120832),
        *(10000000.0, 1 << 20, 1e-5, 256, 8),
        n_dense=1,
        dense_hidden=18432,
        shared=2048,
        choice_bias=True,
        latent=LatentSizes(2048, 512, 192, 64, 256),
        indexer=IndexerSizes(32, 128, 2048),
        gate_apart=True,
        sinks=True,
        streams=StreamSizes(magnitude=2.0),
        owners=(0, *range(1, 78, 4)),
        rotated=64,
        keys={
            "expert_gating_func": u32(2),
            "expert_shared_count": u32(1),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(2.827),
            "swiglu_clamp_exp": f32(10.0),
        },
    ),
}
