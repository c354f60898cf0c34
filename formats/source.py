"""`Source`, `Sink` and `TensorInfo`: the contracts that all stages of the pipeline share.

A source knows all names, shapes, types and metadata before any tensor data is read, and returns
rows on demand. A sink takes the same rows in order. Checkpoints, GGUF files and shards are sources;
one file or several shards are sinks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np

from ..errors import printable
from .types import GGMLType
from .values import Value


@dataclass(frozen=True)
class TensorInfo:
    """Name, numpy-order shape (row length last; experts first) and storage type of a tensor."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType

    @property
    def n_cols(self) -> int:
        """Elements of a row."""
        return self.shape[-1]

    @property
    def n_rows(self) -> int:
        """The number of rows over all matrices of the tensor."""
        return math.prod(self.shape[:-1])

    @property
    def n_matrices(self) -> int:
        """The number of 2-D matrices: experts of a stacked expert tensor, else 1."""
        return math.prod(self.shape[:-2])

    @property
    def n_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, with its row header."""
        return self.type.row_bytes(self.n_cols)

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor as it is stored, without padding."""
        return self.type.tensor_bytes(self.shape)

    def with_type(self, type: GGMLType) -> TensorInfo:
        """Return the same tensor in another type."""
        return replace(self, type=type)


class Source(ABC):
    """A model that can be read tensor by tensor, row by row.

    A subclass sets the attributes and implements `read_rows`. A source is a context manager that
    closes itself.
    """

    path: str
    """The file, folder or address that the model was opened with."""
    files: tuple[str, ...]
    """All files of the model. None of them may be overwritten."""
    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    parallel_reads: int = 0
    """Number of concurrent readers that reading this source fast takes; 0 where reading is a mere
    memory access.
    """
    reads_in_place: bool = False
    """Whether `read_rows_into` reads without a copy, and several threads may call it."""

    def __repr__(self) -> str:
        """Say the architecture, the number of tensors and weights, and the path, in a line."""
        named = self.metadata.get("general.architecture")
        architecture = f" {printable(named.data, 40)}," if named is not None else ""
        weights = sum(tensor.n_elements for tensor in self.tensors)
        return (
            f"<{type(self).__name__}{architecture} {len(self.tensors)} tensors, {weights:,}"
            f" weights: {printable(self.path, 400)}>"
        )

    @property
    def origin(self) -> Source:
        """The source that holds the data: this one, or the innermost one that it wraps."""
        return self

    def locate(self, tensor: TensorInfo) -> TensorInfo:
        """Return the tensor of `origin` that `tensor` is read from."""
        return tensor

    @abstractmethod
    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return uint8[stop - start, row_bytes]: rows in storage order, possibly read-only.

        Callers may ask for rows in any order, must not keep views after `release`, and ask for
        whole row groups of interleaved types.
        """

    def read_rows_into(self, tensor: TensorInfo, start: int, out: np.ndarray) -> None:
        """Fill `out`, contiguous uint8[rows, row_bytes], with the rows from `start` on.

        This implementation copies them. Sources with `reads_in_place` override it.
        """
        np.copyto(out, self.read_rows(tensor, start, start + len(out)))

    def read_bytes(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return uint8[stop - start]: any bytes of the tensor.

        This implementation reads the rows that hold them. Sources whose types store bytes after the
        last row override it.
        """
        group = tensor.type.group_rows
        first = start // tensor.row_bytes // group * group
        last = -(-stop // (tensor.row_bytes * group)) * group
        rows = self.read_rows(tensor, first, last).reshape(-1)
        return rows[start - first * tensor.row_bytes : stop - first * tensor.row_bytes]

    def period(self, tensor: TensorInfo) -> int:
        """Return the number of rows after which the tensor repeats itself; `n_rows` if it does not.

        Random weights repeat, and a loader then reads only the rows of one period.
        """
        return tensor.n_rows

    def release(self, tensor: TensorInfo) -> None:  # noqa: B027 (not every source holds something)
        """Drop what is kept for reading this tensor, such as decoded scales. It can be read again
        later.
        """

    def close(self) -> None:  # noqa: B027
        """Release all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class WrappedSource(Source):
    """A source that reads its tensors from another one, `inner`.

    Path, files, metadata and the number of readers are those of `inner`. A subclass sets `tensors`
    and says in `stored` which tensor of `inner` each of them is read from.
    """

    def __init__(self, inner: Source):
        self.inner = inner
        self.path, self.files, self.metadata = inner.path, inner.files, inner.metadata
        self.parallel_reads = inner.parallel_reads

    @abstractmethod
    def stored(self, tensor: TensorInfo) -> TensorInfo:
        """Return the tensor of `inner` that `tensor` is read from."""

    @property
    def origin(self) -> Source:
        return self.inner.origin

    def locate(self, tensor: TensorInfo) -> TensorInfo:
        return self.inner.locate(self.stored(tensor))

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        return self.inner.read_rows(self.stored(tensor), start, stop)

    def read_bytes(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        return self.inner.read_bytes(self.stored(tensor), start, stop)

    def period(self, tensor: TensorInfo) -> int:
        return min(self.inner.period(self.stored(tensor)), tensor.n_rows)

    def release(self, tensor: TensorInfo) -> None:
        self.inner.release(self.stored(tensor))

    def close(self) -> None:
        self.inner.close()


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
