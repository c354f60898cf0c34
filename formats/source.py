"""`Source`, `Sink` and `TensorInfo`: the contracts every station of the pipeline is written
against.

A Source knows all names, shapes, types and metadata before any tensor data is read, and hands out
rows on demand; a Sink takes the same rows in order. Checkpoints, GGUF files and shards are Sources;
one file or several shards are Sinks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from .gguf.values import Value
from .types import GGMLType


@dataclass(frozen=True)
class TensorInfo:
    """Name, numpy-order shape (row length last; experts first) and storage type of a tensor."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType

    @property
    def n_cols(self) -> int:
        return self.shape[-1]

    @property
    def n_rows(self) -> int:
        """Rows over all matrices of the tensor."""
        return math.prod(self.shape[:-1])

    @property
    def n_matrices(self) -> int:
        """Number of 2-D matrices: experts of a stacked expert tensor, else 1."""
        return math.prod(self.shape[:-2])

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.type.row_bytes(self.n_cols)

    @property
    def n_bytes(self) -> int:
        return self.type.tensor_bytes(self.shape)

    def with_type(self, type: GGMLType) -> TensorInfo:
        return replace(self, type=type)


class Source(Protocol):
    """A model that can be read tensor by tensor, row by row. `files`: all files it consists of,
    none of which may be overwritten.
    """

    path: str
    files: tuple[str, ...]
    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """uint8[stop - start, row_bytes]: rows in storage order, possibly a read-only view into a
        mapped file.

        The caller may ask in any order, must not keep views after `release`, and for interleaved
        types asks for whole row groups.
        """

    def release(self, tensor: TensorInfo) -> None:
        """The caller is done with this tensor for now: pages and buffers held for it may be given
        back.
        """

    def close(self) -> None: ...


class Sink(Protocol):
    """An output with a fixed list of tensors, written in that order."""

    def write(self, tensor: TensorInfo, data: np.ndarray) -> None:
        """Append the next bytes of `tensor`. Tensors come in list order, each in one or more
        pieces.
        """

    def finish(self) -> None:
        """Pad, sync, check and rename: afterwards the output is complete under its final name."""

    def abort(self) -> None:
        """Remove every trace of an output that was not finished."""
