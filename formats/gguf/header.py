"""Read and write everything before the tensor data of a GGUF file: magic, counts, metadata, tensor
table.

    "GGUF" | u32 version | u64 n_tensors | u64 n_pairs | pairs | table | padding | data
    table entry: name (u64 length, bytes) | u32 n_dims | u64 dims[n_dims], row length first
                 | u32 type | u64 offset

Offsets count from the start of the data, which is the first multiple of the alignment after the
table. The alignment is 32 unless `general.alignment` says otherwise. Versions 2 and 3 have the same
layout. Source: GGUF specification, v3.

Tensor data is stored in the order of the table, each tensor at the padded end of the one before, as
every known writer has it and as ggml demands; nothing follows the last one, whose padding may be
missing. Other files are refused: a gap or a tail is either damage or content that no tool reads.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import (
    MalformedFileError,
    ShapeError,
    TruncatedFileError,
    UnknownTypeError,
    printable,
)
from ..git_lfs import lfs_hint
from ..source import TensorInfo
from ..types import ggml_type
from ..values import Value, ValueType
from .cursor import Cursor
from .metadata import MIN_PAIR_BYTES, MetadataParser, encode_pair

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NAME_BYTES = 63  # GGML_MAX_NAME less the final NUL
MIN_ENTRY_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class Header:
    """A parsed header. `offsets` are absolute positions in the file, in the order of `tensors`."""

    version: int
    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    offsets: tuple[int, ...]
    alignment: int


def pad_to(position: int, alignment: int) -> int:
    """Return the first multiple of `alignment` that is not below `position`."""
    return -(-position // alignment) * alignment


def parse_header(
    buffer: bytes,
    file: str,
    file_size: int | None = None,
    prefix: Callable[[int], bytes] | None = None,
) -> Header:
    """Parse the header at the start of `buffer`.

    `file_size` is the size of the whole file if `buffer` is only its start. `prefix(n)` returns the
    first `n` bytes of the file; without it `buffer` must hold the whole header.

    Raise MalformedFileError, TruncatedFileError, UnknownTypeError or ShapeError with file, tensor
    and byte offset.
    """
    file_size = len(buffer) if file_size is None else file_size
    cursor = Cursor(buffer, file, file_size, prefix)
    version, n_tensors, n_pairs = _parse_start(cursor)
    metadata = MetadataParser(cursor).pairs(n_pairs)
    alignment = stated_alignment(metadata, file)
    entries = []
    seen: set[str] = set()
    for index in range(n_tensors):
        entries.append(_parse_entry(cursor, f"tensor {index + 1} of {n_tensors}", seen))
    data_start = pad_to(cursor.position, alignment)
    _check_places(entries, data_start, alignment, file, file_size)
    return Header(
        version,
        metadata,
        tuple(info for info, _ in entries),
        tuple(data_start + offset for _, offset in entries),
        alignment,
    )


def check_magic(magic: bytes, file: str) -> None:
    """Raise TruncatedFileError or MalformedFileError unless the first four bytes of a file are
    those of GGUF.
    """
    if len(magic) < 4:
        raise TruncatedFileError(
            f"the file has {len(magic)} byte{'s' * (len(magic) != 1)}; a GGUF file has at least 24",
            file=file,
        )
    if magic != MAGIC:
        hint = " (a byte-swapped GGUF file?)" if magic == MAGIC[::-1] else lfs_hint(magic)
        raise MalformedFileError(
            f"not a GGUF file: it starts with {magic!r}{hint}", file=file, offset=0
        )


def _parse_start(cursor: Cursor) -> tuple[int, int, int]:
    check_magic(bytes(cursor.buffer[:4]), cursor.file)
    cursor.take(4, "the magic")
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        raise MalformedFileError(
            "big-endian GGUF files are not supported", file=cursor.file, offset=4
        )
    if version not in (2, 3):
        raise MalformedFileError(
            f"GGUF version {version} is not supported; 2 and 3 are", file=cursor.file, offset=4
        )
    n_tensors, n_pairs = cursor.unpack("<QQ", "the counts of tensors and metadata pairs")
    for count, unit, what, offset in (
        (n_pairs, MIN_PAIR_BYTES, "metadata pairs", 16),
        (n_tensors, MIN_ENTRY_BYTES, "tensors", 8),
    ):
        if count * unit > cursor.left:
            raise TruncatedFileError(
                f"{count} {what} take at least {count * unit} bytes, {cursor.left} follow",
                file=cursor.file,
                offset=offset,
            )
    return version, n_tensors, n_pairs


def stated_alignment(metadata: dict[str, Value], file: str) -> int:
    """Return `general.alignment`, or 32. Raise MalformedFileError unless it is a UINT32 and a power
    of two from 8 to 2^20.
    """
    value = metadata.get("general.alignment")
    if value is None:
        return DEFAULT_ALIGNMENT
    if value.type is not ValueType.UINT32:
        raise MalformedFileError(
            f"general.alignment has type {value.type.name}, expected UINT32", file=file
        )
    if not 8 <= value.data <= MAX_ALIGNMENT or value.data & (value.data - 1):
        raise MalformedFileError(
            f"general.alignment is {value.data}, expected a power of two from 8 to {MAX_ALIGNMENT}",
            file=file,
        )
    return value.data


def _parse_entry(cursor: Cursor, what: str, seen: set[str]) -> tuple[TensorInfo, int]:
    start = cursor.position
    name = _parse_name(cursor, what)
    if name in seen:
        raise MalformedFileError(
            "the tensor is listed twice", file=cursor.file, tensor=name, offset=start
        )
    seen.add(name)
    where = cursor.position
    n_dims = cursor.u32(f"the number of dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise MalformedFileError(
            f"{n_dims} dimensions; a tensor has 1 to {MAX_DIMS}",
            file=cursor.file,
            tensor=name,
            offset=where,
        )
    where = cursor.position
    dims = cursor.unpack(f"<{n_dims}Q", f"the dimensions of {what}")
    if not all(0 < n < 1 << 63 for n in dims):
        raise MalformedFileError(
            f"impossible dimensions {list(dims)}", file=cursor.file, tensor=name, offset=where
        )
    where = cursor.position
    type_id = cursor.u32(f"the type of {what}")
    try:
        info = TensorInfo(name, tuple(reversed(dims)), ggml_type(type_id))
        info.n_bytes  # noqa: B018  raises if the type cannot have this shape
    except UnknownTypeError as error:
        raise UnknownTypeError(error.message, file=cursor.file, tensor=name, offset=where) from None
    except ShapeError as error:
        raise ShapeError(error.message, file=cursor.file, tensor=name, offset=where) from None
    return info, cursor.u64(f"the data offset of {what}")


def _parse_name(cursor: Cursor, what: str) -> str:
    start = cursor.position
    n_bytes = cursor.u64(f"the name length of {what}")
    if not 0 < n_bytes <= MAX_NAME_BYTES:
        raise MalformedFileError(
            f"the name of {what} has {n_bytes} bytes; a name has 1 to {MAX_NAME_BYTES}",
            file=cursor.file,
            offset=start,
        )
    raw = cursor.bytes(n_bytes, f"the name of {what}")
    name = raw.decode("utf-8", "backslashreplace")
    if not name.isprintable() or name.encode() != raw:
        raise MalformedFileError(
            f"the name of {what} is not printable UTF-8 text: '{printable(name)}'",
            file=cursor.file,
            offset=start,
        )
    # Names become file and folder names in tools that write one output per tensor.
    if any(part in ("", ".", "..") for part in re.split(r"[/\\]", name)):
        raise MalformedFileError(
            f"the name of {what} is a path outside the folder: '{printable(name)}'",
            file=cursor.file,
            offset=start,
        )
    return name


def _check_places(
    entries: list[tuple[TensorInfo, int]],
    data_start: int,
    alignment: int,
    file: str,
    file_size: int,
) -> None:
    """Check that tensor data starts at `data_start`, has no gap and no overlap, and ends where the
    file does.
    """
    expected, why = 0, "where the data begins"
    for info, offset in entries:
        if offset % alignment:
            raise MalformedFileError(
                f"data offset {offset} is not a multiple of the alignment {alignment}",
                file=file,
                tensor=info.name,
            )
        if offset != expected:
            problem = (
                "overlaps or is out of order"
                if offset < expected
                else "leaves a gap or is out of order"
            )
            raise MalformedFileError(
                f"data offset {offset} {problem}, expected {expected}: {why}",
                file=file,
                tensor=info.name,
            )
        start = data_start + offset
        if start + info.n_bytes > file_size:
            raise TruncatedFileError(
                f"shape {list(info.shape)} in {info.type} takes {info.n_bytes} bytes from data"
                f" offset {offset}, until byte {start + info.n_bytes}; the file has {file_size}",
                file=file,
                tensor=info.name,
                offset=start,
            )
        expected, why = (
            pad_to(offset + info.n_bytes, alignment),
            f"the end of '{printable(info.name)}', padded to {alignment}",
        )
    data_end = data_start + expected
    if file_size > data_end:
        raise MalformedFileError(
            f"{file_size - data_end} bytes follow the data of the {len(entries)} tensors; the file"
            f" has {file_size}",
            file=file,
            offset=data_end,
        )


def encode_header(
    metadata: dict[str, Value], tensors: Sequence[TensorInfo], alignment: int
) -> tuple[bytes, list[int]]:
    """Return the bytes of a version 3 header padded to `alignment`, and the absolute offset of each
    tensor's data.

    Tensors are laid out in the given order, each padded to `alignment`.
    """
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    parts += [encode_pair(key, value) for key, value in metadata.items()]
    offset, offsets = 0, []
    for info in tensors:
        name = info.name.encode("utf-8", "surrogateescape")
        parts.append(
            struct.pack(
                f"<Q{len(name)}sI{len(info.shape)}QIQ",
                len(name),
                name,
                len(info.shape),
                *reversed(info.shape),
                info.type.id,
                offset,
            )
        )
        offsets.append(offset)
        offset = pad_to(offset + info.n_bytes, alignment)
    header = b"".join(parts)
    header += bytes(pad_to(len(header), alignment) - len(header))
    return header, [len(header) + offset for offset in offsets]
