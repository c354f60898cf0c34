"""Checkpoints whose weights are stored quantized: their tensors as floats, decoded row by row, or
repacked where a ggml type holds them.

One file per kind of quantization; `quantization_config` of config.json says which it is.
"""

from __future__ import annotations

from ...errors import CheckpointError, printable
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..tensors.stored import StoredTensor
from . import compressed, fp8, gptq, modelopt

_SEPARATE = "hf_quant_config.json"  # where modelopt wrote its settings before config.json had them
_METHODS = {
    "fp8": fp8.unpack,
    "compressed-tensors": compressed.unpack,
    "gptq": gptq.unpack,
    "modelopt": modelopt.unpack,
}
_LEFT_TO_ARCHITECTURES = ("mxfp4",)  # stored in a way that only the model class defines


def unpacked(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint by name, packed ones decoded and their scales gone.

    CheckpointError for an unknown method and for scales that do not fit their weights.
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
    """The section that says how weights are packed; None where they are plain."""
    found = checkpoint.config.of_text().section("quantization_config", "compression_config")
    if found is None and (separate := checkpoint.json(_SEPARATE)) is not None:
        inner = Config(separate, checkpoint.path / _SEPARATE).section("quantization")
        return inner and Config({"quant_method": "modelopt", **inner.values}, inner.file)
    return found
