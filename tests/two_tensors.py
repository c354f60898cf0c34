"""A GGUF file of two tensors, written by the writers under test."""

from __future__ import annotations

import numpy as np
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import string

METADATA = {"general.architecture": string("llama")}


TENSORS = [TensorInfo(f"t{i}", (2, 8), ggml_type("F32")) for i in range(2)]


def rows(number: int) -> np.ndarray:
    return np.full((2, 8), number, np.float32)


def write(path, metadata=None, tensors=None) -> None:
    with GGUFWriter(
        path, METADATA if metadata is None else metadata, TENSORS if tensors is None else tensors
    ) as writer:
        for number, tensor in enumerate(TENSORS if tensors is None else tensors):
            writer.write(tensor, rows(number))
