"""Read the headers of safetensors files, and check them completely before any tensor data is read.

Layout: uint64 little-endian N, then N bytes of JSON `{name: {"dtype", "shape", "data_offsets":
[begin, end]}, "__metadata__": {str: str}}` (starts with `{`, may end in spaces), then the data, to
which offsets are relative. Every byte of the data belongs to exactly one tensor.
"""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Protocol

from ...errors import MalformedFileError, NotFoundError, TruncatedFileError, printable
from ...formats.git_lfs import lfs_hint
from ..tensors.stored import DTYPE_BITS, MAX_DIMENSIONS, StoredTensor

MAX_HEADER_BYTES = 100_000_000  # limit of the format's own implementation


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read all tensors of the file, in header order. Only the header is read.

    Raise NotFoundError if there is no such file, TruncatedFileError if it ends early,
    MalformedFileError for everything else that contradicts the format. Each names the file, the
    tensor and the wrong number.
    """
    try:
        with open(path, "rb") as file:
            return parse_header(file, path, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise NotFoundError(f"cannot be read: {error.strerror or error}", file=path) from None


class ReadableFile(Protocol):
    """The object that a header is read from: a file, or the beginning of one on a server."""

    def read(self, n_bytes: int, /) -> bytes:
        """Return the next `n_bytes` bytes, fewer at the end of the file."""
        ...


def parse_header(file: ReadableFile, path: Path, size: int) -> dict[str, StoredTensor]:
    """Parse the header of an open file of `size` bytes; errors name `path`. See `read_header`."""
    length = _header_length(path, file.read(8), size)
    text = file.read(1)
    if text != b"{":  # checked before the rest is read, so that a wrong file costs nothing
        raise MalformedFileError(
            f"the header starts with {text!r}, not with '{{'", file=path, offset=8
        )
    text += file.read(length - 1)
    if len(text) < length:
        raise TruncatedFileError(
            f"the header ends after {len(text)} of {length} bytes", file=path, offset=8
        )
    data = 8 + length
    tensors = {}
    for name, entry in _parse(path, text).items():
        if name == "__metadata__":
            _check_metadata(path, entry)
        else:
            tensors[name] = _tensor(path, name, entry, data, size)
    _check_coverage(path, tensors, data, size)
    return tensors


def _header_length(path: Path, first: bytes, size: int) -> int:
    if len(first) < 8:
        raise TruncatedFileError(
            f"{size} bytes are too few for a safetensors file", file=path, offset=0
        )
    (length,) = struct.unpack("<Q", first)
    if length > MAX_HEADER_BYTES:
        raise MalformedFileError(
            f"header length {length} exceeds the limit of {MAX_HEADER_BYTES}{lfs_hint(first)}",
            file=path,
            offset=0,
        )
    if length > size - 8:
        raise TruncatedFileError(
            f"header length {length} exceeds the {size - 8} bytes that follow", file=path, offset=0
        )
    if length < 2:
        raise MalformedFileError(
            f"header length {length} is too short for a JSON object", file=path, offset=0
        )
    return length


def _parse(path: Path, text: bytes) -> dict:
    try:
        header = json.loads(
            text.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(path, pairs)
        )
    except RecursionError:
        raise MalformedFileError("the header is nested too deeply", file=path, offset=8) from None
    except UnicodeDecodeError as error:
        raise MalformedFileError(
            "the header is not UTF-8", file=path, offset=8 + error.start
        ) from None
    except ValueError as error:  # also of a number with too many digits, which has no position
        offset = 8 + error.pos if isinstance(error, json.JSONDecodeError) else 8
        raise MalformedFileError(
            f"the header is not JSON: {printable(error)}", file=path, offset=offset
        ) from None
    return header


def _unique(path: Path, pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise MalformedFileError(f"key '{printable(twice)}' occurs twice in the header", file=path)
    return found


def _check_metadata(path: Path, entry: object) -> None:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise MalformedFileError("'__metadata__' must map strings to strings", file=path)


def _shown(value: object) -> str:
    return printable(str(value)[:300])  # shortened first, as it may be as long as the header


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _tensor(path: Path, name: str, entry: object, data: int, size: int) -> StoredTensor:
    def malformed(message: str, offset: int | None = None) -> MalformedFileError:
        return MalformedFileError(message, file=path, tensor=name, offset=offset)

    if not isinstance(entry, dict):
        raise malformed("its entry is not a JSON object")
    if missing := [key for key in ("dtype", "shape", "data_offsets") if key not in entry]:
        raise malformed(f"its entry lacks '{missing[0]}'")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise malformed(f"unknown dtype '{_shown(dtype)}'")
    if isinstance(shape, list) and len(shape) > MAX_DIMENSIONS:
        raise malformed(f"shape has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are read")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise malformed(f"shape {_shown(shape)} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise malformed(f"data_offsets {_shown(offsets)} are not two positions")
    begin, end = offsets
    if begin > end:
        raise malformed(f"data_offsets [{begin}, {end}] are reversed")
    if data + end > size:
        raise TruncatedFileError(
            f"its data ends at {end}, the file has {size - data} bytes of data",
            file=path,
            tensor=name,
            offset=data + begin,
        )
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise malformed(f"shape {shape} of {dtype} does not fill whole bytes")
    if bits // 8 != end - begin:
        raise malformed(
            f"shape {shape} of {dtype} takes {bits // 8} bytes, data_offsets [{begin}, {end}] give"
            f" it {end - begin}"
        )
    return StoredTensor(name, dtype, tuple(shape), path, data + begin, data + end)


def _check_coverage(path: Path, tensors: dict[str, StoredTensor], data: int, size: int) -> None:
    position = data
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if tensor.begin != position:
            gap = tensor.begin - position
            problem = (
                f"leaves a hole of {gap} bytes before it"
                if gap > 0
                else f"overlaps the tensor before it by {-gap} bytes"
            )
            raise MalformedFileError(
                f"its data {problem}", file=path, tensor=tensor.name, offset=tensor.begin
            )
        position = tensor.end
    if position != size:
        raise MalformedFileError(
            f"{size - position} bytes follow the last tensor", file=path, offset=position
        )
