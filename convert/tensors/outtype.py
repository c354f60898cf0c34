"""The type of each tensor when a checkpoint is converted without a quantization mix."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ...errors import UsageError, printable
from ...formats.ftypes import FILE_TYPES
from ...formats.source import Source, TensorInfo
from ...formats.tensor_names import TensorName
from ...formats.types import TYPES, GGMLType

# --outtype -> (type of the large matrices, value of general.file_type)
OUTTYPES: dict[str, tuple[GGMLType, int]] = {
    "f32": (TYPES["F32"], 0),
    "f16": (TYPES["F16"], 1),
    "bf16": (TYPES["BF16"], 32),
    "q8_0": (TYPES["Q8_0"], 7),
}
AUTO = "auto"

# Block types that checkpoints store -> (what file names call them, general.file_type)
PACKED = {"MXFP4": ("mxfp4_moe", 38), "NVFP4": ("nvfp4", 39)}


def plan_outtype(source: Source, outtype: str) -> tuple[list[TensorInfo], int]:
    """Return the tensors of `source` with their output types, and the value of `general.file_type`.

    Vectors, norms, routers and everything that is not a `.weight` become F32; rows that are not
    whole blocks of `outtype` become F16. Matrices that the checkpoint stores in blocks of a ggml
    type keep it, and name the file type where the rest are floats; integers stay as they are. Raise
    UsageError for an unknown outtype. This follows the converter of llama.cpp.
    """
    name = resolve_outtype(source.tensors, outtype)
    if name not in OUTTYPES:
        raise UsageError(
            f"{name} needs a quantizer; the types without one are {', '.join(OUTTYPES)} and {AUTO}"
        )
    wanted, file_type = OUTTYPES[name]
    if (packed := packed_type(source.tensors)) is not None and not wanted.is_quantized:
        file_type = PACKED[packed.name][1]
    return [tensor.with_type(_type_of(tensor, wanted)) for tensor in source.tensors], file_type


def packed_type(tensors: Sequence[TensorInfo]) -> GGMLType | None:
    """Return the block type in which a checkpoint stores matrices; None if it stores only
    floats.
    """
    return next((tensor.type for tensor in tensors if tensor.type.name in PACKED), None)


def type_word(tensors: Sequence[TensorInfo], outtype: str) -> str:
    """Return the name of the resulting types in file names, in lower case."""
    kind = resolve_outtype(tensors, outtype)
    packed = packed_type(tensors)
    floats = kind in OUTTYPES and not OUTTYPES[kind][0].is_quantized
    return PACKED[packed.name][0] if packed is not None and floats else kind


def resolve_outtype(tensors: Sequence[TensorInfo], outtype: str) -> str:
    """Return `outtype` in lower case. `auto` becomes the type of the first matrix that is stored in
    16 bits, or f16.

    Names of quantization presets (`iq4_k`) are returned too; the quantizer handles those. Raise
    UsageError for any other name.
    """
    outtype = outtype.lower()
    if outtype == AUTO:
        stored = (tensor.type.name.lower() for tensor in tensors if len(tensor.shape) > 1)
        return next((name for name in stored if name in ("bf16", "f16")), "f16")
    if outtype not in OUTTYPES and outtype.upper() not in FILE_TYPES:
        close = difflib.get_close_matches(outtype.upper(), FILE_TYPES, n=3, cutoff=0.5)
        near = f"; similar are {', '.join(name.lower() for name in close)}" if close else ""
        raise UsageError(
            f"unknown outtype '{printable(outtype)}'; known are {', '.join(OUTTYPES)}, {AUTO} and"
            f" the presets of iqforge quantize{near}"
        )
    return outtype


def _type_of(tensor: TensorInfo, wanted: GGMLType) -> GGMLType:
    if tensor.type.name in PACKED or tensor.type.is_integer:
        return tensor.type
    name = TensorName.parse(tensor.name)
    if len(tensor.shape) < 2 or not name.is_weight or name.is_norm or name.is_sensitive:
        return TYPES["F32"]
    return TYPES["F16"] if tensor.n_cols % wanted.block_size else wanted
