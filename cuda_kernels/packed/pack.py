"""Packed matrices at torch level: made from the bytes of a file, decoded as a whole or by rows.

    # pieces: host arrays uint8[k, row_bytes], in order of rows
    m = pack_matrix("IQ4_K", pieces, rows, cols, 1, "cuda")
    w = decode_matrix(m, torch.bfloat16)               # [rows, cols]
    x = decode_rows(embedding, tokens, torch.float32)  # [len(tokens), cols]

Everything also works on the CPU, with torch and the codecs of `formats/`, as a reference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import ShapeError, UnsupportedTypeError
from ...formats.codecs.interleaved import interleaving, row_head
from ...formats.codecs.rows import in_pieces
from ...formats.types import GGMLType, ggml_type
from ..layouts.table import plain_type
from .matrix import PackedMatrix, packable, packed_bytes, placed
from .rearrange import ByteRun, rearrange

_LEAST_SHARED = 1 << 20  # bytes that are worth several threads
_PIECE_BYTES = 32 << 20  # copied to the device at a time; two such buffers are pinned
# Threads: a single one reads and copies more slowly than the bus to the device.
_COPIERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class StoredRows:
    """`n` rows that are read where they are needed: `read(first, out)` fills uint8[k, row_bytes]
    with the rows from `first` on. Several threads call it.
    """

    n: int
    row_bytes: int
    read: Callable[[int, np.ndarray], None]

    @classmethod
    def of(cls, rows: np.ndarray | StoredRows) -> StoredRows:
        """Return rows in memory in this form. Raise ShapeError for anything but uint8[n, bytes]."""
        if isinstance(rows, StoredRows):
            return rows
        if rows.dtype != np.uint8 or rows.ndim != 2:
            raise ShapeError(f"rows are uint8[n, bytes]; got {rows.dtype}{list(rows.shape)}")

        def copy(first: int, out: np.ndarray) -> None:
            np.copyto(out, rows[first : first + len(out)])

        return cls(len(rows), rows.shape[1], copy)

    def part(self, first: int, n: int) -> StoredRows:
        """Return `n` of the rows, from `first` on."""
        return StoredRows(n, self.row_bytes, lambda at, out: self.read(first + at, out))


def pack_matrix(
    type: str | GGMLType,
    pieces: Iterable[np.ndarray | StoredRows],
    rows: int,
    cols: int,
    n_matrices: int = 1,
    device: torch.device | str = "cuda",
) -> PackedMatrix:
    """Bring the rows of a file to a device, packed.

    pieces: uint8[k, row_bytes] on the host, or rows to read, in order, together rows * n_matrices;
    whole row groups for interleaved types. Memory besides the result: a few pieces of 32 MB. Raise
    ShapeError for bytes that do not fit, UnsupportedTypeError for a type or length that has no
    layout.
    """
    type, device = ggml_type(type), torch.device(device)
    if not packable(type, cols):
        raise UnsupportedTypeError(f"rows of {cols} elements of {type.name} cannot be packed")
    plain = plain_type(type)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    data = torch.zeros(packed_bytes(type, rows, cols, n_matrices), dtype=torch.uint8, device=device)
    matrix = PackedMatrix(plain, rows, cols, n_matrices, data)
    pack_into(matrix, type, pieces)
    return matrix


def pack_into(
    matrix: PackedMatrix, type: GGMLType, pieces: Iterable[np.ndarray | StoredRows]
) -> None:
    """Fill a packed matrix, whose plain type is that of `type`, with the rows of a file. Otherwise
    as `pack_matrix`. Raise ShapeError for another number of rows.
    """
    total, done = matrix.total_rows, 0
    for raw in _staged(_split(type, pieces, matrix.cols), matrix.device, type.group_rows):
        if done + len(raw) > total:
            raise ShapeError(f"more than {total} rows of {type.name}")
        pack_rows(type, raw, matrix, done)
        done += len(raw)
    if done != total:
        raise ShapeError(f"{done} rows of {type.name}, expected {total}")


def _split(
    type: GGMLType, pieces: Iterable[np.ndarray | StoredRows], cols: int
) -> Iterator[StoredRows]:
    """Yield the pieces in parts of at most _PIECE_BYTES, in whole row groups."""
    row_bytes, group = type.row_bytes(cols), type.group_rows
    step = max(1, _PIECE_BYTES // (row_bytes * group)) * group
    for piece in map(StoredRows.of, pieces):
        if piece.row_bytes != row_bytes or piece.n % group:
            raise ShapeError(
                f"{type.name} rows of {cols} elements are uint8[rows, {row_bytes}], in groups of"
                f" {group}; got {piece.n} rows of {piece.row_bytes} bytes"
            )
        for start in range(0, piece.n, step):
            yield piece.part(start, min(step, piece.n - start))


def _staged(
    parts: Iterator[StoredRows], device: torch.device, group: int
) -> Iterator[torch.Tensor]:
    """Yield the parts on the device. Each is valid until the next but one is asked for (on the
    current stream). Threads read whole groups of `group` rows.
    """
    if device.type != "cuda":
        for part in parts:
            rows = np.empty((part.n, part.row_bytes), np.uint8)
            part.read(0, rows)
            yield torch.from_numpy(rows)
        return
    buffers = [torch.empty(0, dtype=torch.uint8)] * 2
    copied = [torch.cuda.Event(), torch.cuda.Event()]
    for n, part in enumerate(parts):
        size = part.n * part.row_bytes
        with torch.cuda.device(device):
            if buffers[n % 2].numel() < size:
                buffers[n % 2] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            copied[n % 2].synchronize()  # the previous contents have left the buffer
            pinned = buffers[n % 2][:size].view(part.n, part.row_bytes)
            into = pinned.numpy()
            in_pieces(
                lambda rows, into=into, part=part: part.read(rows.start, into[rows]),
                part.n,
                group,
                _COPIERS if size > _LEAST_SHARED else 1,
            )
            raw = pinned.to(device, non_blocking=True)
            copied[n % 2].record()
        yield raw
    for event in copied:
        event.synchronize()


def pack_rows(type: GGMLType, raw: torch.Tensor, matrix: PackedMatrix, first: int) -> None:
    """Pack rows of the file, uint8[n, row_bytes] on the device, as the rows from `first` on of the
    matrix.
    """
    if type.is_interleaved:
        raw = _undone(type, raw, matrix.cols)
    head = raw.shape[1] - matrix.cols // matrix.type.block_size * matrix.type.block_bytes
    blocks = matrix.cols // matrix.type.block_size
    for (_, n, per_row), offset in placed(matrix):
        if per_row:
            matrix.data[offset + first * n : offset + (first + len(raw)) * n].view(
                len(raw), n
            ).copy_(raw[:, :n])
    rearrange(
        matrix.layout.moves,
        raw,
        head,
        matrix.data,
        _segments(matrix, first),
        len(raw),
        blocks,
        matrix.type.block_bytes,
    )


def _segments(matrix: PackedMatrix, first: int) -> list[ByteRun]:
    """Return where the bytes of packed blocks go, those of row `first` first."""
    blocks = matrix.cols // matrix.type.block_size
    return [
        ByteRun(n, offset + first * blocks * n, blocks * n, n)
        for (_, n, per_row), offset in placed(matrix)
        if not per_row
    ]


def _undone(type: GGMLType, merged: torch.Tensor, cols: int) -> torch.Tensor:
    """Return the rows of an interleaved type as rows of its plain type (or as its own decoder reads
    them); the sums in headers of Q8_KV are 0.
    """
    tables, stored_head, k, head = (
        interleaving(type),
        type.header_bytes,
        type.group_rows,
        row_head(type),
    )
    groups, blocks = len(merged) // k, cols // tables.elements
    n_bytes = head + blocks * tables.row_bytes
    rows = torch.zeros((len(merged), n_bytes), dtype=torch.uint8, device=merged.device)
    merged = merged.reshape(groups, -1)
    rows[:, :stored_head] = merged[:, : k * stored_head].reshape(len(rows), stored_head)
    segments = [
        ByteRun(tables.row_bytes, row * n_bytes + head, k * n_bytes, tables.row_bytes)
        for row in range(k)
    ]
    rearrange(
        tables.unpack_moves,
        merged,
        k * stored_head,
        rows.view(-1),
        segments,
        groups,
        blocks,
        tables.merged_bytes,
    )
    return rows
