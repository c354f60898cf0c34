"""Shapes of models with few layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from iqforge.runtime.bench.gemma_shapes import Gemma3nShape, Gemma4Shape
from iqforge.runtime.bench.hybrid_shapes import HybridShape, NemotronShape
from iqforge.runtime.bench.shape import Shape
from iqforge.runtime.bench.shapes import SHAPES


def shortened(name: str, all_experts: bool = False) -> Shape:
    """Return a shape with two or four layers of the same sizes, and few experts. all_experts: each
    token uses all of them, so that rounding changes no choice.
    """
    shape = SHAPES[name]
    few: dict[str, Any] = {"n_layers": 2, "n_dense": min(1, shape.n_dense), "n_vocab": 4096}
    if shape.n_experts:
        few["n_experts"] = min(32, shape.n_experts)
    if all_experts and shape.n_experts:
        few["n_experts"] = shape.n_used
        keys = shape.keys.items()
        few["keys"] = {key: value for key, value in keys if not key.startswith("expert_group")}
    if shape.delta is not None:
        few["delta"] = replace(shape.delta, interval=2)
    # A layer of each kind, and one that uses what it keeps.
    if isinstance(shape, (Gemma3nShape, Gemma4Shape)):
        shared = min(2, shape.shared_kv)
        few |= {"n_layers": 2 + shared, "period": 2, "shared_kv": shared}
    if isinstance(shape, HybridShape):
        few["attending"] = (1,)
    if isinstance(shape, NemotronShape):  # a layer of each kind
        kinds = "".join(sorted(set(shape.pattern)))
        few |= {"n_layers": len(kinds), "pattern": kinds}
    if shape.indexer is not None:
        few["indexer"] = replace(shape.indexer, top_k=128)  # less than the text is long
    return replace(shape, **few)
