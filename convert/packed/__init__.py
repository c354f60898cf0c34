"""Read checkpoints with quantized weights: tensors are decoded to floats row by row, or repacked if
a ggml type holds them.

One file per quantization method; `quantization_config` of config.json names it.
"""

from __future__ import annotations

from ...errors import CheckpointError, printable
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..tensors.stored import StoredTensor
from . import compressed, fp8, gptq, modelopt

_SEPARATE = "hf_quant_config.json"  # older versions of modelopt wrote their settings there
_METHODS = {
    "fp8": fp8.unpack,
    "compressed-tensors": compressed.unpack,
    "gptq": gptq.unpack,
    "modelopt": modelopt.unpack,
}
# Architectures read them: only the model class defines the layout.
_LEFT_TO_ARCHITECTURES = ("mxfp4",)


def unpacked(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Return all tensors of the checkpoint by name, with packed ones decoded and without their
    scales.

    Raise CheckpointError for an unknown method and for scales that do not fit their weights.
    """
    section = quantization_config(checkpoint)
    if section is None or (method := section.string("quant_method")) in _LEFT_TO_ARCHITECTURES:
        return checkpoint.tensors
    if method not in _METHODS:
        raise CheckpointError(
            f"weights quantized with '{printable(method)}' cannot be read;"
            f" {', '.join(_METHODS)} can",
            file=checkpoint.config.file,
        )
    return _METHODS[method](checkpoint, section)


def quantization_config(checkpoint: Checkpoint) -> Config | None:
    """Return the section that describes how weights are packed; None if they are not."""
    found = checkpoint.config.of_text().section("quantization_config", "compression_config")
    if found is None and (separate := checkpoint.json(_SEPARATE)) is not None:
        inner = Config(separate, checkpoint.path / _SEPARATE).section("quantization")
        return inner and Config({"quant_method": "modelopt", **inner.values}, inner.file)
    return found
