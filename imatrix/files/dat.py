"""The legacy `.dat` layout of importance matrices, little-endian:

    i32 n_entries
    per entry: i32 length and bytes of the name, i32 ncall, i32 nval,
               f32[nval] = sum / count * ncall
    optional:  i32 chunk count, i32 length and bytes of the data set's name

`ncall` counts evaluation calls: chunks, or in ik_llama.cpp pieces of chunks that are larger than
its batch. The layout does not say how the values are divided among experts. Of several data sets
only the last one is named.

ik_llama.cpp names the entry of attn_k_b after its view of the matrix, with " (reshaped)" at the
end, and does not find it again. Here it is read as that of the tensor.

An expert that saw nothing has no mean. ik_llama.cpp leaves out a tensor with such experts, unless
they are fewer than round(0.05 * experts), which is impossible with fewer than 10 experts; llama.cpp
keeps it and writes means of 1. This module does the latter. Without an entry a quantizer knows
nothing of the other experts either, and low-bit types cannot be quantized.
"""

from __future__ import annotations

import logging
import os
import struct

import numpy as np

from ...errors import ImatrixError, TruncatedFileError, printable
from ...formats.output import PartFile
from ..data import Entry, Imatrix, as_float32, check_count, check_values
from ..stored import OpenFile, StoredEntry

log = logging.getLogger(__name__)

_I32 = struct.Struct("<i")
_VIEW = " (reshaped)"
_LONGEST_NAME, _MOST_ENTRIES, _MOST = 65535, 2**20, 2**31 - 1


def load_dat(path: str | os.PathLike) -> Imatrix:
    """Load a file. Means are exact; counts are calls (`chunk_size` 1). Raise ImatrixError or
    TruncatedFileError for a malformed file.
    """
    path = os.fspath(path)
    reader = _Reader(OpenFile(path))
    _check_start(reader.file)
    n_entries = reader.integer("number of entries", 1)
    entries: dict[str, Entry] = {}
    for _ in range(n_entries):
        name = reader.text("name", 1).removesuffix(_VIEW)
        ncall, at = reader.integer("ncall", 0), reader.position
        n_values = reader.integer("number of values", 1)
        # Readers divide by ncall where it is positive and take the values as they are where it is
        # 0.
        entry = StoredEntry(reader.file, reader.position, (1, n_values), np.array([max(ncall, 1)]))
        check_values(
            np.frombuffer(reader.take(4 * n_values, f"{n_values} values"), "<f4"), name, path
        )
        if name in entries:
            raise ImatrixError("the entry occurs twice", file=path, tensor=name, offset=at)
        entries[name] = entry
    chunk_count, datasets = 0, ()
    if not reader.at_end:
        chunk_count = reader.integer("chunk count", 0)
        datasets = (name,) if (name := reader.text("data set name", 0)) else ()
    if not reader.at_end:
        raise ImatrixError(
            f"{reader.left} bytes too many at the end", file=path, offset=reader.position
        )
    return Imatrix(
        entries,
        chunk_count or max(int(entry.counts[0]) for entry in entries.values()),
        1,
        datasets,
        path,
    )


def save_dat(imatrix: Imatrix, path: str | os.PathLike) -> None:
    """Write entries in their order: a file that was read is written with the same bytes. Experts
    that saw nothing are written as ones, and entries that saw nothing at all are left out; both are
    logged. Raise ImatrixError if nothing is left.
    """
    kept = []
    for name, entry in imatrix.entries.items():
        if entry.counts.any():
            kept.append(name)
            if entry.n_missing:
                log.warning(
                    "%s: %d of %d experts saw no input, their importance is written as 1",
                    name,
                    entry.n_missing,
                    len(entry.counts),
                )
        else:
            log.warning("%s saw no input at all and is left out of %s", name, os.fspath(path))
    if not kept:
        raise ImatrixError("there is nothing to write: no tensor saw any input", file=path)
    dataset = (imatrix.datasets[-1] if imatrix.datasets else "").encode("utf-8", "surrogateescape")
    with PartFile(path) as part:
        part.write(_I32.pack(len(kept)))
        for name in kept:
            ncall, values = _values(imatrix.entries[name], max(imatrix.chunk_size, 1))
            encoded = name.encode("utf-8", "surrogateescape")
            check_count(ncall, _MOST, f"number of calls of {name}", path)
            check_count(values.size, _MOST, f"number of values of {name}", path)
            part.write(_I32.pack(len(encoded)) + encoded + struct.pack("<ii", ncall, values.size))
            part.write(as_float32(values, name, path))
        part.write(
            struct.pack(
                "<ii",
                check_count(imatrix.chunk_count, _MOST, "number of chunks", path),
                len(dataset),
            )
            + dataset
        )


def _values(entry: Entry, chunk_size: int) -> tuple[int, np.ndarray]:
    """Return ncall and float64[n_matrices, n_cols] of means * ncall."""
    ncall = entry.calls or max(1, -(-int(entry.counts.max()) // chunk_size))
    # sums * (ncall / count), not the other way round: a file that was read is then written with the
    # same bits.
    scale = ncall / np.maximum(entry.counts[:, None], 1)
    return ncall, np.where(entry.counts[:, None] > 0, entry.sums * scale, float(ncall))


def _check_start(file: OpenFile) -> None:
    """Raise ImatrixError for a file whose first numbers cannot be those of an importance matrix."""
    head = file.read(0, min(file.size, 32), "the header")
    numbers = struct.unpack_from(f"<{min(len(head) // 4, 2)}i", head)
    limits = (("number of entries", _MOST_ENTRIES), ("length of the first name", _LONGEST_NAME))
    for (what, most), number in zip(limits, numbers):
        if not 1 <= number <= most:
            text = head.decode("utf-8", "replace").rstrip("\ufffd")
            found = (
                f"it begins with the text '{printable(text)}'"
                if text and all(c.isprintable() or c.isspace() for c in text)
                else f"as a .dat file, its {what} would be {number}"
            )
            raise ImatrixError(
                f"is not an importance matrix: it is not a GGUF file, and {found}", file=file.path
            )


class _Reader:
    """Read fields of the file, each checked against the bytes that are left."""

    def __init__(self, file: OpenFile):
        self.file, self.path, self.position = file, file.path, 0

    @property
    def left(self) -> int:
        return self.file.size - self.position

    @property
    def at_end(self) -> bool:
        return self.left <= 0

    def take(self, n: int, what: str) -> bytes:
        if n > self.left:
            raise TruncatedFileError(
                f"ends {self.left} bytes after the start of {what} ({n} bytes)",
                file=self.path,
                offset=self.position,
            )
        self.position += n
        return self.file.read(self.position - n, n, what)

    def integer(self, what: str, least: int) -> int:
        at = self.position
        (value,) = _I32.unpack(self.take(4, f"the {what}"))
        if value < least:
            raise ImatrixError(
                f"the {what} is {value}, expected at least {least}", file=self.path, offset=at
            )
        return value

    def text(self, what: str, least: int) -> str:
        at, length = self.position, self.integer(f"length of the {what}", least)
        if length > _LONGEST_NAME:
            raise ImatrixError(
                f"the {what} has {length} bytes, expected at most {_LONGEST_NAME}",
                file=self.path,
                offset=at,
            )
        return self.take(length, f"the {what}").decode("utf-8", "surrogateescape")
