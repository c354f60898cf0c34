"""Plans of one type for every tensor that can be quantized."""

from __future__ import annotations

from collections.abc import Sequence

from iqforge.formats.source import TensorInfo
from iqforge.formats.types import GGMLType
from iqforge.quantize.plan.overrides import Overrides
from iqforge.quantize.plan.plan import PlannedTensor, plan_types


def plan_uniform(
    tensors: Sequence[TensorInfo],
    base: GGMLType,
    *,
    token_embedding_type: str | None = None,
    output_tensor_type: str | None = None,
    leave_output_tensor: bool = False,
    allow_requantize: bool = False,
) -> list[PlannedTensor]:
    """Plan one type for every candidate of any model, with two explicit overrides; see
    `plan_preset`.
    """
    overrides = Overrides.of(token_embedding=token_embedding_type, output_tensor=output_tensor_type)
    return plan_types(
        tensors,
        lambda tensor: (base, "one type for all"),
        overrides,
        "",
        leave_output_tensor,
        allow_requantize,
    )
