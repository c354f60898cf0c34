"""`quant_method: modelopt` (NVIDIA): FP8 with a scale per tensor, and NVFP4; a checkpoint may have
both.
"""

from __future__ import annotations

import math

from ...errors import CheckpointError
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..tensors.stored import StoredTensor
from .nvfp4 import factor_of, nvfp4
from .scaled import scaled

_BESIDE = (".weight_scale", ".weight_scale_2", ".input_scale")
_OF_CACHE = (".k_scale", ".v_scale", ".q_scale")


def unpack(checkpoint: Checkpoint, section: Config) -> dict[str, StoredTensor]:
    """Return the tensors that the packed ones of a checkpoint decode to, by name; others stay as
    they are. section: `quantization_config`. Raise CheckpointError for tensors without scales or of
    other formats.
    """
    tensors, found = checkpoint.tensors, {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if name.endswith(_OF_CACHE) or (name.endswith(_BESIDE) and f"{stem}.weight" in tensors):
            continue
        scale = tensors.get(f"{stem}.weight_scale") if last == "weight" else None
        if scale is None:
            if last == "weight" and tensor.dtype == "U8":
                raise CheckpointError(
                    "is packed without weight_scale", file=tensor.file, tensor=name
                )
            found[name] = tensor
        elif tensor.dtype == "U8":
            found[name] = _nvfp4(checkpoint, tensor, scale, tensors)
        else:
            found[name] = scaled(checkpoint, tensor, scale, None)
    return found


def _nvfp4(
    checkpoint: Checkpoint,
    weight: StoredTensor,
    scale: StoredTensor,
    tensors: dict[str, StoredTensor],
) -> StoredTensor:
    stem = weight.name.removesuffix(".weight")
    factor, n_matrices = tensors.get(f"{stem}.weight_scale_2"), math.prod(weight.shape[:-2])
    if factor is None:
        raise CheckpointError(
            "is stored as NVFP4 without weight_scale_2", file=weight.file, tensor=weight.name
        )
    factors = {"scale": factor_of(checkpoint, factor, n_matrices)}
    if (of_input := tensors.get(f"{stem}.input_scale")) is not None:
        factors["input_scale"] = factor_of(checkpoint, of_input, n_matrices)
    return nvfp4(checkpoint, weight, weight.name, scale, factors)
