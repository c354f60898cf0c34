"""Shapes of models by name, for random weights."""

from __future__ import annotations

from .delta_shapes import DELTA_SHAPES
from .dense_shapes import DENSE_SHAPES
from .expert_shapes import EXPERT_SHAPES
from .gemma_shapes import GEMMA_SHAPES
from .hybrid_shapes import HYBRID_SHAPES
from .latent_shapes import LATENT_SHAPES
from .shape import Shape
from .window_shapes import WINDOW_SHAPES

SHAPES: dict[str, Shape] = {
    **DENSE_SHAPES,
    **EXPERT_SHAPES,
    **DELTA_SHAPES,
    **HYBRID_SHAPES,
    **LATENT_SHAPES,
    **GEMMA_SHAPES,
    **WINDOW_SHAPES,
}
