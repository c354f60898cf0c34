"""Checkpoints in files of torch.save."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import torch
from iqforge.convert.checkpoint.folder import open_checkpoint
from safetensors.torch import load_file


def as_torch(folder: Path, shards: int, **options) -> Path:
    """Replace the safetensors file of a checkpoint by a file of torch.save."""
    tensors = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(dict(tensors), folder / "pytorch_model.bin", **options)
        return folder
    owners = {}
    for number in range(shards):
        name = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = tensors[number * len(tensors) // shards : (number + 1) * len(tensors) // shards]
        torch.save(collections.OrderedDict(part), folder / name, **options)
        owners |= {key: name for key, _ in part}
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": owners})
    )
    return folder


def stored(folder: Path, tensors, **options):
    """Save tensors in a checkpoint of a folder, and open it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    torch.save(tensors, folder / "pytorch_model.bin", **options)
    return open_checkpoint(folder)
