"""Bytes of stored tensors: ranges of local files, mapped on first use."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Protocol

import numpy as np

from ...errors import MalformedFileError, NotFoundError
from ..tensors.stored import DTYPE_BITS, StoredTensor

_READ_AT_ONCE = 32 << 20  # a larger range is a whole tensor of which rows will be taken


class TensorStorage(Protocol):
    """Where the bytes of a checkpoint's tensors come from."""

    def read(self, tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
        """uint8[stop - start]: bytes start to stop of the tensor in row order, possibly a read-only
        view. Whole elements are asked for.
        """

    def release(self, tensor: StoredTensor) -> None:
        """Pages held for this tensor may be given back."""

    def close(self) -> None: ...


class MappedFiles:
    """Local files. `read` touches no page by itself, unless a tensor has strides: then it gathers
    the elements.
    """

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def read(self, tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
        if start >= stop:
            return np.empty(0, np.uint8)
        mapped = self._map(tensor.file, tensor.end)
        if tensor.strides is None:
            if (
                hasattr(mmap, "MADV_WILLNEED") and stop - start <= _READ_AT_ONCE
            ):  # not page by page as it is touched
                first = (tensor.begin + start) // mmap.PAGESIZE * mmap.PAGESIZE
                mapped.madvise(mmap.MADV_WILLNEED, first, tensor.begin + stop - first)
            return np.frombuffer(mapped, np.uint8, stop - start, tensor.begin + start)
        return gather(
            np.frombuffer(mapped, np.uint8, tensor.end - tensor.begin, tensor.begin),
            tensor,
            start,
            stop,
        )

    def release(self, tensor: StoredTensor) -> None:
        if (mapped := self._maps.get(tensor.file)) is None or tensor.begin == tensor.end:
            return
        begin = tensor.begin - tensor.begin % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED, begin, tensor.end - begin)

    def _map(self, path: Path, needed: int) -> mmap.mmap:
        if path not in self._maps:
            try:
                with open(path, "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise NotFoundError(f"cannot be mapped: {error}", file=path) from None
            self._maps[path] = mapped
        if needed > len(self._maps[path]):
            raise MalformedFileError("has become shorter since it was opened", file=path)
        return self._maps[path]

    def close(self) -> None:
        """Unmap all files. Views that are still held keep their file mapped until they are gone."""
        for mapped in self._maps.values():
            try:
                mapped.close()
            except BufferError:  # a view into it is alive
                pass
        self._maps.clear()


def gather(region: np.ndarray, tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
    """uint8[stop - start]: bytes start to stop, in row order, of a tensor with strides whose first
    element begins `region`.
    """
    size = DTYPE_BITS[tensor.dtype] // 8
    wanted = np.arange(start // size, stop // size)
    places = np.zeros(len(wanted), np.int64)
    for n, stride in zip(reversed(tensor.shape), reversed(tensor.strides)):
        wanted, at = np.divmod(wanted, n)
        places += at * stride
    elements = region[: len(region) // size * size].reshape(-1, size)
    return elements[places].reshape(-1)
