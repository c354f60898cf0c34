"""Open GGUF files. The whole header is checked before any tensor is read."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ...errors import (
    IqforgeError,
    ShapeError,
    SplitError,
    TruncatedFileError,
    printable,
)
from ..random_access import RandomAccessFile
from ..source import Source, TensorInfo
from ..values import Value
from . import shards
from .header import Header, parse_header

_HEADER_GUESS = 1 << 20  # read at once; longer headers take further reads


def open_gguf(path: str | os.PathLike) -> GGUFFile:
    """Open a GGUF file, or a split model through its first shard.

    Raise NotFoundError, MalformedFileError, TruncatedFileError, UnknownTypeError, ShapeError or
    SplitError with the file, the tensor, the byte offset and the wrong number. The size of the file
    bounds what is allocated.
    """
    path = os.fspath(path)
    with ExitStack() as opened:
        first = SingleFile(path)
        opened.callback(first.close)
        parts = [first]
        if shards.is_split(first.header.metadata, path):
            for index, sibling in enumerate(shards.sibling_paths(path, first.header.metadata)):
                if index > 0:
                    part = SingleFile(os.fspath(sibling))
                    opened.callback(part.close)
                    shards.check_shard(
                        first.header.metadata, part.header.metadata, index, part.path
                    )
                    parts.append(part)
        file = GGUFFile(path, parts)
        opened.pop_all()
        return file


class SingleFile:
    """One GGUF file, a whole model or a shard: its header, and ranges of its bytes."""

    def __init__(self, path: str):
        self.path = path
        self._file: RandomAccessFile | None = None
        file = RandomAccessFile(path, "a GGUF file")
        try:
            if not file.size:
                raise TruncatedFileError(
                    "the file is empty; a GGUF file has at least 24 bytes", file=path
                )

            def prefix(n_bytes: int) -> bytes:
                return file.read(0, n_bytes).tobytes()

            start = prefix(min(file.size, _HEADER_GUESS))
            self.header: Header = parse_header(start, path, file.size, prefix)
        except BaseException:
            file.close()
            raise
        self._file = file

    def read(self, start: int, n_bytes: int, tensor: str) -> np.ndarray:
        """Return bytes of `tensor` from position `start` of the file, uint8[n_bytes]."""
        return self._opened().read(start, n_bytes, tensor)

    def read_into(self, start: int, out: np.ndarray, tensor: str) -> None:
        """Fill `out`, contiguous uint8, with bytes of `tensor` from position `start` of the
        file.
        """
        self._opened().read_into(start, out, tensor)

    def _opened(self) -> RandomAccessFile:
        if self._file is None:
            raise IqforgeError("the file was closed", file=self.path)
        return self._file

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


@dataclass(frozen=True)
class _Place:
    part: SingleFile
    info: TensorInfo
    offset: int


class GGUFFile(Source):
    """A GGUF model as a `Source`: one file, or all shards of a split one. Made by `open_gguf`.

    `metadata` is that of the first shard, its `split.*` keys included; shapes are as stored, in
    numpy order. Tensors are found by name: rows, types and shapes are always those of the file.
    """

    reads_in_place = True

    def __init__(self, path: str, parts: list[SingleFile], whole: bool = True):
        """whole: check that the parts are all shards of one model."""
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
        """The paths of all shards in order; the one path of a file that is not split."""
        return tuple(part.path for part in self._parts)

    @property
    def files(self) -> tuple[str, ...]:
        """All files of the model, as a `Source` names them."""
        return self.shards

    @property
    def alignment(self) -> int:
        """The alignment of tensor data in the (first) file, in bytes."""
        return self._parts[0].header.alignment

    @property
    def version(self) -> int:
        """The version of the format, of the first shard."""
        return self._parts[0].header.version

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def tensor(self, name: str) -> TensorInfo:
        """Return the tensor called `name`. Raise IqforgeError naming the file if there is none."""
        return self._place(name).info

    def location(self, name: str) -> tuple[str, int]:
        """Return the path of the file that holds the tensor's data, and the byte at which it starts
        there.
        """
        place = self._place(name)
        return place.part.path, place.offset

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return uint8[stop - start, row_bytes]. Raise ShapeError unless 0 <= start
        <= stop <= n_rows and, for interleaved types, whole row groups are asked for.
        """
        place = self._rows(tensor, start, stop)
        row_bytes = place.info.row_bytes
        data = place.part.read(
            place.offset + start * row_bytes, (stop - start) * row_bytes, place.info.name
        )
        return data.reshape(stop - start, row_bytes)

    def read_rows_into(self, tensor: TensorInfo, start: int, out: np.ndarray) -> None:
        place = self._rows(tensor, start, start + len(out))
        place.part.read_into(place.offset + start * place.info.row_bytes, out, place.info.name)

    def _rows(self, tensor: TensorInfo, start: int, stop: int) -> _Place:
        """Return where the tensor is stored. ShapeError for rows as `read_rows` raises it."""
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
        return place

    def read_bytes(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return uint8[stop - start]: any bytes of the tensor, also those after its last row. Raise
        ShapeError for bytes that the tensor does not have.
        """
        place = self._place(tensor.name)
        if not 0 <= start <= stop <= place.info.n_bytes:
            raise ShapeError(
                f"bytes {start} to {stop} of {place.info.n_bytes}",
                file=place.part.path,
                tensor=tensor.name,
            )
        return place.part.read(place.offset + start, stop - start, tensor.name)

    def close(self) -> None:
        """Close all files."""
        for part in self._parts:
            part.close()

    def _place(self, name: str) -> _Place:
        if (place := self._places.get(name)) is None:
            raise IqforgeError("no such tensor", file=self.path, tensor=name)
        return place
