"""Which type every tensor gets: decided for all tensors before anything is read or written.

Follows llama-quantize of ik_llama.cpp: which tensors are candidates, what `--pure` and the explicit type flags do, what
happens to rows that a type cannot hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import UnsupportedTypeError, UsageError
from ..formats.source import TensorInfo
from ..formats.types import GGMLType, ggml_type

TOKEN_EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
# Looked up row by row, so never interleaved.
NEVER_INTERLEAVED = (TOKEN_EMBEDDING, "per_layer_token_embd.weight")
# Kept as they are: tiny, and everything after them depends on their exact values.
_PROTECTED_PARTS = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d", "ssm_x.weight", "ssm_dt.weight", "attn_rel_b.weight")

# Replacement of a 256-block type where a row is not a multiple of 256, for types whose replacement is not IQ4_NL.
_SHORT_ROW_TYPES = {
    "Q5_0": ("IQ4_K", "IQ4_K_R4", "Q4_K", "Q4_K_R4", "IQ5_KS", "IQ5_KS_R4"),
    "Q6_0": ("IQ5_K", "IQ5_K_R4", "Q5_K", "Q5_K_R4"),
    "Q8_0": ("IQ6_K", "Q6_K", "Q6_K_R4", "Q8_K_R8"),
}
_SHORT_ROWS = {wide: narrow for narrow, wides in _SHORT_ROW_TYPES.items() for wide in wides}
BY_ROW = "looked up by row"
# Plain type of an interleaved one that no plain type repacks into.
_PLAIN_STAND_IN = {"IQ1_S_R4": "IQ1_S", "IQ1_M_R4": "IQ1_M", "Q8_K_R8": "Q8_0", "Q8_K_R16": "Q8_0"}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor as it is and as it will be; `note` says why it is not what was asked for, `fallback` that it could not be.

    nan_to_zero: NaN and infinities in the source become 0, if the tensor changes its type; otherwise they are an error."""

    source: TensorInfo
    target: TensorInfo
    note: str = ""
    fallback: bool = False
    nan_to_zero: bool = False

    @property
    def kept(self) -> bool:
        return self.source.type is self.target.type


def is_candidate(tensor: TensorInfo) -> bool:
    """Whether a quantization run may change the type of this tensor at all."""
    dims = sum(1 for i, n in enumerate(tensor.shape) if n > 1 or any(m > 1 for m in tensor.shape[:i]))
    return (tensor.name.endswith("weight") and dims >= 2 and not tensor.type.is_integer
            and not any(part in tensor.name for part in _PROTECTED_PARTS))


def regular_expressions(patterns: Iterable[str]) -> list[re.Pattern[str]]:
    """Compiled `patterns` for names of tensors. UsageError naming one that is not a regular expression."""
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise UsageError(f"'{pattern}' is not a regular expression: {error}") from None
    return compiled


def plan_uniform(tensors: Sequence[TensorInfo], base: GGMLType, *, token_embedding_type: str | GGMLType | None = None,
                 output_tensor_type: str | GGMLType | None = None, leave_output_tensor: bool = False,
                 allow_requantize: bool = False) -> list[PlannedTensor]:
    """One type for every candidate, as `--pure` asks, with the two explicit overrides.

    Rows that `base` cannot hold get the replacement of the reference tool; rows that no quantized type can hold get F16. The
    overrides are taken literally. UsageError where a quantized source would have to change without `allow_requantize`.
    """
    explicit = {TOKEN_EMBEDDING: token_embedding_type, OUTPUT: output_tensor_type}
    planned = []
    for tensor in tensors:
        if not is_candidate(tensor) or (leave_output_tensor and tensor.name == OUTPUT):
            planned.append(PlannedTensor(tensor, tensor))
            continue
        asked = explicit.get(tensor.name)
        wanted = ggml_type(asked) if asked is not None else base
        chosen, note = _that_fits(tensor, wanted)
        if chosen is not tensor.type and tensor.type.is_quantized and not allow_requantize:
            raise UsageError(f"is {tensor.type}: requantizing to {chosen} needs --allow-requantize", tensor=tensor.name)
        planned.append(PlannedTensor(tensor, tensor.with_type(chosen), note, fallback=bool(note) and not note.startswith(BY_ROW)))
    return planned


def _that_fits(tensor: TensorInfo, wanted: GGMLType) -> tuple[GGMLType, str]:
    """`wanted` or the type that stands in for it on rows and row counts it cannot have, and why."""
    chosen, note = wanted, ""
    if tensor.n_cols % chosen.block_size:
        chosen = ggml_type(_SHORT_ROWS.get(wanted.name, "IQ4_NL") if wanted.block_size == 256 else "F16")
        if tensor.n_cols % chosen.block_size:
            chosen = ggml_type("F16")
        note = f"row length {tensor.n_cols} is not a multiple of {wanted.block_size}: {chosen} instead of {wanted}"
    rows = tensor.shape[-2]
    if chosen.is_interleaved and tensor.name in NEVER_INTERLEAVED:
        chosen = plain_of(chosen)
        note = f"{BY_ROW}: {chosen} instead of {wanted}"
    elif rows % chosen.group_rows:
        group, chosen = chosen.group_rows, plain_of(chosen)
        note = f"{rows} rows are not a multiple of {group}: {chosen} instead of {wanted}"
    return chosen, note


def plain_of(type: GGMLType) -> GGMLType:
    """The type whose rows an interleaved type groups; the type itself if it is plain."""
    name = type.base or _PLAIN_STAND_IN.get(type.name)
    return ggml_type(name) if name else type


def check_supported(planned: Sequence[PlannedTensor], decodable: Sequence[str], encodable: Sequence[str]) -> None:
    """UnsupportedTypeError, naming the tensor, before any work is done for types without decoder or search."""
    for tensor in planned:
        if tensor.kept:
            continue
        if tensor.source.type.name not in decodable:
            raise UnsupportedTypeError(f"{tensor.source.type} cannot be decoded row by row", tensor=tensor.source.name)
        if tensor.target.type.name not in encodable:
            raise UnsupportedTypeError(f"there is no quantizer for {tensor.target.type}", tensor=tensor.target.name)
