"""Checkpoints as conversion sees them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.formats.codecs.codec import decode


def opened(folder: Path, **options) -> CheckpointSource:
    """Return a checkpoint as the tensors that it is converted to. options: those of a layout."""
    return CheckpointSource(open_checkpoint(folder), **options)


def stored(folder: Path, name: str) -> np.ndarray:
    """Return a tensor as it is stored, in float32."""
    with open_checkpoint(folder) as checkpoint:
        tensor = checkpoint.tensors[name]
        raw = checkpoint.data(tensor).reshape(1, -1)
        return (
            decode(checkpoint.type_of(tensor), raw, tensor.n_elements).reshape(tensor.shape).copy()
        )
