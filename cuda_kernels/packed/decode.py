"""Packed matrices decoded: as a whole, by rows, or back to the rows of a file."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ...errors import ShapeError
from ...formats.codecs import codec
from ...formats.codecs.bit_moves import Moves
from ...formats.codecs.interleaved import pack_rows as interleaved_rows
from ...formats.types import GGMLType, ggml_type
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from ..layouts.layout import UNIT
from ..layouts.table import packed_types, unit_header
from .matrix import PackedMatrix, placed

_FUNCTIONS = {
    torch.float32: "dequantize_f32",
    torch.float16: "dequantize_f16",
    torch.bfloat16: "dequantize_bf16",
}
_THREADS = 256


def specs() -> list[KernelSpec]:
    """Return all kernels of this module."""
    every = [dequantize_spec(ggml_type(name)) for name in packed_types()]
    return [*every, dequantize_spec(ggml_type("NVFP4"), scaled=True)]


@functools.cache
def dequantize_spec(type: GGMLType, scaled: bool = False) -> KernelSpec:
    """Return the kernels that decode a type to each dtype. scaled: they take a factor."""
    sources, functions = (unit_header(type), "weights/dequantize.cu"), tuple(_FUNCTIONS.values())
    name = f"dequantize_{type.name.lower()}{'_scaled' * scaled}"
    defines = (("TYPE", type.name), ("SCALED", str(int(scaled))))
    return KernelSpec(name, sources, defines, functions)


def unpack_rows(matrix: PackedMatrix) -> np.ndarray:
    """Return the rows as the file has them (in their plain type), uint8[rows, row_bytes]: the
    inverse of packing, on the CPU.

    Bytes of row headers that packing leaves out are 0.
    """
    data = matrix.data.cpu().numpy()
    rows, blocks, type = matrix.total_rows, matrix.cols // matrix.type.block_size, matrix.type
    result = np.zeros((rows, type.row_bytes(matrix.cols)), dtype=np.uint8)
    bodies = []
    for (_, n, per_row), offset in placed(matrix):
        plane = data[offset : offset + rows * n * (1 if per_row else blocks)]
        if per_row:
            result[:, :n] = plane.reshape(rows, n)
        else:
            bodies.append(plane.reshape(rows * blocks, n))
    m: Moves = matrix.layout.moves
    body = np.concatenate(bodies, axis=1) ^ m.flips
    back = np.zeros((rows * blocks, type.block_bytes), dtype=np.uint8)
    for source, target, shift, mask in zip(
        m.source.tolist(), m.target.tolist(), m.shift.tolist(), m.mask.tolist(), strict=True
    ):
        back[:, source] |= ((body[:, target].astype(np.int32) & mask) << 8 >> shift).astype(
            np.uint8
        )
    result[:, type.header_bytes :] = back.reshape(rows, -1)
    return result


def decode_matrix(
    m: PackedMatrix,
    dtype: torch.dtype,
    *,
    first_row: int = 0,
    n_rows: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rows first_row .. first_row + n_rows (all of them by default) as `dtype`[n_rows,
    cols], times its scale: float32 exact, bfloat16 or float16 rounded from it. `out`: a contiguous
    tensor for the result. Raise ShapeError for rows that do not exist.
    """
    n_rows = m.total_rows - first_row if n_rows is None else n_rows
    if first_row < 0 or n_rows < 0 or first_row + n_rows > m.total_rows:
        raise ShapeError(f"rows {first_row} to {first_row + n_rows} of a matrix of {m.total_rows}")
    return _decode(m, dtype, None, first_row, n_rows, out)


def decode_rows(
    m: PackedMatrix, ids: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the rows `ids` int64[n] (on the device of m; they are not checked) as `dtype`[n,
    cols].
    """
    return _decode(m, dtype, ids, 0, len(ids), out)


def _decode(
    m: PackedMatrix,
    dtype: torch.dtype,
    ids: torch.Tensor | None,
    first: int,
    n_rows: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if out is None:
        out = torch.empty((n_rows, m.cols), dtype=dtype, device=m.device)
    elif (
        out.numel() != n_rows * m.cols
        or out.dtype != dtype
        or not out.is_contiguous()
        or out.device != m.device
    ):
        wanted = f"{dtype}[{n_rows}, {m.cols}] on {m.device}"
        raise ShapeError(
            f"out is {out.dtype}{list(out.shape)} on {out.device}, expected contiguous {wanted}"
        )
    if ids is not None and (
        ids.dtype != torch.int64 or ids.device != m.device or not ids.is_contiguous()
    ):
        raise ShapeError(
            f"ids are {ids.dtype} on {ids.device}, expected contiguous int64 on {m.device}"
        )
    if not m.data.is_cuda:
        stored = unpack_rows(m)
        if m.type.is_interleaved:  # one that has its own decoder
            stored = interleaved_rows(m.type, stored, m.cols)
        values = torch.from_numpy(codec.decode(m.type, stored, m.cols, as_weights=True))
        chosen = torch.arange(first, first + n_rows) if ids is None else ids
        return out.copy_(values[chosen].view(out.shape) * m.scale)
    units = n_rows * (m.cols // UNIT)
    if units >= 1 << 32:
        raise ShapeError(f"{n_rows} rows of {m.cols} elements are too many to be decoded at once")
    scaled = m.scale != 1
    if units:
        with torch.cuda.device(m.device):
            launch(
                function(dequantize_spec(m.type, scaled), _FUNCTIONS[dtype], m.device),
                -(-units // _THREADS),
                _THREADS,
                m.data,
                out,
                np.int64(m.total_rows),
                np.int32(m.cols),
                np.uint32(n_rows),
                ids,
                np.int64(first),
                np.uint32(1),  # consecutive rows for each of `ids`
                *([np.float32(m.scale)] if scaled else []),
            )
    return out
