"""Decode rows of bytes to rows of floats for every ggml type, and interleave rows or undo it.

A codec is found by the type's name: `BLOCK_DECODERS` of the family modules hold one function per
type over the bytes of one block, `LAYOUTS` of the interleaving modules say where the bits of K rows
go. Adding a type means adding its function to a family file.

For three types, ggml's row decoder (`to_float`) does not give the weights that its matrix products
use. `decode` gives the former by default and the latter with `as_weights=True`:

    IQ6_K           row decoder: a cubic in the code; products: a table with the cubic's rounding
    IQ2_KT, IQ3_KT  products multiply by a further 1.05 and 1.01
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ...errors import ShapeError, UnsupportedTypeError
from ..kernel import over_blocks
from ..options import checks_keywords
from ..types import TYPES, GGMLType, ggml_type
from . import floats
from .rows import check_group, checked_rows, in_pieces

_FLOAT_DECODERS = {"F32": floats.decode_f32, "F16": floats.decode_f16, "BF16": floats.decode_bf16}
_FLOAT_ENCODERS = {"F32": floats.encode_f32, "F16": floats.encode_f16, "BF16": floats.encode_bf16}


@functools.cache
def _block_decoders() -> dict[str, Callable]:
    from . import fp4, grid, iq_k, iq_ks, k, legacy, q8, ternary, trellis

    return _union(
        *(
            family.BLOCK_DECODERS
            for family in (legacy, fp4, k, grid, ternary, iq_k, iq_ks, trellis, q8)
        )
    )


def _union(*tables: dict[str, Callable]) -> dict[str, Callable]:
    merged: dict[str, Callable] = {}
    for table in tables:
        if twice := merged.keys() & table.keys():
            raise RuntimeError(f"two codecs for {', '.join(sorted(twice))}")
        merged |= table
    return merged


@functools.cache
def _interleaved_types() -> frozenset[str]:
    from .interleaved import INTERLEAVERS

    return frozenset(INTERLEAVERS)


# Listed, as importing the decoders takes a fifth of a second.
_NOT_DECODABLE = frozenset({"F64", "I8", "I16", "I32", "I64", "I2_S"})


@checks_keywords
def decodable_types() -> list[str]:
    """Return the names of the types that `decode` supports."""
    return [name for name in TYPES if name not in _NOT_DECODABLE]


@checks_keywords
def decode(
    type: str | GGMLType,
    data: np.ndarray,
    n_cols: int,
    out: np.ndarray | None = None,
    threads: int = 1,
    *,
    as_weights: bool = False,
) -> np.ndarray:
    """Decode rows: uint8[rows, row_bytes] to float32[rows, n_cols], bit for bit as ggml's row
    decoders do.

    Interleaved types take whole row groups: the bytes of a group of K rows are K consecutive rows
    of `data`. `out` may give the result array; `threads` splits the rows. `as_weights` gives the
    values that matrix products use, which differ for IQ6_K, IQ2_KT and IQ3_KT (see above). Raise
    ShapeError for bytes that do not fit the type, UnsupportedTypeError for a type without rows of
    numbers.
    """
    type = ggml_type(type)
    data = checked_rows(type, data, n_cols)
    if out is None:
        out = np.empty((len(data), n_cols), dtype=np.float32)
    elif out.shape != (len(data), n_cols) or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ShapeError(
            f"out is {out.dtype}{list(out.shape)}, expected contiguous float32[{len(data)},"
            f" {n_cols}]"
        )
    one = _row_decoder(type, n_cols, as_weights)
    in_pieces(lambda part: one(data[part], out[part]), len(data), type.group_rows, threads)
    return out


def decode_plain(type: GGMLType, data: np.ndarray, n_cols: int) -> np.ndarray:
    """Return the float32[rows, n_cols] that products use of rows whose interleaving, if the type
    has any, is undone: what `quantize.encode.row_encoder` writes.
    """
    out = np.empty((len(data), n_cols), dtype=np.float32)
    _block_decoder(type, n_cols, True)(data, out)
    return out


@checks_keywords
def decode_tensor(
    type: str | GGMLType,
    data: np.ndarray,
    shape: tuple[int, ...],
    threads: int = 1,
    *,
    as_weights: bool = False,
) -> np.ndarray:
    """Decode the bytes of a whole tensor, uint8[bytes], to float32 of the numpy-order `shape`.

    This is the only way to read I2_S, whose single scale follows the data of all rows. Otherwise it
    does the same as `decode`. Raise ShapeError for bytes that do not fit the shape.
    """
    from .ternary import TENSOR_DECODERS, check_i2_s

    type = ggml_type(type)
    data = np.ascontiguousarray(data)
    n_bytes = type.tensor_bytes(shape)
    if data.dtype != np.uint8 or data.shape != (n_bytes,):
        raise ShapeError(
            f"a {type.name} tensor of shape {list(shape)} is uint8[{n_bytes}], got"
            f" {data.dtype}{list(data.shape)}"
        )
    whole = TENSOR_DECODERS.get(type.name)
    if whole is None:
        return decode(
            type,
            data.reshape(-1, type.row_bytes(shape[-1])),
            shape[-1],
            None,
            threads,
            as_weights=as_weights,
        ).reshape(shape)
    check_i2_s(shape)
    out = np.empty(shape, dtype=np.float32)
    whole(data, out)
    return out


def _row_decoder(
    type: GGMLType, n_cols: int, as_weights: bool
) -> Callable[[np.ndarray, np.ndarray], None]:
    if type.name in _FLOAT_DECODERS:
        return _FLOAT_DECODERS[type.name]
    if type.name in _interleaved_types():
        from .interleaved import unpack_rows

        # A row of it decodes unlike a row of its plain type, or it has none.
        own = has_block_decoder(type)
        one = (
            _block_decoder(type, n_cols, as_weights)
            if own
            else _row_decoder(type.plain, n_cols, as_weights)
        )
        return lambda data, out: one(unpack_rows(type, data, n_cols), out)
    return _block_decoder(type, n_cols, as_weights)


def has_block_decoder(type: GGMLType) -> bool:
    """Return whether a family module has a function for the bytes of one block of the type."""
    return type.name in _block_decoders()


def block_decoder(type: GGMLType, as_weights: bool = False) -> tuple[Callable, np.float32]:
    """Return (function, factor): the plain function that decodes one block, `(block, out)` or,
    where rows have a header, `(block, head, out)`, and the factor of its values. Raise
    UnsupportedTypeError for a type without one.
    """
    from .iq_k import PRODUCT_DECODERS
    from .trellis import PRODUCT_FACTORS

    function = _block_decoders().get(type.name)
    if function is None:
        hint = (
            "its scale is that of the whole tensor, use decode_tensor"
            if type.tail_bytes
            else "it is not a type of weights"
        )
        raise UnsupportedTypeError(f"rows of {type.name} cannot be decoded: {hint}")
    if as_weights:
        function = PRODUCT_DECODERS.get(type.name, function)
    return function, np.float32(PRODUCT_FACTORS.get(type.name, 1) if as_weights else 1)


def _loop_argument(data: np.ndarray) -> np.ndarray:
    """Return columns of rows of bytes as a contiguous read-only array: others, as most slices of
    several rows are, would compile a loop again.
    """
    found = np.ascontiguousarray(data).view()
    found.flags.writeable = False
    return found


def _block_decoder(
    type: GGMLType, n_cols: int, as_weights: bool
) -> Callable[[np.ndarray, np.ndarray], None]:
    function, factor = block_decoder(type, as_weights)
    blocks, head = n_cols // type.block_size, type.header_bytes

    def run(data: np.ndarray, out: np.ndarray) -> None:
        body = _loop_argument(data[:, head:]).reshape(len(data), blocks, type.block_bytes)
        values = out.reshape(len(data), blocks, type.block_size)
        if head:
            heads = _loop_argument(data[:, :head])
            over_blocks(function, per_row=("head",))(body, heads, values)
        else:
            over_blocks(function)(body, values)
        if factor != 1:
            out *= factor

    return run


@checks_keywords
def interleave(type: str | GGMLType, data: np.ndarray, n_cols: int, threads: int = 1) -> np.ndarray:
    """Turn rows of the plain type, uint8[rows, row_bytes], into the same number of rows of the
    interleaved `type`.

    Nothing is lost except the sum of a row's codes, which Q8_KV has and Q8_KV_R8 does not. Raise
    ShapeError for rows that do not fit, UnsupportedTypeError if `type` is not interleaved or no
    plain type repacks into it.
    """
    from .interleaved import pack_rows

    type = ggml_type(type)
    plain = _plain_type(type)
    data = checked_rows(plain, data, n_cols)
    check_group(type, len(data))
    out = np.empty((len(data), type.row_bytes(n_cols)), dtype=np.uint8)
    in_pieces(
        lambda part: np.copyto(out[part], pack_rows(type, data[part], n_cols)),
        len(data),
        type.group_rows,
        threads,
    )
    return out


@checks_keywords
def deinterleave(
    type: str | GGMLType, data: np.ndarray, n_cols: int, threads: int = 1
) -> np.ndarray:
    """Turn rows of the interleaved `type` into rows of its plain type. Sums of Q8_KV rows are
    computed again.
    """
    from .interleaved import unpack_rows

    type = ggml_type(type)
    plain = _plain_type(type)
    data = checked_rows(type, data, n_cols)
    out = np.empty((len(data), plain.row_bytes(n_cols)), dtype=np.uint8)
    in_pieces(
        lambda part: np.copyto(out[part], unpack_rows(type, data[part], n_cols)),
        len(data),
        type.group_rows,
        threads,
    )
    return out


def _plain_type(type: GGMLType) -> GGMLType:
    if not type.is_interleaved:
        raise UnsupportedTypeError(f"{type.name} is not a row-interleaved type")
    if type.base is None:
        raise UnsupportedTypeError(
            f"{type.name} has no plain type: values are quantized to it directly"
        )
    return ggml_type(type.base)


def encode_float(type: str | GGMLType, x: np.ndarray) -> np.ndarray:
    """Encode float32[rows, n_cols] as rows of F32, F16 or BF16, uint8[rows, row_bytes], rounding to
    nearest even. Raise UnsupportedTypeError for another type.
    """
    type = ggml_type(type)
    if type.name not in _FLOAT_ENCODERS:
        raise UnsupportedTypeError(f"{type.name} is not a float type")
    return _FLOAT_ENCODERS[type.name](x)
