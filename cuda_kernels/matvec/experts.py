"""Matrix-vector products with the experts that a router chose for each token, for decode steps.

    # out[token, slot] = silu(G_e rms_norm(h)) * (U_e rms_norm(h))
    expert_gate_up(h, norm_weight, eps, gate, up, ids, out)
    # h[token] += weights[token, slot] * D_e x[token, slot]
    expert_down_add(x, down, ids, weights, h)

Precision and order of additions are those of `matvec`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...errors import ShapeError
from ..common.gating import NO_TERMS, ExpertTerms, Gating
from ..compile.launch import device_index, function, launch
from ..packed.matrix import PackedMatrix
from .expert_operands import (
    check_matrices,
    check_slots,
    check_terms,
    places,
    shared_inputs,
    slots_of_shared,
)
from .operands import check_matrix, check_tensor, fits
from .plan import (
    AFTER_FEW_BLOCKS,
    EXPERT_DOWN,
    EXPERT_GATE,
    EXPERT_GATE_BY,
    EXPERT_GATE_UP,
    NAMES,
    limits,
)
from .specs import product_spec


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
    weighing: torch.Tensor | None = None,
    some_absent: bool = False,
    plain: bool = False,
    pdl: bool = True,
) -> None:
    """Compute out float32[n, k, ff] = silu(gate_e times x) * (up_e times x), or as `gating` says,
    x = rms_norm(h) for h float32[n, cols], and the experts e = ids int32[n, k], 1 <= k <= 32; 0
    where an id is negative. Without `up`, the first half of each expert's rows is the gate, and
    `gate_terms` are those of both. Gate and up of two types take two launches.

    shared: gate and up, or both in one matrix, of an expert that every token uses, of the same
    type, with scales of their own. Its result float32[n, hidden] goes to `shared_out`, or without
    that to the slots of `out` after those of `ids`, ff elements in each.

    weighing: float32[n, k or more], the factor of what each slot reads; a shared expert reads x as
    it is.

    some_absent: ids are negative where another device has the expert, or where it counts for too
    little. Such slots take no time then; without it, as long as others. plain: h is not normed.

    Raise ShapeError for tensors that do not fit. Ids are not checked.
    """
    n, cols = h.shape
    ff, device = gate.rows if up is not None else gate.rows // 2, h.device
    first_up, up, up_terms = (0, up, up_terms) if up is not None else (ff, gate, gate_terms)
    check_tensor("activations", h, (n, cols), device)
    if norm_weight is not None:
        check_tensor("weights of the norm", norm_weight, (cols,), device)
    always = shared_inputs(shared, gate, up)
    k = check_slots(ids, n, device)
    shared_out, shared_pitch = places(out, (n, k, ff), device, shared, always, shared_out)
    check_matrices((gate, up), (gate_terms, up_terms), shared, cols, device)
    if up.type == gate.type:
        launches = [(EXPERT_GATE_UP, (gate, up), (gate_terms, up_terms))]
    else:
        launches = [
            (EXPERT_GATE, (gate, gate), (gate_terms, NO_TERMS)),
            (EXPERT_GATE_BY, (up, up), (up_terms, NO_TERMS)),
        ]
    shared_scales = [np.float32(m.scale) for m in (shared[0], shared[-1])] if shared else []
    if weighing is not None:
        check_tensor("weights of the experts", weighing, (n, weighing.shape[1]), device)
        if weighing.shape[1] < k:
            raise ShapeError(f"{weighing.shape[1]} weights for {k} experts")
    index = device_index(device)
    here = limits(index)
    for kind, matrices, terms in launches:
        type = matrices[0].type
        with_terms = {
            "biased": any(each.bias is not None for each in terms),
            "scaled": any(each.scale is not None for each in terms),
            "shared": int(always > 0),
            "shared_scaled": any(m.scale != 1 for m in shared),
            "weighed": 0 if weighing is None else weighing.shape[1],
        }
        if not fits(matrices[0], kind):
            raise ShapeError(
                f"activations of {cols} elements do not fit into the {here.shared} bytes of shared"
                f" memory of {device}"
            )
        cut = here.plan(type, cols, 1, kind)
        spec = product_spec(
            type,
            cols,
            1,
            kind,
            cut,
            options=("PLAIN",) if plain else (),
            gating=gating,
            some_absent=some_absent,
            one_token=n == 1,
            **with_terms,
        )
        with torch.cuda.device(index):
            launch(
                function(spec, NAMES[kind], index),
                (here.processors, n),
                32 * cut.warps,
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
                *(shared_scales if with_terms["shared_scaled"] else ()),
                *(() if weighing is None else (weighing,)),
                shared=here.shared_of(type, kind in AFTER_FEW_BLOCKS, cut.shared),
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
    some_absent: bool = False,
    pdl: bool = True,
) -> None:
    """Compute h float32[n, rows] += sum over slots of weights[n, slot] * (down_e times x[n, slot],
    with its `terms`) for x float32[n, k, cols], experts e = ids int32[n, k] and weights float32[n,
    k]. A slot with a negative id adds nothing; slots are summed in ascending order. This kernel
    follows `expert_gate_up`, and reads ids and weights while that still runs.

    shared: the matrix of an expert that every token uses, of the same type, with rows of a multiple
    of `cols` elements and a scale of its own: the slots after those of `ids` are its input.
    some_absent: as for `expert_gate_up`.

    Raise ShapeError for tensors that do not fit. Ids are not checked.
    """
    n, k, cols = x.shape
    device = x.device
    check_tensor("activations", x, (n, k, cols), device)
    always = 0 if shared is None else slots_of_shared(shared, down)
    if check_slots(ids, n, device, always) != k:
        raise ShapeError(f"{ids.shape[1]} experts and {always} slots of a shared one for {k} slots")
    check_tensor("weights of the experts", weights, (n, k), device)
    check_tensor("result", h, (n, down.rows), device)
    check_matrix(down, cols, device)
    if shared is not None:
        check_matrix(shared, cols * always, device)
    check_terms(terms, down)
    index = device_index(device)
    here = limits(index)
    if not fits(down, EXPERT_DOWN, k):
        raise ShapeError(
            f"{k} experts of {cols} elements do not fit into the {here.shared} bytes of shared"
            f" memory of {device}"
        )
    scale = 1.0 if shared is None else shared.scale
    with_terms = {
        "biased": terms.bias is not None,
        "scaled": terms.scale is not None,
        "shared": always,
        "shared_scaled": scale != 1,
    }
    cut = here.plan(down.type, cols, k, EXPERT_DOWN, [down.rows])
    spec = product_spec(
        down.type,
        cols,
        k,
        EXPERT_DOWN,
        cut,
        some_absent=some_absent,
        one_token=n == 1,
        **with_terms,
    )
    with torch.cuda.device(index):
        launch(
            function(spec, NAMES[EXPERT_DOWN], index),
            (here.processors, n),
            32 * cut.warps,
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
            *([np.float32(scale)] if scale != 1 else []),
            shared=here.shared_of(down.type, False, cut.shared),
            pdl=pdl,
        )
