"""What a decode step does with rows between products, as plain torch on the CPU."""

from __future__ import annotations

import torch
from iqforge.cuda_kernels.step import between as step_between
from iqforge.runtime.layers.ffn import activate as activated
from iqforge.runtime.layers.specs import FFNSpec, Xielu
from torch.nn import functional as F

from .step_graphs_on_cpu import kernel


def normed(h, weight, eps):
    return (
        h if weight is None else h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight
    )


@kernel
def layer_norm(h, weight, bias, eps, out):
    out.copy_(F.layer_norm(h, weight.shape, weight, bias, eps))


@kernel
def center(h, out):
    out.copy_(h - h.mean(-1, keepdim=True))


def activate(x, out, activation, *, bias=None, up=None, up_bias=None, xielu=None):
    kernel(_activate)(x, out, activation, bias, up, up_bias, xielu)


def _activate(x, out, activation, bias, up, up_bias, xielu):
    spec = FFNSpec(activation, xielu=None if xielu is None else Xielu(*xielu))
    y = activated(spec, x.clone() if bias is None else x + bias)
    out.copy_(y if up is None else y * (up if up_bias is None else up + up_bias))


def add_normed(x, h, weight, eps, *, bias=None):
    kernel(_add_normed)(x, h, weight, eps, bias)


def _add_normed(x, h, weight, eps, bias):
    h += normed(x if bias is None else x + bias, weight, eps)
    x.zero_()


@kernel
def scale(x, factor):
    x *= factor


@kernel
def clear(x):
    x.zero_()


@kernel
def take_share(h, weight, eps, hidden):
    hidden *= (normed(h, weight, eps).sum(-1, keepdim=True)).sigmoid()


@kernel
def sum_normed(first, first_weight, first_eps, second, second_weight, second_eps, out):
    out.copy_(normed(first, first_weight, first_eps) + normed(second, second_weight, second_eps))
    second.zero_()


@kernel
def norm_heads(q, k, q_weight, k_weight, eps, size, own, q_out, k_out):
    first, n = 0, len(q)
    for x, weight, out in ((q, q_weight, q_out), (k, k_weight, k_out)):
        heads, given = normed(x, weight, eps).view(n, -1, size), out.shape[1] // size
        if own is not None:
            heads = heads[:, own[first : first + given].long()]
        out.copy_(heads.reshape(n, -1))
        first += given


@kernel
def layer_inputs(projected, scale, weight, eps, table, table_scale, out):
    layers, n, length = out.shape
    projected, table = (x.view(n, layers, length).transpose(0, 1) for x in (projected, table))
    out.copy_((normed(projected * scale, weight, eps) + table_scale * table) * 0.5**0.5)


@kernel
def cap(x, most):
    x.copy_(most * torch.tanh(x / most))


@kernel
def gate_heads(x, gates):
    x.unflatten(1, (gates.shape[1], -1)).mul_(gates.sigmoid()[..., None])


REPLACED = (
    (step_between, "add_normed", add_normed),
    (step_between, "cap", cap),
    (step_between, "sum_normed", sum_normed),
    (step_between, "norm_heads", norm_heads),
    (step_between, "layer_inputs", layer_inputs),
    (step_between, "layer_norm", layer_norm),
    (step_between, "center", center),
    (step_between, "activate", activate),
    (step_between, "scale", scale),
    (step_between, "clear", clear),
    (step_between, "take_share", take_share),
    (step_between, "gate_heads", gate_heads),
)
