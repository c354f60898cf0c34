"""GGUF bytes built by hand, valid and broken, without any code of the writer under test."""

from __future__ import annotations

import struct

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = dict(zip((U8, I8, U16, I16, U32, I32, F32, BOOL, U64, I64, F64), "BbHhIifBQqd"))


def text(raw: bytes | str, length: int | None = None) -> bytes:
    """Return a string with its length, or with a wrong `length`."""
    raw = raw.encode() if isinstance(raw, str) else raw
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def scalar(kind: int, value) -> bytes:
    return text(value) if kind == STRING else struct.pack("<" + _CODES[kind], value)


def pair(key: bytes | str, kind: int, value) -> bytes:
    return text(key) + struct.pack("<I", kind) + scalar(kind, value)


def array(element: int, items: list | bytes, count: int | None = None) -> bytes:
    """Return element type, count and elements. `items` may be the elements' bytes."""
    body = items if isinstance(items, bytes) else b"".join(scalar(element, item) for item in items)
    return struct.pack("<IQ", element, len(items) if count is None else count) + body


def array_pair(key: str, element: int, items: list | bytes, count: int | None = None) -> bytes:
    return text(key) + struct.pack("<I", ARRAY) + array(element, items, count)


def entry(
    name: bytes | str, dims: list[int], type_id: int, offset: int, n_dims: int | None = None
) -> bytes:
    """Return a row of the tensor table. `dims` are in file order, row length first."""
    return (
        text(name)
        + struct.pack("<I", len(dims) if n_dims is None else n_dims)
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", type_id, offset)
    )


def gguf(
    pairs: list[bytes] = (),
    entries: list[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_pairs: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
    pad: bool = True,
) -> bytes:
    """Return a file of these parts. The counts are the true ones unless given."""
    n_tensors = len(entries) if n_tensors is None else n_tensors
    n_pairs = len(pairs) if n_pairs is None else n_pairs
    header = (
        magic
        + struct.pack("<IQQ", version, n_tensors, n_pairs)
        + b"".join(pairs)
        + b"".join(entries)
    )
    if pad and alignment:
        header += bytes(-len(header) % alignment)
    return header + data


def small(n_tensors: int = 2, pairs: list[bytes] = (), architecture: str = "llama") -> bytes:
    """Return a valid file with F32 tensors `t0`, `t1`, ... of shape [2, 8], filled with their
    number.
    """
    entries = [entry(f"t{i}", [8, 2], 0, 64 * i) for i in range(n_tensors)]
    data = b"".join(struct.pack("<16f", *[i] * 16) for i in range(n_tensors))
    return gguf([pair("general.architecture", STRING, architecture), *pairs], entries, data)
