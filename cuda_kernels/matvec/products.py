"""Matrix-vector products on packed matrices with 1 to 8 rows of float32 activations, for decode
steps.

    # out = W rms_norm(h)
    norm_matvec(h, norm_weight, eps, [q, k, v], [out_q, out_k, out_v])
    # out = W x
    plain_matvec(x, [up], [out])
    # out = silu(G rms_norm(h)) * (U rms_norm(h))
    gate_up(h, norm_weight, eps, gate, up, out)
    # h += W x + bias; out = W x
    matvec_add(x, down, h)
    matvec_set(x, down, out)

`experts.py` has the same for experts.

With quantized matrices activations are rounded to 8 bits with a scale per 32 (as Q8_0, but the
scale stays float32); products of bytes are added exactly, the rest in float32, in an order that
follows from shapes and device alone. With F32, F16 and BF16 matrices everything is float32.
Products with a matrix are multiplied by its scale. Nothing is allocated, so calls can be captured
into a CUDA graph; with `pdl` a kernel loads its first weights while the previous one still runs.
Several rows are multiplied on tensor cores where memory for that is lent: see `several.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...errors import ShapeError
from ...formats.types import GGMLType
from ..common.gating import Gating
from ..compile.launch import device_index, function, launch
from ..packed.matrix import PackedMatrix
from . import several
from .operands import Join, NextAttention, RowRange, check_matrix, check_tensor
from .plan import (
    AFTER_FEW_BLOCKS,
    GATE_BY,
    GATE_UP,
    MATVEC_ADD,
    MOST_ROWS,
    NAMES,
    NORM_MATVEC,
    DeviceLimits,
    MatvecPlan,
    limits,
)
from .several import SeveralPlan, several_plan, several_spec
from .sizes import shared_space_of
from .specs import is_late, product_spec

# A matrix, the result, the number of its rows, and the first row.
MatrixPart = tuple[PackedMatrix, torch.Tensor, int, int]


def norm_matvec(
    h: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    matrices: Sequence[PackedMatrix | RowRange],
    outs: Sequence[torch.Tensor],
    join: Join | None = None,
    attention: NextAttention | None = None,
    *,
    pdl: bool = True,
) -> None:
    """Compute outs[i] float32[n, rows] = matrices[i] times rms_norm(h) for h float32[n, cols], 1 <=
    n <= 8. Up to three matrices of one type make one launch. norm_weight: float32[cols], None for
    ones. With `join`, h is first replaced. attention: the launch that follows, if it is one.
    Raise ShapeError for tensors that do not fit.
    """
    groups = _by_type(matrices, outs)
    for group in groups:
        following = attention if group is groups[-1] else None
        _product(NORM_MATVEC, h, norm_weight, eps, group, pdl, join=join, attention=following)
        h, join = (h, None) if join is None else (join.out, None)


def plain_matvec(
    x: torch.Tensor,
    matrices: Sequence[PackedMatrix | RowRange],
    outs: Sequence[torch.Tensor],
    join: Join | None = None,
    *,
    pdl: bool = True,
) -> None:
    """Compute outs[i] float32[n, rows] = matrices[i] times x float32[n, cols], 1 <= n <= 8. Up to
    three matrices of one type make one launch. With `join`, x is first replaced. Raise ShapeError
    for tensors that do not fit.
    """
    for group in _by_type(matrices, outs):
        _product(NORM_MATVEC, x, None, 0.0, group, pdl, options=("PLAIN",), join=join)
        x, join = (x, None) if join is None else (join.out, None)


def _by_type(
    matrices: Sequence[PackedMatrix | RowRange], outs: Sequence[torch.Tensor]
) -> list[list[MatrixPart]]:
    """Return groups of up to three matrices of one type."""
    by_type: dict[str, list[MatrixPart]] = {}
    for m, out in zip(matrices, outs, strict=True):
        part = (m.matrix, out, m.rows, m.first) if isinstance(m, RowRange) else (m, out, m.rows, 0)
        by_type.setdefault(m.type.name, []).append(part)
    return [group[i : i + 3] for group in by_type.values() for i in range(0, len(group), 3)]


def matvec_set(
    x: torch.Tensor, matrix: PackedMatrix, out: torch.Tensor, *, pdl: bool = True
) -> None:
    """Compute out float32[n, rows] = matrix times x[n, cols], x as in `matvec_add`. Raise
    ShapeError for tensors that do not fit.
    """
    _product(MATVEC_ADD, x, None, 0.0, [(matrix, out, matrix.rows, 0)], pdl, options=("SETS",))


def matvec_add(
    x: torch.Tensor,
    matrix: PackedMatrix,
    h: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    pdl: bool = True,
) -> None:
    """Compute h float32[n, rows] += matrix times x[n, cols], float32 or bf16, 1 <= n <= 8, plus
    bias float32[rows], if given. Raise ShapeError for tensors that do not fit.
    """
    _product(MATVEC_ADD, x, bias, 0.0, [(matrix, h, matrix.rows, 0)], pdl)


def gate_up(
    h: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    gate: PackedMatrix,
    up: PackedMatrix | None,
    out: torch.Tensor,
    join: Join | None = None,
    gating: Gating = Gating(),
    *,
    plain: bool = False,
    pdl: bool = True,
) -> None:
    """Compute out[n, ff] = gating(gate times rms_norm(h), up times rms_norm(h)) for h float32[n,
    cols], 1 <= n <= 8. Without `up`, the first half of the rows of `gate` is the gate, the second
    half up. out is float32, or bf16 for matrices of one type. With `join`, h is first replaced.
    plain: h is not normed. Raise ShapeError for tensors that do not fit.
    """
    options = ("PLAIN",) if plain else ()
    if up is None:
        parts = [(gate, out, gate.rows // 2, 0), (gate, out, gate.rows // 2, gate.rows // 2)]
    else:
        parts = [(gate, out, gate.rows, 0), (up, out, up.rows, 0)]
    if parts[0][0].type == parts[1][0].type:
        _product(
            GATE_UP, h, norm_weight, eps, parts, pdl, options=options, gating=gating, join=join
        )
    else:
        _product(NORM_MATVEC, h, norm_weight, eps, parts[:1], pdl, options=options, join=join)
        h = h if join is None else join.out
        _product(GATE_BY, h, norm_weight, eps, parts[1:], pdl, options=options, gating=gating)


def _product(
    kind: int,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    parts: list[MatrixPart],
    pdl: bool,
    *,
    options: tuple[str, ...] = (),
    gating: Gating = Gating(),
    join: Join | None = None,
    attention: NextAttention | None = None,
) -> None:
    type, device, (n, cols) = parts[0][0].type, x.device, x.shape
    between = {MATVEC_ADD: x, GATE_UP: parts[0][1]}.get(kind)  # gate and up give it, down takes it
    half = between is not None and between.dtype == torch.bfloat16
    _check(kind, x, norm_weight, parts, half, join)
    scales = [m.scale for m, *_ in parts]
    scaled = any(scale != 1 for scale in scales)
    options = (*options, *["JOINS"] * (join is not None), *["SCALED"] * scaled)
    index = device_index(device)
    here, each = limits(index), [rows for _, _, rows, _ in parts]
    at_once = _rows_at_once(here, type, x, kind, each)
    late = attention is not None and is_late(type, n, kind, half, options)
    rows = each[0] if kind == GATE_UP else sum(each)
    if late and here.plan(type, cols, n, kind, each).holds(rows, here.processors):
        # Copies of attention do not delay weights that are all in flight already.
        options = (*options, "LATE_BELOW")
    with torch.cuda.device(index):
        for first in range(0, n, at_once):
            now = x[first : first + at_once]
            # Fewer rows of activations at the end may allow more warps.
            cut = planned(here, type, cols, len(now), kind, each)
            joined: list[object] = []
            if join is not None:
                joined = [
                    join.delta[first:],
                    join.weight,
                    np.float32(join.eps),
                    np.float32(join.scale),
                    join.out[first:],
                ]
            matrices = len(parts) if kind == NORM_MATVEC else 1
            form = type, cols, len(now), kind
            if isinstance(cut, SeveralPlan):
                memory, bias = several.lent_space(), norm_weight if kind == MATVEC_ADD else None
                _round(now, None if kind == MATVEC_ADD else norm_weight, type, joined, pdl)
                own = tuple(option for option in options if option != "JOINS")
                spec = several_spec(*form, cut, matrices, half, own, gating)
                arguments = [memory, bias]
            else:
                spec = product_spec(*form, cut, matrices, half, options, gating)
                arguments = [now, norm_weight]
            arguments.append(np.float32(eps))
            for m, out, r, begin in parts:
                arguments += [
                    m.data,
                    out[first:],
                    np.int32(r),
                    np.int32(begin),
                    np.int32(m.total_rows),
                ]
            arguments += [None, None, np.int32(0), np.int32(0), np.int32(0)] * (3 - len(parts))
            if isinstance(cut, MatvecPlan):
                arguments += joined
            if scaled:
                arguments += map(np.float32, scales + [1.0] * (3 - len(scales)))
            if attention is not None and "LATE_BELOW" in options:
                arguments += [attention.position, np.int32(attention.full)]
            launch(
                function(spec, NAMES[kind], index),
                here.processors,  # also where there are few rows: see `DeviceLimits.shared_of`
                32 * cut.warps,
                *arguments,
                shared=here.shared_of(
                    type, kind in AFTER_FEW_BLOCKS or isinstance(cut, SeveralPlan), cut.shared
                ),
                pdl=pdl,
            )


def _round(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    type: GGMLType,
    joined: list[object],
    pdl: bool,
) -> None:
    """Round rows of activations, multiplied by `weight` if given, for weights of a type. joined:
    arguments for the branch before, where it is to be finished first.
    """
    n, cols = x.shape
    options = ("JOINS",) if joined else ()
    half = x.dtype == torch.bfloat16
    spec = several.round_spec(type, cols, n, half, options)
    launch(
        function(spec, "round_rows", device_index(x.device)),
        (-(-cols // several.CHUNK), n),
        32 * several.ROUNDING_WARPS,
        x,
        weight,
        several.lent_space(),
        *joined,
        pdl=pdl,
    )


def planned(
    here: DeviceLimits, type: GGMLType, cols: int, n: int, kind: int, each: Sequence[int]
) -> MatvecPlan | SeveralPlan:
    """Return the plan of a launch for n rows of activations. each: rows of the matrices."""
    if several.takes(type, cols, n):
        space = shared_space_of(type, here.shared)
        return several_plan(type, cols, n, kind, tuple(each), here.processors, space)
    return here.plan(type, cols, n, kind, each)


def _check(
    kind: int,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    parts: list[MatrixPart],
    half: bool,
    join: Join | None,
) -> None:
    """Raise ShapeError for tensors that do not fit. half: what is between gate and up, and down, is
    bf16.
    """
    device, (n, cols) = x.device, x.shape
    x_dtype = torch.bfloat16 if half and kind == MATVEC_ADD else torch.float32
    out_dtype = torch.bfloat16 if half and kind == GATE_UP else torch.float32
    check_tensor("activations", x, (n, cols), device, x_dtype)
    if not 1 <= n <= MOST_ROWS:
        raise ShapeError(f"{n} rows of activations, expected 1 to {MOST_ROWS}")
    if norm_weight is not None and kind == MATVEC_ADD:
        check_tensor("bias", norm_weight, (parts[0][2],), device)
    elif norm_weight is not None:
        check_tensor("weights of the norm", norm_weight, (cols,), device)
    if join is not None:
        check_tensor("weights of the norm after a branch", join.weight, (cols,), device)
        check_tensor("result of a branch", join.delta, (n, cols), device)
        check_tensor("stream after a branch", join.out, (n, cols), device)
    for m, out, rows, _ in parts:
        check_matrix(m, cols, device)
        check_tensor("result", out, (n, rows), device, out_dtype)


def _rows_at_once(
    here: DeviceLimits, type: GGMLType, x: torch.Tensor, kind: int, each: list[int]
) -> int:
    """Return how many rows of activations, of those of x, a launch takes: as equally many as can be
    in the fewest launches. each: rows of the matrices. Raise ShapeError if not one row fits.
    """
    n, cols = x.shape
    space = shared_space_of(type, here.shared)
    most = n
    while most and planned(here, type, cols, most, kind, each).shared > space:
        most -= 1
    if not most:
        raise ShapeError(
            f"activations of {cols} elements do not fit into the {here.shared} bytes of shared"
            f" memory of {x.device}"
        )
    return -(-n // -(-n // most))
