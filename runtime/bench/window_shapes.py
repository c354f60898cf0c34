"""Shapes of models whose layers mostly see a window or a chunk of the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...formats.types import GGMLType
from ...formats.values import Value, ValueType, array, boolean, f32, string, u32
from .shape import Shape


@dataclass(frozen=True)
class MimoShape(Shape):
    """MiMo-V2-Flash: layers with a window, all but the first and every sixth, have sinks and
    `near_kv_heads` heads of keys and values.
    """

    near_kv_heads: int = 1

    @property
    def near(self) -> list[bool]:
        """Return which layers have the window."""
        return [layer > 0 and (layer + 1) % 6 != 0 for layer in range(self.n_layers)]

    @property
    def least_layers(self) -> int:
        return 2

    def _mixer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        own = self
        if self.near[layer]:
            own = replace(self, n_kv_heads=self.near_kv_heads, sinks=True)
        yield from Shape._mixer(own, layer)

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        kv_heads = [self.near_kv_heads if near else self.n_kv_heads for near in self.near]
        pattern = [int(near) for near in self.near]
        return super().metadata(type) | {
            "mimo2.attention.head_count_kv": array(ValueType.INT32, kv_heads),
            "mimo2.attention.sliding_window_pattern": array(ValueType.INT32, pattern),
        }


@dataclass(frozen=True)
class StepShape(Shape):
    """Step-3.5-Flash: layers with a window, all but every fourth from the first on, have
    `near_heads` heads. limits: of what experts, and the shared one, join in the last two layers.
    """

    near_heads: int = 1
    limits: tuple[float, float] = (0.0, 0.0)

    @property
    def near(self) -> list[bool]:
        """Return which layers have the window."""
        return [layer % 4 != 0 for layer in range(self.n_layers)]

    @property
    def least_layers(self) -> int:
        return self.n_dense + 2

    def _mixer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        own = replace(self, n_heads=self.near_heads) if self.near[layer] else self
        yield from Shape._mixer(own, layer)

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        heads = [self.near_heads if near else self.n_heads for near in self.near]
        found = super().metadata(type) | {
            "step35.attention.head_count": array(ValueType.INT32, heads),
            "step35.attention.sliding_window_pattern": array(ValueType.BOOL, self.near),
        }
        for name, limit in zip(("exp", "shexp"), self.limits, strict=True):
            limits = [0.0] * (self.n_layers - 2) + [limit] * 2
            found[f"step35.swiglu_clamp_{name}"] = array(ValueType.FLOAT32, limits)
        return found


@dataclass(frozen=True)
class CohereShape(Shape):
    """Cohere's models with experts: the layers after the dense ones have a window, but for every
    fourth.
    """

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        near = [
            layer >= self.n_dense and (layer - self.n_dense + 1) % 4 != 0
            for layer in range(self.n_layers)
        ]
        pattern = {"cohere2moe.attention.sliding_window_pattern": array(ValueType.BOOL, near)}
        dense = {"cohere2moe.leading_dense_block_count": u32(self.n_dense)}
        return super().metadata(type) | pattern | dense


@dataclass(frozen=True)
class LagunaShape(Shape):
    """Laguna: layers with a window, all but every fourth from the first on, have `near_heads`
    heads, rotated whole.
    """

    near_heads: int = 1

    @property
    def near(self) -> list[bool]:
        """Return which layers have the window."""
        return [layer % 4 != 0 for layer in range(self.n_layers)]

    @property
    def least_layers(self) -> int:
        return self.n_dense + 1

    def _mixer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        own = replace(self, n_heads=self.near_heads) if self.near[layer] else self
        yield from Shape._mixer(own, layer)

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        heads = [self.near_heads if near else self.n_heads for near in self.near]
        return super().metadata(type) | {
            "laguna.attention.head_count": array(ValueType.INT32, heads)
        }


@dataclass(frozen=True)
class NearShape(Shape):
    """A model whose layers have a window, all but every fourth, and the first one if `first_far`.
    joins_shared: gate and up of the shared expert are one matrix.
    """

    first_far: bool = False
    joins_shared: bool = False

    @property
    def near(self) -> list[bool]:
        """Return which layers have the window."""
        far = (0,) if self.first_far else ()
        return [layer not in far and (layer + 1) % 4 != 0 for layer in range(self.n_layers)]

    def _gated(
        self, suffix: str, stack: tuple[int, ...], hidden: int
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        joined = self.joins_shared and suffix == "_shexp"
        yield from Shape._gated(replace(self, joined_gate_up=joined), suffix, stack, hidden)

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        pattern = array(ValueType.BOOL, self.near)
        key = f"{self.architecture}.attention.sliding_window_pattern"
        return super().metadata(type) | {key: pattern}


def _llama4(name: str, n_experts: int, interval: int, context: int, *, scaled: bool) -> Shape:
    return Shape(
        "llama4",
        name,
        *(48, 5120, 40, 8, 128, 8192),
        *(202048, 500000.0, context, 1e-5),
        n_experts,
        1,
        llama3_rope=scaled,
        interval=interval,
        dense_hidden=16384,
        shared=8192,
        keys={"interleave_moe_layer_step": u32(interval)},
    )


def _laguna(
    name: str,
    sizes: tuple[int, int, int, int, int, int],
    experts: tuple[int, int],
    near_heads: int,
    dense_hidden: int,
    scaling: tuple[float, int, float],
) -> Shape:
    """Laguna. sizes: layers, width, heads, key/value heads, head, hidden size of an expert.
    scaling: factor of YaRN, the context before it, its `beta_fast`.
    """
    factor, original, beta = scaling
    return LagunaShape(
        "laguna",
        name,
        *sizes,
        *(100352, 500000.0, int(factor * original), 1e-6),
        *experts,
        n_dense=1,
        dense_hidden=dense_hidden,
        shared=sizes[-1],
        rotated=64,
        gate=True,
        gate_apart=True,
        head_gates=True,
        head_norms=True,
        choice_bias=True,
        near_heads=near_heads,
        keys={
            "attention.sliding_window": u32(512),
            "expert_gating_func": u32(2),
            "expert_shared_feed_forward_length": u32(sizes[-1]),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(2.5),
            "rope.dimension_count_swa": u32(128),
            "rope.freq_base_swa": f32(10000.0),
            "rope.scaling.type": string("yarn"),
            "rope.scaling.factor": f32(factor),
            "rope.scaling.original_context_length": u32(original),
            "rope.scaling.yarn_beta_fast": f32(beta),
        },
    )


def _trinity(
    name: str,
    sizes: tuple[int, int, int, int, int, int],
    experts: tuple[int, int],
    dense: tuple[int, int],
    window: int,
    scale: float,
) -> Shape:
    """Trinity. sizes: layers, width, heads, key/value heads, head, hidden size of an expert. dense:
    leading layers and their hidden size.
    """
    return Shape(
        "afmoe",
        name,
        *sizes,
        200192,
        10000.0,
        131072,
        1e-5,
        *experts,
        n_dense=dense[0],
        dense_hidden=dense[1],
        shared=sizes[-1],
        gate=True,
        gate_apart=True,
        head_norms=True,
        choice_bias=True,
        post_norms=("post_attention_norm", "post_ffw_norm"),
        keys={
            "attention.sliding_window": u32(window),
            "expert_gating_func": u32(2),
            "expert_shared_count": u32(1),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(scale),
        },
    )


WINDOW_SHAPES: dict[str, Shape] = {
    "granite-swash-2b": NearShape(
        "granite_swa",
        "2B",
        *(24, 2560, 20, 4, 128, 8192),
        *(100352, 10000.0, 8192, 1e-5),
        first_far=True,
        sinks=True,
        tied=True,
        keys={"attention.sliding_window": u32(128), "logit_scale": f32(1.0)},
    ),
    "granite-swash-3b-a600m": NearShape(
        "granite_swa",
        "3B.A600M",
        *(28, 1280, 20, 4, 64, 512),
        *(100352, 10000.0, 8192, 1e-5),
        *(48, 4),
        first_far=True,
        shared=1280,
        joins_shared=True,
        merged=True,
        sinks=True,
        tied=True,
        keys={
            "attention.scale": f32(1 / 64),
            "attention.sliding_window": u32(128),
            "embedding_scale": f32(12.0),
            "expert_shared_feed_forward_length": u32(1280),
            "logit_scale": f32(5.0),
            "residual_scale": f32(0.26),
        },
    ),
    "llama-4-scout": _llama4("109B.A17B", 16, 1, 10485760, scaled=True),
    "llama-4-maverick": _llama4("400B.A17B", 128, 2, 1048576, scaled=False),
    "trinity-mini": _trinity(
        "26B.A3B", (32, 2048, 32, 4, 128, 1024), (128, 8), (2, 6144), 2048, 2.826
    ),
    "trinity-large": _trinity(
        "398B.A13B", (60, 3072, 48, 8, 128, 3072), (256, 4), (6, 12288), 4096, 2.448
    ),
    "mellum2-12b-a2.5b": NearShape(
        "mellum",
        "12B.A2.5B",
        *(28, 2304, 32, 4, 128, 896),
        *(98304, 500000.0, 131072, 1e-6),
        *(64, 8),
        head_norms=True,
        keys={"attention.sliding_window": u32(1024)},
    ),
    "laguna-xs.2": _laguna(
        "33B.A3B", (40, 2048, 48, 8, 128, 512), (256, 8), 64, 8192, (32.0, 4096, 64.0)
    ),
    "laguna-s-2.1": _laguna(
        "118B.A8B", (48, 3072, 48, 8, 128, 1024), (256, 10), 72, 12288, (128.0, 8192, 32.0)
    ),
    "mimo-v2-flash": MimoShape(
        "mimo2",
        "309B.A15B",
        *(48, 4096, 64, 4, 192, 2048),
        *(152576, 5000000.0, 262144, 1e-5),
        *(256, 8),
        n_dense=1,
        dense_hidden=16384,
        value_head=128,
        rotated=64,
        choice_bias=True,
        near_kv_heads=8,
        keys={
            "attention.sliding_window": u32(128),
            "attention.value_scale": f32(0.707),
            "expert_gating_func": u32(2),
            "rope.freq_base_swa": f32(10000.0),
        },
    ),
    "k-exaone": Shape(
        "exaone-moe",
        "236B.A23B",
        *(48, 6144, 64, 8, 128, 2048),
        *(153600, 1000000.0, 262144, 1e-5),
        *(128, 8),
        n_dense=1,
        dense_hidden=18432,
        shared=2048,
        head_norms=True,
        choice_bias=True,
        keys={
            "attention.sliding_window": u32(128),
            "expert_gating_func": u32(2),
            "expert_shared_count": u32(1),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(2.5),
        },
    ),
    "north-mini-code": CohereShape(
        "cohere2moe",
        "30B.A3B",
        *(49, 2048, 32, 4, 128, 768),
        *(262144, 50000.0, 500000, 1e-6),
        *(128, 8),
        n_dense=1,
        dense_hidden=3072,
        side_by_side=True,
        tied=True,
        keys={
            "attention.sliding_window": u32(4096),
            "expert_gating_func": u32(2),
            "expert_weights_norm": boolean(False),
            "logit_scale": f32(1.0),
        },
    ),
    "command-a-plus": CohereShape(
        "cohere2moe",
        "218B.A25B",
        *(32, 4096, 128, 8, 128, 4096),
        *(262144, 50000.0, 200000, 1e-5),
        *(128, 8),
        shared=16384,
        side_by_side=True,
        layer_norm=True,
        norm_biases=False,
        tied=True,
        keys={
            "attention.sliding_window": u32(4096),
            "expert_gating_func": u32(2),
            "expert_shared_count": u32(4),
            "expert_shared_feed_forward_length": u32(16384),
            "expert_weights_norm": boolean(True),
        },
    ),
    "step-3.5-flash": StepShape(
        "step35",
        "196B.A11B",
        *(45, 4096, 64, 8, 128, 1280),
        *(128896, 5000000.0, 262144, 1e-5),
        *(288, 8),
        llama3_rope=True,
        n_dense=3,
        dense_hidden=11264,
        shared=1280,
        gate=True,
        gate_apart=True,
        head_gates=True,
        head_norms=True,
        choice_bias=True,
        near_heads=96,
        limits=(7.0, 16.0),
        keys={
            "attention.sliding_window": u32(512),
            "expert_gating_func": u32(2),
            "expert_shared_feed_forward_length": u32(1280),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(3.0),
            "rope.freq_base_swa": f32(10000.0),
        },
    ),
}
