"""Shapes of models with experts whose layers mostly see a window or a chunk of the text."""

from __future__ import annotations

from ...formats.values import u32
from .shape import Shape


def _llama4(name: str, n_experts: int, interval: int, context: int, *, scaled: bool) -> Shape:
    return Shape(
        "llama4",
        name,
        48,
        5120,
        40,
        8,
        128,
        8192,
        202048,
        500000.0,
        context,
        1e-5,
        n_experts,
        1,
        llama3_rope=scaled,
        interval=interval,
        dense_hidden=16384,
        shared=8192,
        keys={"interleave_moe_layer_step": u32(interval)},
    )


WINDOW_SHAPES: dict[str, Shape] = {
    "llama-4-scout": _llama4("109B.A17B", 16, 1, 10485760, scaled=True),
    "llama-4-maverick": _llama4("400B.A17B", 128, 2, 1048576, scaled=False),
}
