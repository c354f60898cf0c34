"""Types in place of one that the rows of a tensor cannot have."""

from __future__ import annotations

from ...errors import ShapeError
from ...formats.source import TensorInfo
from ...formats.types import GGMLType, ggml_type
from .mix_rules import RuleSet

BY_ROW = "looked up by row"  # why a type is not interleaved
# Fallback of a type whose block does not divide the row length, for types of 256 elements whose
# fallback is not IQ4_NL, and some others.
_SHORT_ROW_TYPES = {
    "Q5_0": ("IQ4_K", "IQ4_K_R4", "Q4_K", "Q4_K_R4", "IQ5_KS", "IQ5_KS_R4"),
    "Q6_0": ("IQ5_K", "IQ5_K_R4", "Q5_K", "Q5_K_R4"),
    "Q8_0": ("IQ6_K", "Q6_K", "Q6_K_R4", "Q8_K_R8", "Q8_K_R16"),
    "Q4_0": ("TQ1_0", "TQ2_0", "Q2_0"),
}
_SHORT_ROWS = {wide: narrow for narrow, wides in _SHORT_ROW_TYPES.items() for wide in wides}
# Types of ternary models, for which no other type is a fallback.
_NO_SHORT_ROWS = ("IQ1_BN", "IQ2_BN", "IQ2_BN_R4")
# Plain types of interleaved ones that no plain type repacks into.
_PLAIN_STAND_IN = {"IQ1_S_R4": "IQ1_S", "IQ1_M_R4": "IQ1_M", "Q8_K_R8": "Q8_0", "Q8_K_R16": "Q8_0"}


def type_that_fits(
    tensor: TensorInfo, wanted: GGMLType, by_row: tuple[str, ...], rules: RuleSet
) -> tuple[GGMLType, str]:
    """Return `wanted`, or its fallback where rows or row counts do not allow it, and the reason,
    empty for none. by_row: names of tensors that are looked up by row, which are not interleaved.
    Raise ShapeError for rows without a fallback.
    """
    chosen, note = wanted, ""
    if tensor.n_cols % chosen.block_size:
        if wanted.name in _NO_SHORT_ROWS:
            raise ShapeError(
                f"row length {tensor.n_cols} is not a multiple of {wanted.block_size}, and {wanted}"
                " has no fallback",
                tensor=tensor.name,
            )
        instead = rules.short_rows.get(wanted.name) or _SHORT_ROWS.get(
            wanted.name, "IQ4_NL" if wanted.block_size == 256 else "F16"
        )
        chosen = ggml_type(instead)
        if tensor.n_cols % chosen.block_size:
            chosen = ggml_type("F16")
        note = (
            f"row length {tensor.n_cols} is not a multiple of {wanted.block_size}: {chosen} instead"
            f" of {wanted}"
        )
    rows = tensor.shape[-2]
    if chosen.is_interleaved and tensor.name in by_row:
        chosen = _plain_of(chosen)
        note = f"{BY_ROW}: {chosen} instead of {wanted}"
    elif rows % chosen.group_rows:
        group, chosen = chosen.group_rows, _plain_of(chosen)
        note = f"{rows} rows are not a multiple of {group}: {chosen} instead of {wanted}"
    return chosen, note


def _plain_of(type: GGMLType) -> GGMLType:
    """Return the type whose rows an interleaved type groups, or the type itself if it is plain."""
    name = type.base or _PLAIN_STAND_IN.get(type.name)
    return ggml_type(name) if name else type
