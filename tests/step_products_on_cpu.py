"""Products of a decode step, as plain torch on the CPU."""

from __future__ import annotations

import torch
from iqforge.cuda_kernels.common.gating import Gating
from iqforge.cuda_kernels.matvec import products as matvec
from iqforge.cuda_kernels.matvec.operands import RowRange
from iqforge.cuda_kernels.packed.decode import decode_matrix
from iqforge.runtime.cuda.step import ends as step_ends
from iqforge.runtime.cuda.step import ffn as step_ffn
from iqforge.runtime.cuda.step import layer_input as step_inputs
from iqforge.runtime.layers.ffn import gated
from iqforge.runtime.layers.specs import FFNSpec
from torch.nn import functional as F

from .step_graphs_on_cpu import kernel
from .step_rows_on_cpu import normed


def whole(m):
    if isinstance(m, RowRange):
        return decode_matrix(m.matrix, torch.float32)[m.first : m.first + m.rows]
    return decode_matrix(m, torch.float32)


def joined(h, join):
    """Return the stream that a product reads; with a join it is written where that wants it."""
    if join is None:
        return h
    assert join.out.data_ptr() != h.data_ptr()
    join.out.copy_((h + normed(join.delta, join.weight, join.eps)) * join.scale)
    return join.out


@kernel
def norm_matvec(h, weight, eps, matrices, outs, join=None, attention=None):
    h = joined(h, join)
    for m, out in zip(matrices, outs, strict=True):
        out.copy_(F.linear(normed(h, weight, eps), whole(m)))


@kernel
def plain_matvec(x, matrices, outs, join=None):
    x = joined(x, join)
    for m, out in zip(matrices, outs, strict=True):
        out.copy_(F.linear(x, whole(m)))


@kernel
def matvec_add(x, m, h, bias=None):
    h += F.linear(x.float(), whole(m), bias)


@kernel
def matvec_set(x, m, out):
    out.copy_(F.linear(x.float(), whole(m)))


@kernel
def gate_up(h, weight, eps, gate, up, out, join=None, gating=Gating(), *, plain=False):
    assert plain == (weight is None)
    x = normed(joined(h, join), weight, eps)
    both = [F.linear(x, whole(m)) for m in (gate, up) if m is not None]
    g, u = both if len(both) == 2 else both[0].chunk(2, -1)
    out.copy_(gated(FFNSpec(gating.activation, limit=gating.limit), g, u))


@kernel
def embed(m, tokens, dtype, out):
    out.copy_(whole(m)[tokens])


REPLACED = (
    (step_ends, "decode_rows", embed),
    (step_inputs, "decode_rows", embed),
    (matvec, "norm_matvec", norm_matvec),
    (matvec, "plain_matvec", plain_matvec),
    (matvec, "matvec_add", matvec_add),
    (matvec, "matvec_set", matvec_set),
    (matvec, "gate_up", gate_up),
    (step_ffn, "BETWEEN", torch.float32),
)
