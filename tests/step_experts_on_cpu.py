"""The router and the experts of a decode step, as plain torch on the CPU."""

from __future__ import annotations

from itertools import zip_longest

import torch
from iqforge.cuda_kernels.common.gating import NO_TERMS, Gating
from iqforge.cuda_kernels.common.routing import Routing
from iqforge.cuda_kernels.matvec import experts as matvec_experts
from iqforge.cuda_kernels.packed.decode import decode_rows
from iqforge.runtime.cuda.step import frame as step_frame
from iqforge.runtime.cuda.step import moe as step_moe
from iqforge.runtime.layers.ffn import gated
from iqforge.runtime.layers.moe import Router as Choice
from iqforge.runtime.layers.specs import FFNSpec, RouterSpec
from torch.nn import functional as F

from .step_graphs_on_cpu import Launched, kernel
from .step_products_on_cpu import gate_up, matvec_add
from .step_rows_on_cpu import normed


def router_spec(n_experts: int, n_used: int, routing: Routing) -> RouterSpec:
    return RouterSpec(
        n_experts,
        n_used,
        "sigmoid" if routing.sigmoid else "softmax",
        routing.groups,
        routing.groups_used,
        routing.group_best,
        routing.norm,
        routing.scale,
    )


class Router(Launched):
    def __init__(
        self, rows, width, n_experts, n_used, device, reduction=None, routing: Routing = Routing()
    ):
        self.spec, self.owned = router_spec(n_experts, n_used, routing), routing.owned
        self.routing = routing

    def run(self, h, norm, eps, matrix, ids, weights, logit_bias, choice_bias, shared_gate=None):
        logits = F.linear(normed(h, norm, eps), matrix, logit_bias)
        chosen, shares = Choice(None, self.spec, choice_bias).choose(logits)
        first, last = self.owned or (0, self.spec.n_experts)
        ids.copy_(torch.where((chosen >= first) & (chosen < last), chosen - first, -1))
        weights[:, : shares.shape[1]] = shares
        assert weights.shape[1] == shares.shape[1] + self.routing.shared
        assert (shared_gate is not None) == self.routing.shared_gate
        if self.routing.shared:
            share = 1.0
            if shared_gate is not None:
                share = (normed(h, norm, eps) @ shared_gate).sigmoid()[:, None]
            weights[:, shares.shape[1] :] = share


def decode_matrices(m, dtype, ids):
    """Return the matrices `ids` as `dtype`[n, rows, cols]."""
    rows = ids[:, None] * m.rows + torch.arange(m.rows)
    return decode_rows(m, rows.reshape(-1), dtype).view(len(ids), m.rows, m.cols)


@kernel
def expert_gate_up(
    h,
    weight,
    eps,
    gate,
    up,
    ids,
    out,
    gating=Gating(),
    *terms,
    weighing=None,
    some_absent=False,
    plain=False,
):
    assert not plain or weight is None
    terms, shared, shared_out = terms[:2], terms[2] if terms[2:] else (), terms[3:]
    known, k = ids.clamp(0), ids.shape[1]
    if shared and shared_out:
        second = shared[1] if shared[1:] else None
        gate_up(h, weight, eps, shared[0], second, shared_out[0], None, gating)
    elif shared:
        always = torch.empty(len(h), out[0, k:].numel())
        gate_up(h, weight, eps, shared[0], shared[1] if shared[1:] else None, always, None, gating)
        out[:, k:] = always.view(len(h), -1, out.shape[2])
        out = out[:, :k]
    for row, x in enumerate(h if plain else normed(h, weight, eps)):
        given = [m for m in (gate, up) if m is not None]  # or both in one
        by = 1 if weighing is None else weighing[row, :k, None]
        both = [
            with_terms(
                decode_matrices(m, torch.float32, known[row].long()) @ x * by, own, known[row]
            )
            for m, own in zip_longest(given, terms[: len(given)], fillvalue=NO_TERMS)
        ]
        g, u = both if len(both) == 2 else both[0].chunk(2, -1)
        y = gated(FFNSpec(gating.activation, limit=gating.limit), g, u)
        out[row] = y.masked_fill(ids[row, :, None] < 0, 0)


@kernel
def expert_down_add(x, down, ids, weights, h, terms=NO_TERMS, shared=None, some_absent=False):
    known, k = ids.clamp(0), ids.shape[1]
    if shared is not None:
        matvec_add((x[:, k:] * weights[:, k:, None]).flatten(1), shared, h)
        x, weights = x[:, :k], weights[:, :k]
    for row in range(len(h)):
        y = torch.einsum(
            "sof,sf->so", decode_matrices(down, torch.float32, known[row].long()), x[row]
        )
        h[row] += (weights[row] * (ids[row] >= 0)) @ with_terms(y, terms, known[row])


def with_terms(y, terms, ids):
    """Return products float32[slots, rows] of the experts `ids` with scales and biases."""
    if terms.scale is not None:
        y = y * terms.scale[ids.long(), None]
    return y if terms.bias is None else y + terms.bias[ids.long()]


REPLACED = (
    (step_frame, "StepRouter", Router),
    (matvec_experts, "expert_gate_up", expert_gate_up),
    (matvec_experts, "expert_down_add", expert_down_add),
    (step_moe, "BETWEEN", torch.float32),
)
