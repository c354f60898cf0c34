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
    # the same with the experts that a router chose
    expert_gate_up(h, norm_weight, eps, gate, up, ids, out)
    expert_down_add(x, down, ids, weights, h)

With quantized matrices activations are rounded to 8 bits with a scale per 32 (as Q8_0, but the
scale stays float32); products of bytes are added exactly, the rest in float32, in an order that
follows from shapes and device alone. With F32, F16 and BF16 matrices everything is float32. Nothing
is allocated, so calls can be captured into a CUDA graph; with `pdl` a kernel loads its first
weights while the previous one still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..errors import ShapeError, UnsupportedTypeError
from ..formats.types import GGMLType
from .compile.launch import device_index, function, launch
from .compile.spec import KernelSpec
from .gating import NO_TERMS, ExpertTerms, Gating
from .layouts.table import packed_layout, packed_types
from .matvec_plan import (
    EXPERT_DOWN,
    EXPERT_GATE,
    EXPERT_GATE_BY,
    EXPERT_GATE_UP,
    FLOAT_WARPS,
    GATE_BY,
    GATE_UP,
    MATVEC_ADD,
    MOST_ROWS,
    MOST_SLOTS,
    NAMES,
    NORM_MATVEC,
    RESERVED,
    DeviceLimits,
    float_expert_spec,
    float_spec,
    limits,
    quantized_spec,
    sample_specs,
    shared_space_of,
)
from .ops import PackedMatrix

# A matrix, the result, the number of its rows, and the first row.
MatrixPart = tuple[PackedMatrix, torch.Tensor, int, int]


@dataclass(frozen=True)
class RowRange:
    """`rows` rows of a matrix from row `first` on."""

    matrix: PackedMatrix
    first: int
    rows: int

    @property
    def type(self) -> GGMLType:
        return self.matrix.type

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes * self.rows // self.matrix.total_rows


def specs() -> list[KernelSpec]:
    return sample_specs()


def supported(type: GGMLType) -> bool:
    """Return whether there are kernels for packed matrices of a type."""
    return type.name in packed_types()


def fits(m: PackedMatrix, kind: int, slots: int = 1) -> bool:
    """Return whether the device has shared memory enough for a product of one row with the matrix
    (of EXPERT_DOWN: of `slots` rows).
    """
    device = limits(device_index(m.device))
    if m.type.is_float:
        rows = slots if kind == EXPERT_DOWN else 1
        return (
            rows * m.cols * 4 <= device.shared - RESERVED and m.cols * m.type.block_bytes % 16 == 0
        )
    return device.plan(
        m.type, m.cols, slots if kind == EXPERT_DOWN else 1, kind
    ).shared <= shared_space_of(m.type, device.shared)


@dataclass(frozen=True)
class Join:
    """A branch of the residual stream that the next product finishes: it reads (h +
    rms_norm(delta, weight)) * scale instead of h, and writes that to `out`.

    delta and out float32[n, cols], weight float32[cols]. The first product must be with a
    quantized matrix, and `out` is not h.
    """

    delta: torch.Tensor
    weight: torch.Tensor
    eps: float
    out: torch.Tensor
    scale: float = 1.0

    def rows(self, which: slice) -> Join:
        """Return the same for some of the rows."""
        return replace(self, delta=self.delta[which], out=self.out[which])


def joins(matrix: PackedMatrix | RowRange) -> bool:
    """Return whether a product with the matrix takes a `Join`."""
    return not matrix.type.is_float


def norm_matvec(
    h: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    matrices: Sequence[PackedMatrix | RowRange],
    outs: Sequence[torch.Tensor],
    join: Join | None = None,
    *,
    pdl: bool = True,
) -> None:
    """Compute outs[i] float32[n, rows] = matrices[i] times rms_norm(h) for h float32[n, cols], 1 <=
    n <= 8. Up to three matrices of one type make one launch. norm_weight: float32[cols], None for
    ones. With `join`, h is first replaced. Raise ShapeError for tensors that do not fit.
    """
    for group in _by_type(matrices, outs):
        _product(NORM_MATVEC, h, norm_weight, eps, group, pdl, join=join)
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
    """Compute out float32[n, rows] = matrix times x[n, cols] for a quantized matrix, x as in
    `matvec_add`. Raise ShapeError for tensors that do not fit.
    """
    if matrix.type.is_float:
        raise UnsupportedTypeError(f"products with {matrix.type} only add")
    _product(MATVEC_ADD, x, None, 0.0, [(matrix, out, matrix.rows, 0)], pdl, options=("SETS",))


def matvec_add(
    x: torch.Tensor,
    matrix: PackedMatrix,
    h: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    pdl: bool = True,
) -> None:
    """Compute h float32[n, rows] += matrix times x[n, cols], float32, or bf16 for a quantized
    matrix, 1 <= n <= 8; for a quantized matrix plus bias float32[rows], if given. Raise ShapeError
    for tensors that do not fit.
    """
    if bias is not None and matrix.type.is_float:
        raise UnsupportedTypeError(f"products with {matrix.type} add no bias")
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
    pdl: bool = True,
) -> None:
    """Compute out[n, ff] = gating(gate times rms_norm(h), up times rms_norm(h)) for h float32[n,
    cols], 1 <= n <= 8. Without `up`, the first half of the rows of `gate` is the gate, the second
    half up. out is float32, or bf16 for quantized matrices of one type. With `join`, h is first
    replaced. Raise ShapeError for tensors that do not fit.
    """

    if up is None:
        parts = [(gate, out, gate.rows // 2, 0), (gate, out, gate.rows // 2, gate.rows // 2)]
    else:
        parts = [(gate, out, gate.rows, 0), (up, out, up.rows, 0)]
    if parts[0][0].type == parts[1][0].type:
        _product(GATE_UP, h, norm_weight, eps, parts, pdl, gating=gating, join=join)
    else:
        _product(NORM_MATVEC, h, norm_weight, eps, parts[:1], pdl, join=join)
        h = h if join is None else join.out
        _product(GATE_BY, h, norm_weight, eps, parts[1:], pdl, gating=gating)


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
) -> None:
    type, device, (n, cols) = parts[0][0].type, x.device, x.shape
    between = {MATVEC_ADD: x, GATE_UP: parts[0][1]}.get(kind)  # gate and up give it, down takes it
    half = between is not None and between.dtype == torch.bfloat16 and not type.is_float
    _check(
        "activations",
        x,
        (n, cols),
        device,
        torch.bfloat16 if half and kind == MATVEC_ADD else torch.float32,
    )
    if not 1 <= n <= MOST_ROWS:
        raise ShapeError(f"{n} rows of activations, expected 1 to {MOST_ROWS}")
    if norm_weight is not None and kind == MATVEC_ADD:
        _check("bias", norm_weight, (parts[0][2],), device)
    elif norm_weight is not None:
        _check("weights of the norm", norm_weight, (cols,), device)
    if join is not None:
        if type.is_float:
            raise UnsupportedTypeError(f"products with {type} do not join")
        _check("weights of the norm after a branch", join.weight, (cols,), device)
        _check("result of a branch", join.delta, (n, cols), device)
        _check("stream after a branch", join.out, (n, cols), device)
        options = (*options, "JOINS")
    for m, out, rows, _ in parts:
        _check_matrix(m, cols, device)
        _check(
            "result",
            out,
            (n, rows),
            device,
            torch.bfloat16 if half and kind == GATE_UP else torch.float32,
        )
    index = device_index(device)
    here = limits(index)
    rows = parts[0][2] if kind == GATE_UP else sum(r for _, _, r, _ in parts)
    if type.is_float:
        split = 4 if rows < 16 * here.processors else 1
        at_once, warps, per_block = (
            min(n, (here.shared - RESERVED) // (cols * 4)),
            max(split, 4),
            max(split, 4) // split,
        )
        blocks = min(-(-rows // per_block), here.processors * (2048 // (32 * warps)))
    else:
        at_once = n  # long rows of activations: some of them at a time
        while at_once and here.plan(type, cols, at_once, kind).shared > shared_space_of(
            type, here.shared
        ):
            at_once = -(-at_once // 2) if at_once > 1 else 0
    if at_once < 1:
        raise ShapeError(
            f"activations of {cols} elements do not fit into the {here.shared} bytes of shared"
            f" memory of {device}"
        )
    with torch.cuda.device(index):
        for first in range(0, n, at_once):
            now = x[first : first + at_once]
            arguments = []
            for m, out, r, begin in parts:
                arguments += [
                    m.data,
                    out[first:],
                    np.int32(r),
                    np.int32(begin),
                    np.int32(m.total_rows),
                ]
            arguments += [None, None, np.int32(0), np.int32(0), np.int32(0)] * (3 - len(parts))
            if join is not None:
                arguments += [
                    join.delta[first:],
                    join.weight,
                    np.float32(join.eps),
                    np.float32(join.scale),
                    join.out[first:],
                ]
            if type.is_float:
                spec = float_spec(type, cols, len(now), kind, split, options, gating)
                shared = len(now) * cols * 4
            else:
                cut = here.plan(type, cols, len(now), kind)
                matrices = len(parts) if kind == NORM_MATVEC else 1
                spec, shared = (
                    quantized_spec(
                        type, cols, len(now), kind, cut, matrices, half, options, gating
                    ),
                    here.shared_of(type, kind, cut),
                )
                # On every multiprocessor, also where there are few rows: see
                # `DeviceLimits.shared_of`. Fewer x at the end may allow more warps.
                blocks, warps = here.processors, cut.warps
            launch(
                function(spec, NAMES[kind], index),
                blocks,
                32 * warps,
                now,
                norm_weight,
                np.float32(eps),
                *arguments,
                shared=shared,
                pdl=pdl,
            )


def expert_gate_up(
    h: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    gate: PackedMatrix,
    up: PackedMatrix | None,
    ids: torch.Tensor,
    out: torch.Tensor,
    gating: Gating = Gating(),
    gate_terms: ExpertTerms = NO_TERMS,
    up_terms: ExpertTerms = NO_TERMS,
    shared: Sequence[PackedMatrix] = (),
    shared_out: torch.Tensor | None = None,
    *,
    pdl: bool = True,
) -> None:
    """Compute out float32[n, k, ff] = silu(gate_e times x) * (up_e times x), or as `gating` says,
    x = rms_norm(h) for h float32[n, cols], and the experts e = ids int32[n, k], 1 <= k <= 32; 0
    where an id is negative. Without `up`, the first half of each expert's rows is the gate, and
    `gate_terms` are those of both. Gate and up of two types take two launches.

    shared: gate and up, or both in one matrix, of an expert that every token uses, of the same
    type. Its result float32[n, hidden] goes to `shared_out`, or without that to the slots of `out`
    after those of `ids`, ff elements in each.

    Raise ShapeError for tensors that do not fit. Ids are not checked.
    """
    n, cols = h.shape
    ff, device = gate.rows if up is not None else gate.rows // 2, h.device
    first_up, up, up_terms = (0, up, up_terms) if up is not None else (ff, gate, gate_terms)
    _check("activations", h, (n, cols), device)
    if norm_weight is not None:
        _check("weights of the norm", norm_weight, (cols,), device)
    always = _shared_inputs(shared, gate, up)
    k = _check_slots(ids, n, device)
    if shared and shared_out is None:
        if always % ff:
            raise ShapeError(f"{always} elements of a shared expert for slots of {ff}")
        _check("result", out, (n, k + always // ff, ff), device)
        shared_out, shared_pitch = out.view(n, -1)[:, k * ff :], out.stride(0)
    else:
        _check("result", out, (n, k, ff), device)
        shared_pitch = always
        if shared_out is not None:
            _check("result of the shared expert", shared_out, (n, always), device)
    for m in (gate, up, *shared):
        _check_matrix(m, cols, device)
    for m, terms in ((gate, gate_terms), (up, up_terms)):
        _check_terms(terms, m)
    if (up.rows, up.n_matrices) != (gate.rows, gate.n_matrices):
        raise ShapeError(
            f"gate is {gate.n_matrices} matrices of {gate.rows} rows, and up is {up.n_matrices} of"
            f" {up.rows}"
        )
    if up.type == gate.type:
        launches = [(EXPERT_GATE_UP, (gate, up), (gate_terms, up_terms))]
    else:
        launches = [
            (EXPERT_GATE, (gate, gate), (gate_terms, NO_TERMS)),
            (EXPERT_GATE_BY, (up, up), (up_terms, NO_TERMS)),
        ]
    index = device_index(device)
    here = limits(index)
    for kind, matrices, terms in launches:
        type = matrices[0].type
        with_terms = {
            "biased": any(each.bias is not None for each in terms),
            "scaled": any(each.scale is not None for each in terms),
            "shared": int(always > 0),
        }
        if not fits(matrices[0], kind):
            raise ShapeError(
                f"activations of {cols} elements do not fit into the {here.shared} bytes of shared"
                f" memory of {device}"
            )
        if type.is_float:
            spec = float_expert_spec(type, cols, 1, kind, gating, **with_terms)
            blocks, warps, space = _float_blocks(here, k * ff + always), FLOAT_WARPS, 4 * cols
        else:
            cut = here.plan(type, cols, 1, kind)
            spec = quantized_spec(type, cols, 1, kind, cut, gating=gating, **with_terms)
            blocks, warps, space = here.processors, cut.warps, here.shared_of(type, kind, cut)
        with torch.cuda.device(index):
            launch(
                function(spec, NAMES[kind], index),
                (blocks, n),
                32 * warps,
                h,
                norm_weight,
                np.float32(eps),
                *(m.data for m in matrices),
                np.int64(gate.total_rows),
                np.int32(gate.rows),
                np.int32(first_up),
                ids,
                np.int32(k),
                np.int32(ff),
                *(each.bias for each in terms),
                *(each.scale for each in terms),
                *(m.data for m in ((shared[0], shared[-1]) if shared else ())),
                *(() if shared else (None, None)),
                np.int64(shared[0].total_rows if shared else 0),
                np.int32(always),
                shared_out,
                np.int64(shared_pitch),
                np.int64(out.stride(0)),
                out,
                shared=space,
                pdl=pdl,
            )


def expert_down_add(
    x: torch.Tensor,
    down: PackedMatrix,
    ids: torch.Tensor,
    weights: torch.Tensor,
    h: torch.Tensor,
    terms: ExpertTerms = NO_TERMS,
    shared: PackedMatrix | None = None,
    *,
    pdl: bool = True,
) -> None:
    """Compute h float32[n, rows] += sum over slots of weights[n, slot] * (down_e times x[n, slot],
    with its `terms`) for x float32[n, k, cols], experts e = ids int32[n, k] and weights float32[n,
    k]. A slot with a negative id adds nothing; slots are summed in ascending order. This kernel
    follows `expert_gate_up`, and reads ids and weights while that still runs.

    shared: the matrix of an expert that every token uses, of the same type, with rows of a multiple
    of `cols` elements: the slots after those of `ids` are its input.

    Raise ShapeError for tensors that do not fit. Ids are not checked.
    """
    n, k, cols = x.shape
    device = x.device
    _check("activations", x, (n, k, cols), device)
    always = 0 if shared is None else _shared_slots(shared, down)
    if _check_slots(ids, n, device, always) != k:
        raise ShapeError(f"{ids.shape[1]} experts and {always} slots of a shared one for {k} slots")
    _check("weights of the experts", weights, (n, k), device)
    _check("result", h, (n, down.rows), device)
    _check_matrix(down, cols, device)
    if shared is not None:
        _check_matrix(shared, cols * always, device)
    _check_terms(terms, down)
    index = device_index(device)
    here = limits(index)
    if not fits(down, EXPERT_DOWN, k):
        raise ShapeError(
            f"{k} experts of {cols} elements do not fit into the {here.shared} bytes of shared"
            f" memory of {device}"
        )
    with_terms = {
        "biased": terms.bias is not None,
        "scaled": terms.scale is not None,
        "shared": always,
    }
    if down.type.is_float:
        spec = float_expert_spec(down.type, cols, k, EXPERT_DOWN, **with_terms)
        blocks, warps, space = _float_blocks(here, down.rows), FLOAT_WARPS, 4 * k * cols
    else:
        cut = here.plan(down.type, cols, k, EXPERT_DOWN)
        spec = quantized_spec(down.type, cols, k, EXPERT_DOWN, cut, **with_terms)
        blocks, warps = here.processors, cut.warps
        space = here.shared_of(down.type, EXPERT_DOWN, cut)
    with torch.cuda.device(index):
        launch(
            function(spec, NAMES[EXPERT_DOWN], index),
            (blocks, n),
            32 * warps,
            x,
            down.data,
            np.int64(down.total_rows),
            np.int32(down.rows),
            ids,
            weights,
            terms.bias,
            terms.scale,
            None if shared is None else shared.data,
            h,
            shared=space,
            pdl=pdl,
        )


def _float_blocks(here: DeviceLimits, rows: int) -> int:
    """Return the blocks of a launch in which a warp takes a row at a time: as many as run at once,
    at most.
    """
    return min(-(-rows // FLOAT_WARPS), here.processors * (2048 // (32 * FLOAT_WARPS)))


def _check(
    what: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:
    if (
        tensor.dtype != dtype
        or tuple(tensor.shape) != shape
        or tensor.device != device
        or not tensor.is_contiguous()
        or not tensor.is_cuda
    ):
        raise ShapeError(
            f"{what}: {tensor.dtype}{list(tensor.shape)} on {tensor.device}, "
            f"expected contiguous {dtype}{list(shape)} on {device}"
        )


def _check_slots(ids: torch.Tensor, n: int, device: torch.device, always: int = 0) -> int:
    """Return the slots of the ids and of `always` slots after them."""
    most = MOST_SLOTS - always
    if ids.ndim != 2 or not 1 <= ids.shape[1] <= most:
        raise ShapeError(
            f"ids of experts have the shape {list(ids.shape)}, expected [{n}, 1 to {most}]"
        )
    _check("ids of experts", ids, (n, ids.shape[1]), device, torch.int32)
    return ids.shape[1] + always


def shared_slots(shared: PackedMatrix, down: PackedMatrix) -> int:
    """Return how many slots of `down` the matrix of a shared expert takes, 0 if it cannot be one of
    them: another type, or rows of another length.
    """
    slots = shared.cols // down.cols
    # Rows with a factor cannot be divided.
    whole = slots == 1 or all(not per_row for _, _, per_row in packed_layout(down.type).planes)
    same = (shared.type, shared.rows, slots * down.cols) == (down.type, down.rows, shared.cols)
    return slots if same and whole and shared.n_matrices == 1 else 0


def _shared_slots(shared: PackedMatrix, down: PackedMatrix) -> int:
    slots = shared_slots(shared, down)
    if not slots:
        raise ShapeError(
            f"a shared expert of {shared.type}[{shared.rows}, {shared.cols}] next to experts of"
            f" {down.type}[{down.rows}, {down.cols}]"
        )
    return slots


def _shared_inputs(shared: Sequence[PackedMatrix], gate: PackedMatrix, up: PackedMatrix) -> int:
    """Return the elements that a shared expert has between its matrices."""
    if not shared:
        return 0
    rows = shared[0].rows // (3 - len(shared))
    if len({m.type for m in (gate, up, *shared)}) > 1 or shared[-1].rows != shared[0].rows:
        raise ShapeError(
            f"a shared expert of {[f'{m.type}[{m.rows}, {m.cols}]' for m in shared]} next to"
            f" experts of {gate.type} and {up.type}"
        )
    return rows


def _check_terms(terms: ExpertTerms, m: PackedMatrix) -> None:
    if terms.bias is not None:
        _check("biases of the experts", terms.bias, (m.n_matrices, m.rows), m.device)
    if terms.scale is not None:
        _check("scales of the experts", terms.scale, (m.n_matrices,), m.device)


def _check_matrix(m: PackedMatrix, cols: int, device: torch.device) -> None:
    if m.cols != cols or m.device != device:
        raise ShapeError(
            f"a matrix with rows of {m.cols} elements on {m.device} for activations of {cols} on"
            f" {device}"
        )
    if not supported(m.type):
        raise UnsupportedTypeError(f"there is no matrix-vector kernel for {m.type}")
