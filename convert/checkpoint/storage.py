"""Read the bytes of stored tensors: ranges of local files, on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from ...formats.random_access import RandomAccessFile
from ..tensors.stored import DTYPE_BITS, StoredTensor, TensorReader

_SPAN_BYTES = 16 << 20  # read at once, to select elements from


class TensorStorage(TensorReader, Protocol):
    """The origin of the bytes of a checkpoint's tensors."""

    def close(self) -> None:
        """End all reading and release the memory held."""
        ...


class LocalFiles:
    """Files on disk. Each is opened when it is first read."""

    def __init__(self) -> None:
        self._files: dict[Path, RandomAccessFile] = {}
        self._lock = threading.Lock()

    def read(self, tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
        """Return bytes `start` to `stop` of the tensor in row order, uint8[stop - start].

        Raise TruncatedFileError if the file has become shorter than its header says.
        """
        if start >= stop:
            return np.empty(0, np.uint8)
        file = self._open(tensor.file)
        if tensor.strides is None:
            return file.read(tensor.begin + start, stop - start, tensor.name)
        row_bytes = tensor.shape[-1] * DTYPE_BITS[tensor.dtype] // 8 if tensor.shape else 0
        if (
            len(tensor.shape) == 2
            and tensor.strides[0] == 1
            and not (start % row_bytes or stop % row_bytes)
        ):
            return _transposed(
                file, tensor, tensor.strides[1], start // row_bytes, stop // row_bytes
            )
        return _gather(file, tensor, tensor.strides, start, stop)

    def release(self, tensor: StoredTensor) -> None:
        """Do nothing, as the arrays that were read belong to the caller."""

    def _open(self, path: Path) -> RandomAccessFile:
        with self._lock:
            if (file := self._files.get(path)) is None:
                file = self._files[path] = RandomAccessFile(path)
            return file

    def close(self) -> None:
        """Close all files. Arrays that were read stay valid."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()


def _transposed(
    file: RandomAccessFile, tensor: StoredTensor, stride: int, start: int, stop: int
) -> np.ndarray:
    """Return the bytes of rows `start` to `stop` of a matrix whose columns are stored one after
    the other, `stride` elements apart.
    """
    size = DTYPE_BITS[tensor.dtype] // 8
    columns = np.empty((tensor.shape[1], (stop - start) * size), np.uint8)
    for number, column in enumerate(columns):
        begin = tensor.begin + (number * stride + start) * size
        column[:] = file.read(begin, columns.shape[1], tensor.name)
    return np.ascontiguousarray(columns.view(f"u{size}").T).view(np.uint8).reshape(-1)


def _gather(
    file: RandomAccessFile, tensor: StoredTensor, strides: tuple[int, ...], start: int, stop: int
) -> np.ndarray:
    """Return bytes `start` to `stop`, in row order, of a tensor with strides.

    The file is read in spans of at most `_SPAN_BYTES`, from which the elements are selected.
    """
    size = DTYPE_BITS[tensor.dtype] // 8
    wanted = np.arange(start // size, stop // size)
    places = np.zeros(len(wanted), np.int64)
    for n, stride in zip(reversed(tensor.shape), reversed(strides)):
        wanted, at = np.divmod(wanted, n)
        places += at * stride
    elements = np.empty((len(places), size), np.uint8)
    order = np.arange(len(places))
    if (places[1:] < places[:-1]).any():
        order = np.argsort(places, kind="stable")
    sorted_places = places[order]
    for first, last in _spans(sorted_places, _SPAN_BYTES // size):
        begin, end = int(sorted_places[first]), int(sorted_places[last - 1]) + 1
        span = file.read(tensor.begin + begin * size, (end - begin) * size, tensor.name)
        elements[order[first:last]] = span.reshape(-1, size)[sorted_places[first:last] - begin]
    return elements.reshape(-1)


def _spans(places: np.ndarray, length: int) -> Iterator[tuple[int, int]]:
    """Index ranges of sorted `places` that each lie within `length` elements of the file."""
    first = 0
    while first < len(places):
        last = int(np.searchsorted(places, places[first] + length))
        yield first, last
        first = last
