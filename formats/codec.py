"""Rows of bytes to rows of floats for every supported ggml type, and interleaving both ways.

A codec is found by the type's name: `BLOCK_DECODERS` of the family modules hold one function per type over the bytes of
one block; `INTERLEAVERS` hold pairs of bit permutations. Adding a type means adding its function to a family file.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..errors import ShapeError, UnsupportedTypeError
from .codecs import floats
from .kernel import over_blocks
from .types import TYPES, GGMLType, ggml_type

_FLOAT_DECODERS = {"F32": floats.decode_f32, "F16": floats.decode_f16, "BF16": floats.decode_bf16}
_FLOAT_ENCODERS = {"F32": floats.encode_f32, "F16": floats.encode_f16, "BF16": floats.encode_bf16}


def _block_decoders() -> dict[str, Callable]:
    from .codecs import iq_k, k, legacy

    return _union(legacy.BLOCK_DECODERS, k.BLOCK_DECODERS, iq_k.BLOCK_DECODERS)


def _union(*tables: dict[str, Callable]) -> dict[str, Callable]:
    merged: dict[str, Callable] = {}
    for table in tables:
        if twice := merged.keys() & table.keys():
            raise RuntimeError(f"two codecs for {', '.join(sorted(twice))}")
        merged |= table
    return merged


def _interleavers() -> dict[str, tuple[Callable, Callable]]:
    from .codecs import interleaved

    return interleaved.INTERLEAVERS


def decodable_types() -> list[str]:
    """Names of the types that `decode` supports."""
    known = _FLOAT_DECODERS.keys() | _block_decoders().keys() | _interleavers().keys()
    return [name for name in TYPES if name in known]


def decode(type: str | GGMLType, data: np.ndarray, n_cols: int, out: np.ndarray | None = None, threads: int = 1) -> np.ndarray:
    """Decode rows: uint8[rows, row_bytes] to float32[rows, n_cols], bit for bit as ggml's row decoders do.

    Interleaved types take whole row groups: the bytes of a group of K rows are K consecutive rows of `data`.
    `out` may give the result array; `threads` splits the rows. ShapeError for bytes that do not fit the type,
    UnsupportedTypeError for a type without a codec.
    """
    type = ggml_type(type)
    data = _checked_rows(type, data, n_cols)
    if out is None:
        out = np.empty((len(data), n_cols), dtype=np.float32)
    elif out.shape != (len(data), n_cols) or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ShapeError(f"out is {out.dtype}{list(out.shape)}, expected contiguous float32[{len(data)}, {n_cols}]")
    one = _row_decoder(type, n_cols)
    if threads <= 1 or len(data) < 2 * type.group_rows:
        one(data, out)
        return out
    step = -(-len(data) // threads // type.group_rows) * type.group_rows
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda at: one(data[at : at + step], out[at : at + step]), range(0, len(data), step)))
    return out


def _row_decoder(type: GGMLType, n_cols: int) -> Callable[[np.ndarray, np.ndarray], None]:
    if type.name in _FLOAT_DECODERS:
        return _FLOAT_DECODERS[type.name]
    if type.name in _interleavers():
        plain = ggml_type(type.base)
        decode_plain = _row_decoder(plain, n_cols)
        return lambda data, out: decode_plain(_deinterleave(type, data, n_cols), out)
    function = _block_decoders().get(type.name)
    if function is None:
        raise UnsupportedTypeError(f"decoding {type.name} is not supported yet")
    blocks, head = n_cols // type.block_size, type.header_bytes

    def run(data: np.ndarray, out: np.ndarray) -> None:
        body = data[:, head:].reshape(len(data), blocks, type.block_bytes)
        values = out.reshape(len(data), blocks, type.block_size)
        if head:
            over_blocks(function, per_row=("head",))(body, data[:, :head], values)
        else:
            over_blocks(function)(body, values)

    return run


def interleave(type: str | GGMLType, data: np.ndarray, n_cols: int) -> np.ndarray:
    """Rows of the plain type, uint8[rows, row_bytes], to the same number of rows of the interleaved `type`. Lossless."""
    type = ggml_type(type)
    pack = _interleaver(type)[0]
    plain = ggml_type(type.base)
    data = _checked_rows(plain, data, n_cols)
    _check_group(type, len(data))
    groups, blocks, head = len(data) // type.group_rows, n_cols // plain.block_size, plain.header_bytes
    grouped = data.reshape(groups, type.group_rows, -1)
    body = grouped[..., head:].reshape(groups, type.group_rows, blocks, plain.block_bytes)
    packed = pack(body).reshape(groups, -1)
    if head:
        packed = np.concatenate([grouped[..., :head].reshape(groups, -1), packed], axis=1)
    return packed.reshape(len(data), -1)


def deinterleave(type: str | GGMLType, data: np.ndarray, n_cols: int) -> np.ndarray:
    """Inverse of `interleave`: rows of the interleaved `type` to rows of its plain type."""
    type = ggml_type(type)
    _interleaver(type)
    return _deinterleave(type, _checked_rows(type, data, n_cols), n_cols)


def _deinterleave(type: GGMLType, data: np.ndarray, n_cols: int) -> np.ndarray:
    unpack = _interleavers()[type.name][1]
    plain = ggml_type(type.base)
    groups, blocks, head = len(data) // type.group_rows, n_cols // plain.block_size, plain.header_bytes
    merged = data.reshape(groups, -1)
    heads = merged[:, : type.group_rows * head].reshape(groups, type.group_rows, head)
    body = unpack(merged[:, type.group_rows * head :].reshape(groups, blocks, -1))
    rows = body.reshape(groups, type.group_rows, -1)
    return np.concatenate([heads, rows], axis=2).reshape(len(data), -1) if head else rows.reshape(len(data), -1)


def _interleaver(type: GGMLType) -> tuple[Callable, Callable]:
    if not type.is_interleaved:
        raise UnsupportedTypeError(f"{type.name} is not a row-interleaved type")
    pair = _interleavers().get(type.name)
    if pair is None:
        raise UnsupportedTypeError(f"interleaving {type.name} is not supported yet")
    return pair


def encode_float(type: str | GGMLType, x: np.ndarray) -> np.ndarray:
    """float32[rows, n_cols] to rows of F32, F16 or BF16, uint8[rows, row_bytes], rounding to nearest even."""
    type = ggml_type(type)
    if type.name not in _FLOAT_ENCODERS:
        raise UnsupportedTypeError(f"{type.name} is not a float type")
    return _FLOAT_ENCODERS[type.name](x)


def _checked_rows(type: GGMLType, data: np.ndarray, n_cols: int) -> np.ndarray:
    row_bytes = type.row_bytes(n_cols)
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != row_bytes:
        raise ShapeError(f"{type.name} rows of {n_cols} elements are uint8[rows, {row_bytes}], got {data.dtype}{list(data.shape)}")
    _check_group(type, len(data))
    return np.ascontiguousarray(data)


def _check_group(type: GGMLType, rows: int) -> None:
    if rows % type.group_rows:
        raise ShapeError(f"{rows} rows are not a multiple of {type.group_rows}, the row group of {type.name}")
