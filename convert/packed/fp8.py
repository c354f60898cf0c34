"""`quant_method: fp8`: 8-bit floats with `NAME_scale_inv`, per block of `weight_block_size`
(DeepSeek V3) or per tensor.
"""

from __future__ import annotations

from ...errors import ConfigError
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..tensors.stored import StoredTensor
from .scaled import scaled

_SCALE = "_scale_inv"
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
        scale = tensors.get(name + _SCALE)
        found[name] = tensor if scale is None else scaled(checkpoint, tensor, scale, block)
    return found


def block_size(section: Config, key: str) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale; None if the key is absent. Raise ConfigError
    for anything but two sizes.
    """
    sizes = section.integers(key, default=None)
    if sizes is not None and (len(sizes) != 2 or min(sizes) < 1):
        raise ConfigError(f"key '{key}' is {sizes}, expected two sizes", file=section.file)
    return None if sizes is None else (sizes[0], sizes[1])
