"""`quant_method: fp8`: 8-bit floats with `NAME_scale_inv`, per block of `weight_block_size`
(DeepSeek V3) or per tensor. DeepSeek V4 calls the scales of `NAME.weight` `NAME.scale`, and stores
experts as MXFP4.
"""

from __future__ import annotations

from ...errors import CheckpointError, ConfigError
from ...formats.types import TYPES
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..tensors.decoded import DecodedTensor, decoded
from ..tensors.mxfp4 import BLOCK_CODES, MXFP4Rows
from ..tensors.stored import StoredTensor
from .scaled import CODES, CodeRows, scaled, unfit

_SCALE = "_scale_inv"
_WEIGHT, _OWN_SCALE = ".weight", ".scale"
_OF_ACTIVATIONS = (".activation_scale", "_activation_scale", ".input_scale")


def unpack(checkpoint: Checkpoint, section: Config) -> dict[str, StoredTensor]:
    """Return the tensors that the packed ones of a checkpoint decode to, by name; others stay as
    they are. section: `quantization_config`. Raise ConfigError for wrong block sizes,
    CheckpointError for scales that do not fit.
    """
    tensors, block = checkpoint.tensors, block_size(section, "weight_block_size")
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_OF_ACTIVATIONS) or (
            name.endswith(_SCALE) and name.removesuffix(_SCALE) in tensors
        ):
            continue
        if name.endswith(_OWN_SCALE) and _has_codes(tensors, name):
            continue
        scale = tensors.get(name + _SCALE)
        if scale is None and tensor.dtype in CODES and name.endswith(_WEIGHT):
            scale = tensors.get(name.removesuffix(_WEIGHT) + _OWN_SCALE)
        if scale is None:
            found[name] = tensor
        elif tensor.dtype == "I8" and scale.dtype == "F8_E8M0":
            found[name] = _mxfp4(checkpoint, tensor, scale)
        else:
            found[name] = scaled(checkpoint, tensor, scale, block)
    return found


def _has_codes(tensors: dict[str, StoredTensor], scale: str) -> bool:
    weight = tensors.get(scale.removesuffix(_OWN_SCALE) + _WEIGHT)
    return weight is not None and weight.dtype in CODES


def _mxfp4(checkpoint: Checkpoint, codes: StoredTensor, scale: StoredTensor) -> DecodedTensor:
    """Return the matrix that is stored as two 4-bit floats in a byte, I8[rows, columns / 2], and an
    exponent for 32 of them, F8_E8M0[rows, columns / 32]. Raise CheckpointError for other shapes.
    """
    if len(codes.shape) != 2 or codes.shape[1] * 2 % BLOCK_CODES or codes.n_elements == 0:
        raise CheckpointError(
            f"has shape {list(codes.shape)}; MXFP4 has matrices whose rows are 16 bytes and"
            " multiples of these",
            file=codes.file,
            tensor=codes.name,
        )
    n_rows, n_cols = codes.shape[0], codes.shape[1] * 2
    if scale.shape != (n_rows, n_cols // BLOCK_CODES):
        raise unfit(scale, codes, f"shape {[n_rows, n_cols // BLOCK_CODES]}")
    rows = MXFP4Rows(CodeRows(checkpoint, codes, n_rows), CodeRows(checkpoint, scale, n_rows))
    return decoded(codes, codes.name, (n_rows, n_cols), TYPES["MXFP4"], rows)


def block_size(section: Config, key: str) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale; None if the key is absent. Raise ConfigError
    for anything but two sizes.
    """
    sizes = section.integers(key, default=None)
    if sizes is not None and (len(sizes) != 2 or min(sizes) < 1):
        raise ConfigError(f"key '{key}' is {sizes}, expected two sizes", file=section.file)
    return None if sizes is None else (sizes[0], sizes[1])
