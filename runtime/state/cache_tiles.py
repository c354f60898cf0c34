"""How rows of quantized cache types are arranged in memory."""

from __future__ import annotations

from enum import Enum

import torch

from ...cuda_kernels.attention.shape import CACHE_TILE as TILE
from .cache_types import CacheType


class RowLayout(Enum):
    """Where the bytes of rows are. A row is one head of one position.

    BLOCKS: [rows, heads, row_bytes], in ggml's blocks.
    FIELDS: the same, with the fields of a row together (`CacheType.by_fields`).
    TILES: [tiles, heads, TILE * row_bytes]. Codes of TILE positions of a head stand together, then
    their high bits, then their scales, so that codes begin where lines of memory do. A row of
    136 bytes (q8_0, 128 elements) alone takes five sectors of two lines.
    """

    BLOCKS = "blocks"
    FIELDS = "fields"
    TILES = "tiles"


def shape_of(layout: RowLayout, n_rows: int, heads: int, row_bytes: int) -> tuple[int, int, int]:
    """Return the shape of memory for `n_rows` positions."""
    if layout is RowLayout.TILES:
        return -(-n_rows // TILE), heads, TILE * row_bytes
    return n_rows, heads, row_bytes


def put(
    layout: RowLayout,
    type: CacheType,
    memory: torch.Tensor,
    rows: slice | torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Write values uint8[n, heads, row_bytes], in ggml's blocks, to rows of memory: a slice, or
    int64[n] on its device.
    """
    if layout is RowLayout.BLOCKS:
        memory[rows] = values
        return
    by_fields = type.by_fields(values)
    if layout is RowLayout.FIELDS:
        memory[rows] = by_fields
        return
    fields = _fields(type, memory)
    sizes = [field.shape[-1] for field in fields]
    tile, i = _places(rows, memory.device)
    for field, part in zip(fields, by_fields.split(sizes, dim=-1), strict=True):
        field[tile, :, i] = part


def get(
    layout: RowLayout, type: CacheType, memory: torch.Tensor, rows: slice | torch.Tensor
) -> torch.Tensor:
    """Return rows of memory in ggml's blocks, uint8[n, heads, row_bytes]."""
    if layout is RowLayout.BLOCKS:
        return memory[rows]
    if layout is RowLayout.FIELDS:
        return type.in_blocks(memory[rows])
    tile, i = _places(rows, memory.device)
    found = [field[tile, :, i] for field in _fields(type, memory)]
    return type.in_blocks(torch.cat(found, dim=-1))


def _fields(type: CacheType, memory: torch.Tensor) -> list[torch.Tensor]:
    """Return views uint8[tiles, heads, TILE, bytes] of memory: codes, high bits, scales."""
    sizes = type.field_bytes(memory.shape[-1] // TILE)
    parts = memory.split([TILE * size for size in sizes], dim=-1)
    return [part.unflatten(-1, (TILE, size)) for part, size in zip(parts, sizes, strict=True)]


def _places(rows: slice | torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tiles of rows, and which of the TILE positions they are."""
    if isinstance(rows, slice):
        rows = torch.arange(rows.start, rows.stop, device=device)
    return rows // TILE, rows % TILE
