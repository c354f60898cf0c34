"""Plan what every tensor of a model becomes when it is quantized."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import IqforgeError, UsageError
from ..formats.codecs.codec import decodable_types
from ..quantize.searches import encodable_types
from .source import preset_recipe

if TYPE_CHECKING:
    from ..formats.source import Source
    from ..imatrix.data import Imatrix
    from ..quantize.plan.plan import PlannedTensor
    from ..quantize.plan.recipe import Recipe


def plan_quantization(
    source: Source, recipe: Recipe | str, imatrix: Imatrix | None = None, **options: Any
) -> list[PlannedTensor]:
    """Return what every tensor of `source` becomes. Nothing is read. `recipe` may name a preset,
    with `options` of `Recipe`.

    Tensors of a checkpoint that are not quantized get the type the converter gives them (norms
    F32), as if it had been converted first. Those that it stores in blocks (MXFP4) stay so, unless
    the recipe allows requantizing.
    """
    from ..convert.source import CheckpointSource
    from ..convert.tensors.outtype import plan_outtype
    from ..quantize.plan.plan import check_supported

    recipe = preset_recipe(recipe, options, plan_quantization)
    checkpoint = isinstance(source.origin, CheckpointSource)
    if checkpoint and recipe.copies:
        raise UsageError(
            "COPY takes a GGUF file; iqforge convert makes one of a checkpoint", file=source.path
        )
    recipe.check_source(source.tensors)
    converted = plan_outtype(source, "auto")[0] if checkpoint else source.tensors
    try:
        planned = recipe.plan(
            converted,
            source.metadata,
            imatrix=imatrix is not None and bool(imatrix.entries),
            allow_requantize=checkpoint,
        )
        if checkpoint and not recipe.allow_requantize:
            planned = [_keeping_blocks(plan) for plan in planned]
        planned = [replace(plan, source=stored) for plan, stored in zip(planned, source.tensors)]
        check_supported(planned, decodable_types(), encodable_types())
        recipe.check_importance(
            planned,
            None if imatrix is None else lambda t: imatrix.entry(t.name, t.shape) is not None,
        )
    except IqforgeError as error:  # a plan knows tensors, not where they come from
        if error.tensor is not None and error.file is None:
            error.file = source.path
        raise
    return planned


def _keeping_blocks(plan: PlannedTensor) -> PlannedTensor:
    """Return the plan; of a tensor that a checkpoint stores in blocks, the plan to keep it."""
    from ..quantize.plan.plan import PlannedTensor

    if not plan.source.type.is_quantized:
        return plan
    return PlannedTensor(plan.source, plan.source, "stored in blocks: kept")
