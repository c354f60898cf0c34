"""Shapes of models whose feed-forward layers have no experts."""

from __future__ import annotations

from typing import Any

from ...formats.values import Value, f32, string, u32
from .shape import QKV, Shape


def _llama(
    name: str,
    sizes: tuple[int, int, int, int, int, int, int],
    context: int = 131072,
    base: float = 500000.0,
) -> Shape:
    return Shape("llama", name, *sizes, base, context, 1e-5, llama3_rope=True)


def _apertus(name: str, layers: int, width: int, heads: int, hidden: int) -> Shape:
    """Numbers of the activation are those before training."""
    numbers = {"alpha_p": 0.20343, "alpha_n": -1.0502256, "beta": 0.5, "eps": -1e-6}
    return Shape(
        "apertus",
        name,
        *(layers, width, heads, 8, 128, hidden, 131072, 12000000.0, 65536, 1e-5),
        llama3_rope=True,
        head_norms=True,
        gated=False,
        bare_keys={f"xielu.{key}": f32(number) for key, number in numbers.items()},
    )


def _phi3(
    name: str,
    sizes: tuple[int, int, int, int, int, int, int],
    base: float,
    context: int,
    *,
    window: int = 0,
    **more: Any,
) -> Shape:
    keys = {"attention.sliding_window": u32(window)}
    if more.get("long_rope"):
        keys |= {
            "rope.scaling.original_context_length": u32(4096),
            "rope.scaling.attn_factor": f32(1.1902381),
        }
    return Shape("phi3", name, *sizes, base, context, 1e-5, joined=True, keys=keys, **more)


def _exaone4(
    name: str, sizes: tuple[int, int, int, int, int, int, int], context: int, **more: Any
) -> Shape:
    return Shape(
        "exaone4",
        name,
        *sizes,
        1000000.0,
        context,
        1e-5,
        llama3_rope=True,
        head_norms=True,
        attn_norm="",
        ffn_norm="",
        post_norms=("post_attention_norm", "post_ffw_norm"),
        **more,
    )


def _hunyuan(name: str, sizes: tuple[int, int, int, int, int, int, int]) -> Shape:
    base = 11158840.0  # stretched
    return Shape("hunyuan-dense", name, *sizes, base, 262144, 1e-5, head_norms=True, tied=True)


def _glm4(name: str, sizes: tuple[int, int, int, int, int, int, int]) -> Shape:
    """GLM-4-0414."""
    return Shape(
        "glm4",
        name,
        *sizes,
        10000.0,
        32768,
        1e-5,
        rotated=64,
        joined_gate_up=True,
        post_norms=("post_attention_norm", "post_ffw_norm"),
    )


def _olmo(
    name: str,
    sizes: tuple[int, int, int, int, int, int, int],
    context: int,
    keys: dict[str, Value],
) -> Shape:
    """OLMo 2 or 3."""
    return Shape(
        "olmo2",
        name,
        *sizes,
        500000.0,
        context,
        1e-6,
        joined_norms=True,
        attn_norm="",
        ffn_norm="",
        post_norms=("post_attention_norm", "post_ffw_norm"),
        keys=keys,
    )


_OLMO3 = {  # every fourth layer sees all positions, as in files that do not say
    "attention.sliding_window": u32(4096),
    "rope.scaling.type": string("yarn"),
    "rope.scaling.factor": f32(8.0),
    "rope.scaling.original_context_length": u32(8192),
}


def _cohere(
    architecture: str,
    name: str,
    sizes: tuple[int, int, int, int, int, int],
    base: float,
    context: int,
    logit_scale: float,
    **keys: Value,
) -> Shape:
    """sizes: layers, width, heads, key/value heads, head, hidden size."""
    return Shape(
        architecture,
        name,
        *sizes,
        256000,
        base,
        context,
        1e-5,
        layer_norm=True,
        norm_biases=False,
        side_by_side=True,
        tied=True,
        keys={"logit_scale": f32(logit_scale), **keys},
    )


# Sizes: layers, width, heads, key/value heads, head, hidden size, vocabulary.
DENSE_SHAPES: dict[str, Shape] = {
    "llama-8b": _llama("8B", (32, 4096, 32, 8, 128, 14336, 128256)),
    "llama-70b": _llama("70B", (80, 8192, 64, 8, 128, 28672, 128256)),
    "llama-1b": _llama("1B", (16, 2048, 32, 8, 64, 8192, 128256)),
    "llama-tiny": _llama("tiny", (2, 256, 4, 2, 64, 512, 512), 8192, 10000.0),
    "qwen3-8b": Shape(
        "qwen3",
        "8B",
        *(36, 4096, 32, 8, 128, 12288, 151936),
        1000000.0,
        40960,
        1e-6,
        head_norms=True,
    ),
    "phi3-mini": _phi3("mini", (32, 3072, 32, 32, 96, 8192, 32064), 10000.0, 4096, window=2047),
    "phi4": _phi3("14B", (40, 5120, 40, 10, 128, 17920, 100352), 250000.0, 16384),
    "phi4-mini": _phi3(
        "mini",
        (32, 3072, 24, 8, 128, 8192, 200064),
        10000.0,
        131072,
        long_rope=True,
        rotated=96,
        tied=True,
    ),
    "starcoder2-15b": Shape(
        "starcoder2",
        "15B",
        *(40, 6144, 48, 4, 128, 24576, 49152),
        100000.0,
        16384,
        1e-5,
        biases=(*QKV, "attn_output", "ffn_up", "ffn_down"),
        layer_norm=True,
        gated=False,
        keys={"attention.sliding_window": u32(4096)},
    ),
    "qwen2.5-7b": Shape(
        "qwen2",
        "7B",
        *(28, 3584, 28, 4, 128, 18944, 152064),
        1000000.0,
        32768,
        1e-6,
        biases=QKV,
    ),
    "ministral3-14b": Shape(
        "mistral3",
        "14B",
        *(40, 5120, 32, 8, 128, 16384, 131072),
        1000000000.0,
        262144,
        1e-5,
        keys={
            "rope.scaling.type": string("yarn"),
            "rope.scaling.factor": f32(16.0),
            "rope.scaling.original_context_length": u32(16384),
            "rope.scaling.yarn_log_multiplier": f32(1.0),
            "attention.temperature_scale": f32(0.1),
        },
    ),
    "seed-oss-36b": Shape(
        "seed_oss",
        "36B",
        *(64, 5120, 80, 8, 128, 27648, 155136),
        10000000.0,
        524288,
        1e-6,
        biases=QKV,
        ffn_norm="post_attention_norm",
    ),
    "ernie-4.5-0.3b": Shape(
        "ernie4_5",
        "0.3B",
        *(18, 1024, 16, 2, 128, 3072, 103424),
        500000.0,
        131072,
        1e-5,
        tied=True,
    ),
    "exaone-4.0-1.2b": _exaone4("1.2B", (30, 2048, 32, 8, 64, 4096, 102400), 65536, tied=True),
    "exaone-4.0-32b": _exaone4(
        "32B",
        (64, 5120, 40, 8, 128, 27392, 102400),
        131072,
        keys={"attention.sliding_window": u32(4096)},
    ),
    "hunyuan-0.5b": _hunyuan("0.5B", (24, 1024, 16, 8, 128, 3584, 120818)),
    "hunyuan-7b": _hunyuan("7B", (32, 4096, 32, 8, 128, 14336, 128167)),
    "glm4-9b": _glm4("9B", (40, 4096, 32, 2, 128, 13696, 151552)),
    "glm4-32b": _glm4("32B", (61, 6144, 48, 2, 128, 23040, 151552)),
    "afm-4.5b": Shape(
        "arcee",
        "4.5B",
        *(36, 2560, 20, 4, 128, 18432, 128004),
        10000.0,
        65536,
        1e-5,
        gated=False,
        keys={
            "rope.scaling.type": string("yarn"),
            "rope.scaling.factor": f32(20.0),
            "rope.scaling.original_context_length": u32(4096),
        },
    ),
    "qwen3-vl-8b": Shape(
        "qwen3vl",
        "8B",
        *(36, 4096, 32, 8, 128, 12288, 151936, 5000000.0, 262144, 1e-6),
        head_norms=True,
    ),
    "internlm2-7b": Shape(
        "internlm2", "7B", 32, 4096, 32, 8, 128, 14336, 92544, 1000000.0, 32768, 1e-5
    ),
    "internlm2-20b": Shape(
        "internlm2", "20B", 48, 6144, 48, 8, 128, 16384, 92544, 1000000.0, 32768, 1e-5
    ),
    "apertus-8b": _apertus("8B", 32, 4096, 32, 21504),
    "apertus-70b": _apertus("70B", 80, 8192, 64, 43008),
    "olmo2-7b": _olmo("7B", (32, 4096, 32, 32, 128, 11008, 100352), 4096, {}),
    "olmo3-32b": _olmo("32B", (64, 5120, 40, 8, 128, 27648, 100278), 65536, _OLMO3),
    "command-r-35b": _cohere(
        "command-r", "35B", (40, 8192, 64, 64, 128, 22528), 8000000.0, 131072, 0.0625
    ),
    "command-r7b": _cohere(
        "cohere2",
        "8B",
        (32, 4096, 32, 8, 128, 14336),
        50000.0,
        132096,
        0.25,
        **{"attention.sliding_window": u32(4096)},
    ),
    "granite-3.3-8b": Shape(
        "granite",
        "8B",
        *(40, 4096, 32, 8, 128, 12800, 49159),
        10000000.0,
        131072,
        1e-5,
        tied=True,
        keys={
            "attention.scale": f32(1 / 128),
            "embedding_scale": f32(12.0),
            "residual_scale": f32(0.22),
            "logit_scale": f32(16.0),
        },
    ),
    "nemotron-mini-4b": Shape(
        "nemotron",
        "4B",
        *(32, 3072, 24, 8, 128, 9216, 256000),
        10000.0,
        4096,
        1e-5,
        rotated=64,
        layer_norm=True,
        gated=False,
    ),
    "stablelm-2-1.6b": Shape(
        "stablelm",
        "1.6B",
        *(24, 2048, 32, 32, 64, 5632, 100352),
        10000.0,
        4096,
        1e-5,
        rotated=16,
        biases=QKV,
        layer_norm=True,
    ),
    "minicpm-2b": Shape(
        "minicpm",
        "2B",
        *(40, 2304, 36, 36, 64, 5760, 122753),
        10000.0,
        4096,
        1e-5,
        tied=True,
        keys={
            "embedding_scale": f32(12.0),
            "residual_scale": f32(1.4 / 40**0.5),
            "logit_scale": f32(9.0),
        },
    ),
    "smollm3-3b": Shape(
        "smollm3",
        "3B",
        *(36, 2048, 16, 4, 128, 11008, 128256),
        5000000.0,
        65536,
        1e-6,
        tied=True,
    ),
}
