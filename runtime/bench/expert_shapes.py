"""Shapes of models with experts and plain attention."""

from __future__ import annotations

from ...formats.values import boolean, f32, string, u32
from .shape import QKV, Shape

_YARN = {
    "rope.scaling.type": string("yarn"),
    "rope.scaling.factor": f32(32.0),
    "rope.scaling.original_context_length": u32(4096),
}


def _qwen3moe(
    name: str,
    sizes: tuple[int, int, int, int, int, int, int],
    experts: tuple[int, int] = (128, 8),
    context: int = 40960,
) -> Shape:
    return Shape("qwen3moe", name, *sizes, 1000000.0, context, 1e-6, *experts, head_norms=True)


def _gpt_oss(name: str, n_layers: int, n_experts: int) -> Shape:
    return Shape(
        "gpt-oss",
        name,
        n_layers,
        2880,
        64,
        8,
        64,
        2880,
        201088,
        150000.0,
        131072,
        1e-5,
        n_experts,
        4,
        sinks=True,
        biases=(
            *QKV,
            "attn_output",
            "ffn_gate_inp",
            "ffn_gate_exps",
            "ffn_up_exps",
            "ffn_down_exps",
        ),
        ffn_norm="post_attention_norm",
        keys={"attention.sliding_window": u32(128), **_YARN},
    )


def _ling(
    name: str,
    sizes: tuple[int, int, int, int, int, int],
    n_dense: int,
    dense_hidden: int,
) -> Shape:
    """Ling 2.0. sizes: layers, width, heads, key/value heads, head, hidden size of an expert."""
    return Shape(
        "bailingmoe2",
        name,
        *sizes,
        157184,
        600000.0,
        32768,
        1e-6,
        256,
        8,
        n_dense=n_dense,
        dense_hidden=dense_hidden,
        shared=sizes[-1],
        rotated=64,
        head_norms=True,
        choice_bias=True,
        joined_heads=True,
        keys={
            "expert_gating_func": u32(2),
            "expert_group_count": u32(8),
            "expert_group_used_count": u32(4),
            "expert_shared_count": u32(1),
            "expert_shared_feed_forward_length": u32(sizes[-1]),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(2.5),
        },
    )


EXPERT_SHAPES: dict[str, Shape] = {
    "qwen3-30b-a3b": _qwen3moe("30B.A3B", (48, 2048, 32, 4, 128, 768, 151936)),
    "qwen3-235b-a22b": _qwen3moe("235B.A22B", (94, 4096, 64, 4, 128, 1536, 151936)),
    "qwen3moe-tiny": _qwen3moe("tiny", (2, 256, 4, 2, 128, 256, 512), (8, 2), 8192),
    "glm-4.5-air": Shape(
        "glm4moe",
        "106B.A12B",
        46,
        4096,
        96,
        8,
        128,
        1408,
        151552,
        1000000.0,
        131072,
        1e-5,
        128,
        8,
        n_dense=1,
        dense_hidden=10944,
        shared=1408,
        rotated=64,
        biases=QKV,
        choice_bias=True,
        ffn_norm="post_attention_norm",
        keys={
            "expert_gating_func": u32(2),
            "expert_shared_count": u32(1),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(1.0),
        },
    ),
    "ernie-4.5-21b-a3b": Shape(
        "ernie4_5-moe",
        "21B.A3B",
        28,
        2560,
        20,
        4,
        128,
        1536,
        103424,
        500000.0,
        131072,
        1e-5,
        64,
        6,
        n_dense=1,
        dense_hidden=12288,
        shared=3072,
        choice_bias=True,
        tied=True,
        keys={
            "expert_shared_count": u32(2),
            "expert_shared_feed_forward_length": u32(3072),
            "interleave_moe_layer_step": u32(1),
        },
    ),
    "ling-mini-2.0": _ling("16B.A1.4B", (20, 2048, 16, 4, 128, 512), 1, 5120),
    "ling-1t": _ling("1T.A50B", (80, 8192, 64, 8, 128, 2048), 4, 18432),
    "gpt-oss-20b": _gpt_oss("20B", 24, 32),
    "gpt-oss-120b": _gpt_oss("120B", 36, 128),
    "qwen1.5-moe-a2.7b": Shape(
        "qwen2moe",
        "14B.A2.7B",
        24,
        2048,
        16,
        16,
        128,
        1408,
        151936,
        1000000.0,
        8192,
        1e-6,
        60,
        4,
        shared=5632,
        shared_gate=True,
        biases=QKV,
        keys={"expert_shared_feed_forward_length": u32(5632)},
    ),
    "mixtral-8x7b": Shape(
        "llama",
        "8x7B",
        32,
        4096,
        32,
        8,
        128,
        14336,
        32000,
        1000000.0,
        32768,
        1e-5,
        8,
        2,
    ),
}
