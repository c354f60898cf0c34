"""Opening GGUF files: memory-mapped, checked from the first to the last header byte before any
tensor is handed out.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ...errors import (
    IqforgeError,
    MalformedFileError,
    NotFoundError,
    ShapeError,
    SplitError,
    TruncatedFileError,
    printable,
)
from ..source import Source, TensorInfo
from . import shards
from .header import Header, parse_header
from .values import Value

_PAGE = mmap.PAGESIZE


def open_gguf(path: str | os.PathLike) -> GGUFFile:
    """Open a GGUF file, or a split model through its first shard.

    Raises NotFoundError, MalformedFileError, TruncatedFileError, UnknownTypeError, ShapeError or
    SplitError with the file, the tensor, the byte offset and the number that was wrong. Nothing is
    allocated that the file's size does not justify.
    """
    path = os.fspath(path)
    with ExitStack() as opened:
        first = MappedFile(path)
        opened.callback(first.close)
        parts = [first]
        if shards.is_split(first.header.metadata, path):
            for index, sibling in enumerate(shards.sibling_paths(path, first.header.metadata)):
                if index > 0:
                    part = MappedFile(os.fspath(sibling))
                    opened.callback(part.close)
                    shards.check_shard(
                        first.header.metadata, part.header.metadata, index, part.path
                    )
                    parts.append(part)
        file = GGUFFile(path, parts)
        opened.pop_all()
        return file


class MappedFile:
    """One GGUF file of its own, also a single shard: its header and its mapped bytes."""

    def __init__(self, path: str):
        self.path = path
        self._map: mmap.mmap | None = _map(path)
        try:
            self.header: Header = parse_header(self._map, path)
        except BaseException:
            self.close()
            raise

    def view(self, start: int, shape: tuple[int, ...]) -> np.ndarray:
        """Read-only uint8 array of `shape` on the mapped bytes from `start`."""
        if self._map is None:
            raise IqforgeError("the file was closed", file=self.path)
        # frombuffer, and not ndarray(buffer=...), holds the buffer: close() then cannot unmap it
        # under a living view.
        return np.frombuffer(self._map, np.uint8)[start : start + math.prod(shape)].reshape(shape)

    def release(self, start: int, stop: int) -> None:
        """Give the pages of a byte range back to the kernel; views stay valid and read them again
        when touched.
        """
        if self._map is not None and stop > start:
            first = start // _PAGE * _PAGE
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def close(self) -> None:
        """Unmap the file; while views are alive the map lives on and goes with the last of them."""
        mapped, self._map = self._map, None
        if mapped is not None:
            try:
                mapped.close()
            except BufferError:
                pass


def _map(path: str) -> mmap.mmap:
    try:
        # Not opened before its kind is known: opening a pipe waits for a writer.
        kind = os.stat(path).st_mode
        if not stat.S_ISREG(kind):
            what = "a folder" if stat.S_ISDIR(kind) else "not a regular file"
            raise MalformedFileError(f"expected a GGUF file, this is {what}", file=path)
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise TruncatedFileError(
                    "the file is empty; a GGUF file has at least 24 bytes", file=path
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise NotFoundError("no such file", file=path) from None
    except (OSError, ValueError) as error:
        raise IqforgeError(
            f"cannot be read: {getattr(error, 'strerror', None) or error}", file=path
        ) from None


@dataclass(frozen=True)
class _Place:
    part: MappedFile
    info: TensorInfo
    offset: int


class GGUFFile(Source):
    """A GGUF model as a `Source`: one file, or all shards of a split one. Made by `open_gguf`.

    `metadata` is that of the first shard, its `split.*` keys included; shapes are as stored, in
    numpy order. Tensors are found by name: rows, types and shapes are always those of the file.
    """

    def __init__(self, path: str, parts: list[MappedFile], whole: bool = True):
        """whole: the parts are all shards of a model, which is checked."""
        self.path = path
        self._parts = parts
        self.metadata: dict[str, Value] = parts[0].header.metadata
        self._places: dict[str, _Place] = {}
        for part in parts:
            for info, offset in zip(part.header.tensors, part.header.offsets):
                if (other := self._places.get(info.name)) is not None:
                    raise SplitError(
                        f"the tensor is also in {printable(other.part.path, 400)}",
                        file=part.path,
                        tensor=info.name,
                    )
                self._places[info.name] = _Place(part, info, offset)
        self.tensors: tuple[TensorInfo, ...] = tuple(place.info for place in self._places.values())
        if len(parts) > 1 and whole:
            expected = shards.split_number(self.metadata, shards.KEY_TENSORS, path)
            if len(self.tensors) != expected:
                raise SplitError(
                    f"split.tensors.count is {expected}, the {len(parts)} shards have"
                    f" {len(self.tensors)} tensors",
                    file=path,
                )

    @property
    def shards(self) -> tuple[str, ...]:
        """Paths of all shards in order; the one path of a file that is not split."""
        return tuple(part.path for part in self._parts)

    @property
    def files(self) -> tuple[str, ...]:
        """All files of the model, as a `Source` names them."""
        return self.shards

    @property
    def alignment(self) -> int:
        """Alignment of tensor data in the (first) file, in bytes."""
        return self._parts[0].header.alignment

    @property
    def version(self) -> int:
        return self._parts[0].header.version

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def tensor(self, name: str) -> TensorInfo:
        """The tensor called `name`. IqforgeError naming the file if there is none."""
        return self._place(name).info

    def location(self, name: str) -> tuple[str, int]:
        """Path of the file that holds the tensor's data, and the byte at which it starts there."""
        place = self._place(name)
        return place.part.path, place.offset

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Read-only uint8[stop - start, row_bytes] on the mapped file. ShapeError unless 0 <= start
        <= stop <= n_rows and, for interleaved types, whole row groups are asked for.
        """
        place = self._place(tensor.name)
        info = place.info
        if (
            not 0 <= start <= stop <= info.n_rows
            or start % info.type.group_rows
            or stop % info.type.group_rows
        ):
            raise ShapeError(
                f"rows {start} to {stop} of {info.n_rows} {info.type} rows in groups of"
                f" {info.type.group_rows}",
                file=place.part.path,
                tensor=info.name,
            )
        row_bytes = info.row_bytes
        return place.part.view(place.offset + start * row_bytes, (stop - start, row_bytes))

    def read_bytes(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Read-only uint8[stop - start]: any bytes of the tensor, also those after its last row."""
        place = self._place(tensor.name)
        if not 0 <= start <= stop <= place.info.n_bytes:
            raise ShapeError(
                f"bytes {start} to {stop} of {place.info.n_bytes}",
                file=place.part.path,
                tensor=tensor.name,
            )
        return place.part.view(place.offset + start, (stop - start,))

    def release(self, tensor: TensorInfo) -> None:
        """Give the pages of the tensor back, so that resident memory does not grow with what was
        read.
        """
        place = self._place(tensor.name)
        place.part.release(place.offset, place.offset + place.info.n_bytes)

    def close(self) -> None:
        """Unmap all files. Views that are still alive stay readable."""
        for part in self._parts:
            part.close()

    def _place(self, name: str) -> _Place:
        if (place := self._places.get(name)) is None:
            raise IqforgeError("no such tensor", file=self.path, tensor=name)
        return place
