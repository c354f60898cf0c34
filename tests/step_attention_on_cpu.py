"""Attention of a decode step, as plain torch on the CPU."""

from __future__ import annotations

import torch
from iqforge.cuda_kernels.attention import index
from iqforge.runtime.cuda.step import frame as step_frame
from iqforge.runtime.cuda.step import mla as step_mla
from iqforge.runtime.layers.attend import attend_with_scores, temperature
from iqforge.runtime.layers.specs import Temperature
from torch.nn import functional as F

from .step_graphs_on_cpu import Launched, kernel
from .step_rows_on_cpu import normed


@kernel
def angles(rates, magnitude, positions, out):
    turned = positions[:, None].double() * rates
    out.copy_(torch.stack([turned.cos(), turned.sin()], -1) * magnitude)


class Attention:
    """Attention over caches of floats."""

    full_from = 0  # the product before it gets where that is

    def __init__(self, shape, capacity, device):
        self.shape = shape

    def __call__(self, *arguments, biases=None, sinks=None, gates=None):
        kernel(self.run)(biases, sinks, gates, *arguments)

    def run(
        self,
        biases,
        sinks,
        gates,
        q,
        k,
        v,
        q_norm,
        k_norm,
        eps,
        angles,
        cache_k,
        cache_v,
        positions,
        scale,
        out,
    ):
        s, start = self.shape, int(positions[0])
        if biases is not None:
            q, k, v = (x + bias for x, bias in zip((q, k, v), biases))
        q, k, v = (
            q.view(s.rows, s.group * s.kv_heads, -1),
            k.reshape(s.rows, -1, s.key_length),
            v.reshape(s.rows, -1, s.value_length),
        )
        if gates is not None:
            gates = gates.view(s.rows, s.group * s.kv_heads, -1)
        elif s.gate:
            q, gates = q.split(s.key_length, -1)
        turn = lambda x: rotated(x, angles, s.n_rot, s.neox) if s.n_rot else x  # noqa: E731
        q, k = (
            normed(turn(x), weight, eps) if s.norms_last else turn(normed(x, weight, eps))
            for x, weight in ((q, q_norm), (k, k_norm))
        )
        if s.value_norm:
            v = F.rms_norm(v, (s.value_length,), None, eps)
        total = start + s.rows
        if s.own_kv:
            cache_k[start:total], cache_v[start:total] = k, v
        if s.temperature is not None:
            q = q * temperature(Temperature(*s.temperature), positions.long())[:, None, None]
        keys, values = (cache[None, :total].float() for cache in (cache_k, cache_v))
        mask = None
        if s.chunked:
            at = torch.arange(total)
            first = positions.long() // s.window * s.window
            mask = (at <= positions[:, None]) & (at >= first[:, None])
        more = {"window": s.window, "softcap": s.softcap, "sinks": sinks, "mask": mask}
        mixed = attend_with_scores(q[None], keys, values, scale, **more)[0]
        if gates is not None:
            mixed = mixed * (F.softplus(gates) if s.softplus_gates else gates.sigmoid())
        out.copy_(mixed.reshape(out.shape))


def rotated(x, angles, n_rot, neox):
    turned, rest = x[..., :n_rot], x[..., n_rot:]
    a, b = turned.chunk(2, -1) if neox else (turned[..., 0::2], turned[..., 1::2])
    cos, sin = (angles[:, None, :, i] for i in (0, 1))
    a, b = a * cos - b * sin, a * sin + b * cos
    return torch.cat([a, b, rest] if neox else [torch.stack([a, b], -1).flatten(-2), rest], -1)


class Latent(Launched):
    """Latent attention over caches of floats."""

    def __init__(self, shape, splits, device):
        self.shape = shape

    def run(
        self, q, kv, norm, eps, angles, keys, values, cache, positions, scale, out, chosen=None
    ):
        s, start = self.shape, int(positions[0])
        key, c = kv[:, None, s.rank :], normed(kv[:, : s.rank], norm, eps)
        q = q.view(s.rows, s.heads, -1)
        turned, key = (rotated(x, angles, s.rope, s.neox) for x in (q[..., s.nope :], key))
        total = start + s.rows
        cache[start:total, 0] = torch.cat([key[:, 0], c], -1)
        absorbed = torch.einsum("nhd,hrd->nhr", q[..., : s.nope], keys.float())
        q = torch.cat([turned, absorbed], -1) * scale
        if s.temperature is not None:
            q = q * temperature(Temperature(*s.temperature), positions.long())[:, None, None]
        rows = cache[:total, 0].float()
        hidden = torch.arange(total)[None] > positions[:, None]
        if chosen is not None:
            hidden = ~seen_of(chosen, total)
        scores = (q @ rows.T).masked_fill(hidden[:, None], float("-inf"))
        mixed = scores.softmax(-1) @ rows[:, s.rope :]
        out.copy_(torch.einsum("nhr,hvr->nhv", mixed, values.float()).flatten(1))


def seen_of(chosen, total):
    """Return bool[n, total], the positions of lists int32[n, top_k], -1 for none."""
    seen = torch.zeros(len(chosen), total + 1, dtype=torch.bool)
    seen.scatter_(1, torch.where(chosen < 0, total, chosen).long(), True)
    return seen[:, :total]


@kernel
def index_rows(shape, q, k, norm, bias, eps, angles, cache, positions):
    k = F.layer_norm(k, norm.shape, norm, bias, eps)[:, None]
    first, heads = int(positions[0]), q.view(len(q), shape.heads, -1)
    q.copy_(rotated(heads, angles, shape.rotated, shape.neox).flatten(1))
    cache[first : first + len(k)] = rotated(k, angles, shape.rotated, shape.neox)


@kernel
def index_scores(shape, q, weights, cache, positions, scores):
    total = int(positions[0]) + len(q)
    dots = torch.einsum("nhd,md->nhm", q.view(len(q), shape.heads, -1), cache[:total, 0].float())
    scores[:, :total] = torch.einsum("nhm,nh->nm", dots.relu(), weights)


@kernel
def index_select(shape, scores, positions, chosen):
    for row in range(len(chosen)):
        seen = int(positions[0]) + row + 1
        best = scores[row, :seen].sort(descending=True, stable=True).indices[: shape.top_k]
        chosen[row] = -1
        chosen[row, : len(best)] = best.sort().values.int()


REPLACED = (
    (step_frame, "StepAttention", Attention),
    (index, "index_rows", index_rows),
    (index, "index_scores", index_scores),
    (index, "index_select", index_select),
    (step_mla, "StepLatentAttention", Latent),
    (step_frame, "step_angles", angles),
)
