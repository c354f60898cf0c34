"""Products of prompts in 8 bits: rows rounded to signed bytes, and sums of products back to halves.
See `prompt/rounded.cu`.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ...formats.types import GGMLType, ggml_type
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from ..layouts.table import packed_types, unit_header
from ..packed.matrix import PackedMatrix

_HALVES = {torch.bfloat16: "0", torch.float16: "1"}
GROUP = 128  # columns that are transformed together
MOST_COLUMNS = 32 * 1024  # a thread has 32
_BLOCKS = 4096  # each rounds one row after the other
FEWEST_ROWS = 32  # of x; cuBLAS takes more than 16


@functools.cache
def spec(half: torch.dtype) -> KernelSpec:
    """Return the kernels that round activations and scale sums."""
    short = "f16" if half == torch.float16 else "bf16"
    return KernelSpec(
        f"prompt_rounded_{short}",
        ("prompt/rounded.cu",),
        (("HALF", _HALVES[half]),),
        ("rounded_rows", "scaled_sums"),
    )


@functools.cache
def weights_spec(type: GGMLType) -> KernelSpec:
    """Return the kernel that rounds packed weights."""
    return KernelSpec(
        f"prompt_rounded_{type.name.lower()}_weights",
        (unit_header(type), "prompt/rounded.cu"),
        (("TYPE", type.name),),
        ("rounded_weights",),
    )


def specs() -> list[KernelSpec]:
    """Return all kernels of this module."""
    of_weights = (weights_spec(ggml_type(name)) for name in packed_types())
    return [*(spec(half) for half in _HALVES), *of_weights]


def fits(rows: int, cols: int) -> bool:
    """Return whether a matrix of this shape can be multiplied in 8 bits."""
    return rows % 8 == 0 and cols % GROUP == 0 and cols <= MOST_COLUMNS


def rounded_rows(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Round half[T, cols] to out int8[T, cols] and scales float32[T]; see `fits`."""
    rows, cols = x.shape
    launch(
        function(spec(x.dtype), "rounded_rows", x.device),
        rows,
        -(-cols // 1024) * 32,
        x,
        np.int32(cols),
        out,
        scales,
    )


def rounded_weights(m: PackedMatrix, first: int, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Round the rows `first` and on of packed weights to out int8[n, m.cols] and float32[n]."""
    launch(
        function(weights_spec(m.type), "rounded_weights", m.device),
        min(len(out), _BLOCKS),
        -(-m.cols // 1024) * 32,
        m.data,
        np.int64(m.total_rows),
        np.int32(m.cols),
        np.int64(first),
        np.int32(len(out)),
        out,
        scales,
    )
    if m.scale != 1:
        scales *= m.scale


def scaled_sums(
    sums: torch.Tensor,
    of_rows: torch.Tensor,
    of_columns: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """Compute out half[T, n], which may be some columns of a wider matrix, from sums int32[T, n] of
    products of rounded rows, the scales float32[T] and float32[n] of both, and bias half[n].
    """
    rows, n = sums.shape
    launch(
        function(spec(out.dtype), "scaled_sums", out.device),
        (rows, -(-n // 2048)),  # rows first: there may be more than 65,535
        256,
        sums,
        of_rows,
        of_columns,
        bias,
        np.int32(n),
        np.int32(out.stride(0)),
        out,
    )
