"""Checks of what the kernels of experts take, see `experts`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import ShapeError
from ..common.gating import ExpertTerms
from ..layouts.table import packed_layout
from ..packed.matrix import PackedMatrix
from .operands import check_matrix, check_tensor
from .plan import MOST_SLOTS


def places(
    out: torch.Tensor,
    shape: tuple[int, int, int],
    device: torch.device,
    shared: Sequence[PackedMatrix],
    always: int,
    shared_out: torch.Tensor | None,
) -> tuple[torch.Tensor | None, int]:
    """Return where the result of a shared expert goes, `always` elements of each token, and the
    elements from token to token there. shape: of the result of the other experts.
    """
    n, k, ff = shape
    if shared and shared_out is None:
        if always % ff:
            raise ShapeError(f"{always} elements of a shared expert for slots of {ff}")
        check_tensor("result", out, (n, k + always // ff, ff), device)
        return out.view(n, -1)[:, k * ff :], out.stride(0)
    check_tensor("result", out, shape, device)
    if shared_out is not None:
        check_tensor("result of the shared expert", shared_out, (n, always), device)
    return shared_out, always


def check_matrices(
    gate_and_up: tuple[PackedMatrix, PackedMatrix],
    terms: tuple[ExpertTerms, ExpertTerms],
    shared: Sequence[PackedMatrix],
    cols: int,
    device: torch.device,
) -> None:
    """Raise ShapeError for matrices that do not fit each other, or x of `cols` elements."""
    gate, up = gate_and_up
    for m in (gate, up, *shared):
        check_matrix(m, cols, device)
    for m, each in zip((gate, up), terms, strict=True):
        check_terms(each, m)
    if (up.rows, up.n_matrices) != (gate.rows, gate.n_matrices):
        raise ShapeError(
            f"gate is {gate.n_matrices} matrices of {gate.rows} rows, and up is {up.n_matrices} of"
            f" {up.rows}"
        )


def check_slots(ids: torch.Tensor, n: int, device: torch.device, always: int = 0) -> int:
    """Return the slots of the ids and of `always` slots after them."""
    most = MOST_SLOTS - always
    if ids.ndim != 2 or not 1 <= ids.shape[1] <= most:
        raise ShapeError(
            f"ids of experts have the shape {list(ids.shape)}, expected [{n}, 1 to {most}]"
        )
    check_tensor("ids of experts", ids, (n, ids.shape[1]), device, torch.int32)
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


def slots_of_shared(shared: PackedMatrix, down: PackedMatrix) -> int:
    """Return `shared_slots`. Raise ShapeError if there are none."""
    slots = shared_slots(shared, down)
    if not slots:
        raise ShapeError(
            f"a shared expert of {shared.type}[{shared.rows}, {shared.cols}] next to experts of"
            f" {down.type}[{down.rows}, {down.cols}]"
        )
    return slots


def shared_inputs(shared: Sequence[PackedMatrix], gate: PackedMatrix, up: PackedMatrix) -> int:
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


def check_terms(terms: ExpertTerms, m: PackedMatrix) -> None:
    """Raise ShapeError for terms that do not fit the matrices."""
    if terms.bias is not None:
        check_tensor("biases of the experts", terms.bias, (m.n_matrices, m.rows), m.device)
    if terms.scale is not None:
        check_tensor("scales of the experts", terms.scale, (m.n_matrices,), m.device)
