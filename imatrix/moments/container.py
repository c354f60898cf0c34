"""Read and write safetensors files of second moments: a header of JSON, then the tensors.

Layout: uint64 little-endian N, N bytes of JSON {name: {"dtype", "shape", "data_offsets": [begin,
end]}, "__metadata__": {str: str}}, then the data, to which offsets are relative.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import MalformedFileError
from ...formats.output import PartFile
from ..stored import OpenFile

_SIZES = {"F32": 4, "BF16": 2, "I64": 8}
_MAX_HEADER = 100_000_000  # bytes


@dataclass(frozen=True)
class StoredArray:
    """An array of a file, from byte `begin` of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the array in the file."""
        return math.prod(self.shape) * _SIZES[self.dtype]


@dataclass(frozen=True)
class ArrayToWrite:
    """An array whose bytes are made, piece by piece, when they are written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Iterator[bytes]]

    @property
    def n_bytes(self) -> int:
        """Bytes of the array in the file."""
        return math.prod(self.shape) * _SIZES[self.dtype]


def write_arrays(
    path: str | os.PathLike, arrays: list[ArrayToWrite], metadata: dict[str, Any]
) -> None:
    """Write a file; it gets its name only when it is complete. Metadata that is not text becomes
    JSON.
    """
    header: dict[str, Any] = {
        "__metadata__": {
            key: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            for key, value in metadata.items()
        }
    }
    position = 0
    for array in arrays:
        header[array.name] = {
            "dtype": array.dtype,
            "shape": list(array.shape),
            "data_offsets": [position, position + array.n_bytes],
        }
        position += array.n_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with PartFile(path, 8 + len(text) + position) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            for data in array.make():
                out.write(data)


def read_arrays(file: OpenFile) -> tuple[dict[str, StoredArray], dict[str, str]]:
    """Return the arrays and the metadata of a file. Raise MalformedFileError for a header that is
    not valid, TruncatedFileError for one, or for data, that the file does not have.
    """
    first = file.read(0, min(8, file.size), "the header")
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= _MAX_HEADER:
        kind = "a GGUF file" if first[:4] == b"GGUF" else "no safetensors file"
        raise MalformedFileError(
            f"this is {kind}, not second moments as `iqforge hessian` writes them",
            file=file.path,
            offset=0,
        )
    try:
        header = json.loads(file.read(8, length, "the header"))
        metadata = header.pop("__metadata__", {})
        entries = {name: _array(said, 8 + length) for name, said in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise MalformedFileError(
            "the header is not that of a file of second moments", file=file.path, offset=8
        ) from None
    for name, array in entries.items():
        if array.begin + array.n_bytes > file.size:
            file.read(array.begin, array.n_bytes, name)  # says what is missing
    return entries, {str(key): str(value) for key, value in metadata.items()}


def _array(said: dict[str, Any], data: int) -> StoredArray:
    shape = tuple(int(n) for n in said["shape"])
    begin, end = (int(n) for n in said["data_offsets"])
    array = StoredArray(str(said["dtype"]), shape, data + begin)
    if min(shape, default=0) < 0 or begin < 0 or array.n_bytes != end - begin:
        raise ValueError
    return array
