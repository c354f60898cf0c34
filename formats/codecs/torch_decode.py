"""Decode with torch on the device that holds the bytes, with the functions of the CPU, run on all
blocks at once.

A block decoder is a plain Python function over the bytes of one block. Here it runs as plain
Python, but a number taken from the block is an int64 tensor with one element per block: loops over
constants are Python loops, arithmetic and tables are torch's, and what is written to `out[i]`
becomes a row of the result. Every operation rounds by itself, as on the CPU, so all bits are the
same (but for the payload of a NaN). `_traced` copies a function, and what it calls, with other
global names: `np` becomes `_Numpy`, tables become tensors, and `select` becomes `torch.where`.

It is exact and needs only torch. It is not the fastest way, as a block of 256 elements takes some
thousand operations. On a GPU their launches take most of the time, so large pieces are faster.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import numpy as np
import torch

from ...errors import ShapeError
from ..options import checks_keywords
from ..types import GGMLType, ggml_type
from . import codec, scalars

PIECE_ELEMENTS = 1 << 24  # at a time: bounds the memory, at about 16 bytes an element
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@checks_keywords
def decode_torch(
    type: str | GGMLType,
    data: torch.Tensor,
    n_cols: int,
    *,
    as_weights: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Decode rows: uint8[rows, row_bytes] to float32[rows, n_cols] on the device of `data`, with
    the bits of `codec.decode`, or rounded to `dtype`.

    For whole tensors, and I2_S, see `decode_tensor_torch`. Interleaved types take whole row groups.
    Raise ShapeError for bytes that do not fit the type, UnsupportedTypeError for a type without
    rows of numbers.
    """
    type = ggml_type(type)
    row_bytes = type.row_bytes(n_cols)
    if data.dtype != torch.uint8 or data.ndim != 2 or data.shape[1] != row_bytes:
        raise ShapeError(
            f"{type.name} rows of {n_cols} elements are uint8[rows, {row_bytes}], got"
            f" {data.dtype}{list(data.shape)}"
        )
    if len(data) % type.group_rows:
        raise ShapeError(
            f"{len(data)} rows are not a multiple of {type.group_rows}, the row group of"
            f" {type.name}"
        )
    one = _row_decoder(type, n_cols, as_weights, data.device)
    step = max(1, PIECE_ELEMENTS // (n_cols * type.group_rows)) * type.group_rows
    out = torch.empty((len(data), n_cols), dtype=dtype or torch.float32, device=data.device)
    for start in range(0, len(data), step):
        out[start : start + step] = one(data[start : start + step].contiguous())
    return out


@checks_keywords
def decode_tensor_torch(
    type: str | GGMLType,
    data: torch.Tensor,
    shape: tuple[int, ...],
    *,
    as_weights: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Decode the bytes of a whole tensor, uint8[bytes], to `dtype` of the numpy-order `shape`:
    `codec.decode_tensor` on any device. Raise ShapeError for bytes that do not fit the shape.
    """
    type = ggml_type(type)
    n_bytes = type.tensor_bytes(shape)
    if data.dtype != torch.uint8 or data.shape != (n_bytes,):
        raise ShapeError(
            f"a {type.name} tensor of shape {list(shape)} is uint8[{n_bytes}], got"
            f" {data.dtype}{list(data.shape)}"
        )
    if not type.tail_bytes:
        return decode_torch(
            type,
            data.reshape(-1, type.row_bytes(shape[-1])),
            shape[-1],
            as_weights=as_weights,
            dtype=dtype,
        ).reshape(shape)
    return _decode_i2_s(data, shape).to(dtype)


def _decode_i2_s(data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    from .ternary import check_i2_s

    check_i2_s(shape)
    scale = data[-32:-28].clone().view(torch.float32)
    shifts = torch.tensor([6, 4, 2, 0], dtype=torch.uint8, device=data.device).reshape(1, 4, 1)
    codes = data[:-32].reshape(-1, 1, 32) >> shifts & 3
    return ((codes.to(torch.float32) - 1) * scale).reshape(shape)


def _row_decoder(
    type: GGMLType, n_cols: int, as_weights: bool, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    if stored := _FLOATS.get(type.name):
        return lambda data: _aligned(data).view(stored).to(torch.float32)
    if type.is_interleaved:
        own = codec.has_block_decoder(type)  # as in codec.decode
        one = (_block_decoder if own else _row_decoder)(
            type if own else type.plain, n_cols, as_weights, device
        )
        return lambda data: one(_unpack_rows(type, data, n_cols))
    return _block_decoder(type, n_cols, as_weights, device)


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """Return the same bytes where they can be viewed as wider numbers."""
    return data if data.storage_offset() % 4 == 0 and data.data_ptr() % 4 == 0 else data.clone()


def _block_decoder(
    type: GGMLType, n_cols: int, as_weights: bool, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    function, factor = codec.block_decoder(type, as_weights)
    traced, blocks, head = _traced(function, device), n_cols // type.block_size, type.header_bytes

    def run(data: torch.Tensor) -> torch.Tensor:
        body = (
            data[:, head:]
            .reshape(-1, type.block_bytes)
            .T.to(torch.int64, memory_format=torch.contiguous_format)
        )
        out = torch.empty((type.block_size, body.shape[1]), dtype=torch.float32, device=data.device)
        if head:
            traced(body, data[:, :head].repeat_interleave(blocks, dim=0).T.to(torch.int64), out)
        else:
            traced(body, out)
        if factor != 1:
            out *= float(factor)
        return out.T.reshape(len(data), n_cols)

    return run


class _Numpy:
    """The part of numpy that decoders use, for tensors and for numbers."""

    float32 = staticmethod(
        lambda x: x.to(torch.float32) if isinstance(x, torch.Tensor) else float(np.float32(x))
    )
    int64 = staticmethod(lambda x: x.to(torch.int64) if isinstance(x, torch.Tensor) else int(x))
    int8 = staticmethod(lambda x: (x ^ 128) - 128)
    uint32 = staticmethod(lambda x: _Bits(x))


class _Bits:
    """32 bits that a decoder is about to view as a float32."""

    def __init__(self, bits: torch.Tensor):
        self.bits = bits

    def view(self, kind: object) -> torch.Tensor:
        return (
            ((self.bits & 0xFFFFFFFF ^ 0x80000000) - 0x80000000).to(torch.int32).view(torch.float32)
        )


def _select(
    condition: torch.Tensor, yes: torch.Tensor | float, no: torch.Tensor | float
) -> torch.Tensor:
    chosen = torch.where(condition != 0, yes, no)
    # Two numbers would get the default dtype.
    return chosen.to(torch.float32) if chosen.is_floating_point() else chosen


@functools.cache
def _traced(function: Callable, device: torch.device) -> Callable:
    """Return a copy of a decoder, or of a function that it calls, that takes and returns tensors on
    the device.
    """
    if function is scalars.select:
        return _select
    function = getattr(function, "py_func", function)
    names = {
        name: function.__globals__[name]
        for name in function.__code__.co_names
        if name in function.__globals__
    }
    names |= {
        name: _traced(value, device) for name, value in names.items() if hasattr(value, "py_func")
    }
    names |= {
        name: torch.from_numpy(value).to(device)
        for name, value in names.items()
        if isinstance(value, np.ndarray)
    }
    names |= {name: _Numpy for name, value in names.items() if value is np}
    return types.FunctionType(
        function.__code__,
        {"__builtins__": __builtins__} | names,
        function.__name__,
        function.__defaults__,
    )


def _unpack_rows(type: GGMLType, merged: torch.Tensor, n_cols: int) -> torch.Tensor:
    """Return rows of an interleaved type as rows of its plain type (or as its own decoder reads
    them). Sums in the headers of Q8_KV are 0.
    """
    from .interleaved import interleaving, row_head

    tables, head, k = interleaving(type), type.header_bytes, type.group_rows
    if n_cols % tables.elements:
        raise ShapeError(
            f"row length {n_cols} is not a multiple of {tables.elements}, which {type.name} needs"
        )
    groups, blocks = len(merged) // k, n_cols // tables.elements
    merged = merged.reshape(groups, -1)
    rows = merged.new_zeros((groups, k, row_head(type) + blocks * tables.row_bytes))
    rows[..., :head] = merged[:, : k * head].reshape(groups, k, head)
    body = merged[:, k * head :].reshape(groups * blocks, tables.merged_bytes)
    unpacked = _moved(body, type, merged.device).reshape(groups, blocks, k, tables.row_bytes)
    rows[..., row_head(type) :] = unpacked.transpose(1, 2).reshape(groups, k, -1)
    return rows.reshape(groups * k, -1)


def _moved(body: torch.Tensor, type: GGMLType, device: torch.device) -> torch.Tensor:
    """Return the bytes of the rows' blocks of merged blocks, uint8[n, bytes]: every byte is the xor
    of what is moved to it.
    """
    flips, rounds = _move_rounds(type, device)
    out = flips.expand(len(body), -1).clone()
    for source, shift, mask in rounds:
        out ^= body[:, source].to(torch.int32) << shift >> 8 & mask
    return out.to(torch.uint8)


@functools.cache
def _move_rounds(
    type: GGMLType, device: torch.device
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """Return the moves that undo an interleaving, in rounds of one move to each byte: (byte to
    read, left shift + 8, mask) for all bytes.
    """
    from .interleaved import interleaving

    moves = interleaving(type).unpack_moves
    rounds = []
    for table in moves.rounds():
        source, shift, mask = torch.from_numpy(table).to(device)
        rounds.append((source, shift.to(torch.int32), mask.to(torch.int32)))
    return torch.from_numpy(moves.flips).to(device, torch.int32), rounds
