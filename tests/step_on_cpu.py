"""Replace what a decode step needs of a GPU: its kernels as plain torch on the CPU, and graphs that
record and repeat them.

Kernels are in a module for each subject, `step_*_on_cpu`. Its `REPLACED` says where the product
finds each of them: module, name there, and what it finds instead.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import torch
from iqforge.cuda_kernels.matvec import operands
from iqforge.cuda_kernels.matvec.plan import DeviceLimits
from iqforge.cuda_kernels.packed import decode as packed_decode
from iqforge.runtime.cuda.step import sampling as step_sampling
from iqforge.runtime.layers.attention import attend_with_scores, temperature
from iqforge.runtime.layers.batch import Batch
from iqforge.runtime.layers.delta_net import DeltaNet
from iqforge.runtime.layers.ffn import activate as activated
from iqforge.runtime.layers.ffn import gated
from iqforge.runtime.layers.moe import Router as Choice
from iqforge.runtime.layers.norm import RMSNorm
from iqforge.runtime.layers.specs import DeltaNetSpec, FFNSpec, RouterSpec, Temperature, Xielu
from iqforge.runtime.state.recurrent import RecurrentState
from iqforge.runtime.weights.resident import Resident, ResidentMatrix
from iqforge.runtime.weights.store import TensorStore
from torch.utils.weak import WeakTensorKeyDictionary

from .state_space_reference import state_space

CPU = torch.device("cpu")


class Graph:
    """A stand-in for torch.cuda.CUDAGraph: launches during the capture run when it is replayed, on
    the memory of the capture.
    """

    recording: Graph | None = None
    alive: ClassVar[weakref.WeakSet[Graph]] = weakref.WeakSet()
    replays = 0

    def __init__(self):
        self.launches = []
        Graph.alive.add(self)

    def replay(self) -> None:
        Graph.replays += 1
        for function, arguments in self.launches:
            function(*arguments)


def kernel(function):
    """Launch: work at once, or record."""

    @wraps(function)
    def launch(*arguments, pdl: bool = True, out: torch.Tensor | None = None, **options):
        arguments = arguments if out is None else (*arguments, out)
        if Graph.recording is None:
            function(*arguments, **options)
        else:
            Graph.recording.launches.append((partial(function, **options), arguments))

    return launch


def normed(h, weight, eps):
    return (
        h if weight is None else h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight
    )


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
def layer_norm(h, weight, bias, eps, out):
    out.copy_(F.layer_norm(h, weight.shape, weight, bias, eps))


def activate(x, out, activation, *, bias=None, up=None, up_bias=None, xielu=None):
    kernel(_activate)(x, out, activation, bias, up, up_bias, xielu)


def _activate(x, out, activation, bias, up, up_bias, xielu):
    spec = FFNSpec(activation, xielu=None if xielu is None else Xielu(*xielu))
    y = activated(spec, x.clone() if bias is None else x + bias)
    out.copy_(y if up is None else y * (up if up_bias is None else up + up_bias))


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
def angles(rates, magnitude, positions, out):
    turned = positions[:, None].double() * rates
    out.copy_(torch.stack([turned.cos(), turned.sin()], -1) * magnitude)


@kernel
def embed(m, tokens, dtype, out):
    out.copy_(whole(m)[tokens])


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
        out.copy_((mixed if gates is None else mixed * gates.sigmoid()).reshape(out.shape))


def rotated(x, angles, n_rot, neox):
    turned, rest = x[..., :n_rot], x[..., n_rot:]
    a, b = turned.chunk(2, -1) if neox else (turned[..., 0::2], turned[..., 1::2])
    cos, sin = (angles[:, None, :, i] for i in (0, 1))
    a, b = a * cos - b * sin, a * sin + b * cos
    return torch.cat([a, b, rest] if neox else [torch.stack([a, b], -1).flatten(-2), rest], -1)


class Latent:
    """Latent attention over caches of floats."""

    def __init__(self, shape, splits, device):
        self.shape = shape

    def __call__(self, *arguments):
        kernel(self.run)(*arguments)

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


class Router:
    def __init__(
        self, rows, width, n_experts, n_used, device, reduction=None, routing: Routing = Routing()
    ):
        self.spec, self.owned = router_spec(n_experts, n_used, routing), routing.owned
        self.routing = routing

    def __call__(self, *arguments):
        kernel(self.run)(*arguments)

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


class Delta:
    """A delta net on the reference path."""

    def __init__(self, shape, device):
        self.shape = shape

    def __call__(self, *arguments):
        kernel(self.run)(*arguments)

    def run(
        self,
        h,
        norm,
        eps,
        rates,
        dt,
        a,
        products,
        z,
        taps,
        out_norm,
        out_eps,
        inputs,
        memory,
        out,
        other,
        positions,
        begun,
    ):
        odd = other is not None and int(positions[0] - begun[0]) % 2 == 1
        held, to = ((inputs, memory), other or (inputs, memory))[:: -1 if odd else 1]
        shape, x = self.shape, normed(h, norm, eps)
        net = delta_net(shape.heads, taps, dt, a, RMSNorm(out_norm, out_eps), products, z)
        net.beta, net.alpha = (lambda x, w=w: F.linear(x, w) for w in rates)
        state = RecurrentState(*inputs.shape, tuple(memory.shape), CPU)
        state.load(0, (0, *held))
        states = (SimpleNamespace(layers=[state]),)
        out.copy_(net(x, Batch((len(h),), (0,), torch.arange(len(h)), states)))
        for place, new in zip(to, (state.inputs, state.memory)):
            place.copy_(new)


@kernel
def short_conv(products, taps, inputs, other, positions, begun, out):
    odd = other is not None and int(positions[0] - begun[0]) % 2 == 1
    held, to = ((inputs, inputs if other is None else other))[:: -1 if odd else 1]
    both = torch.cat([held, products[:, : taps.shape[0]] * products[:, 2 * taps.shape[0] :]])
    out.copy_(convolved(both, taps) * products[:, taps.shape[0] : 2 * taps.shape[0]])
    to.copy_(both[len(both) - len(held) :])


def convolved(x, taps):
    """The convolution of x[taps - 1 + rows, channels], float32[rows, channels]."""
    return torch.einsum("rct,ct->rc", x.unfold(0, taps.shape[1], 1), taps)


def delta_net(heads, taps, dt, a, norm, products, z):
    """A delta net whose products are known, without rates and output matrix."""
    spec = DeltaNetSpec(
        heads.key_heads,
        heads.value_heads,
        heads.key_length,
        heads.value_length,
        heads.taps,
        heads.tiled,
    )
    inputs = (
        {"qkvz": lambda x: products}
        if heads.joined
        else {"qkv": lambda x: products, "gate": lambda x: z}
    )
    return DeltaNet(spec, convolution=taps, dt=dt, a=a, norm=norm, output=lambda x: x, **inputs)


class StateSpace:
    """A state-space layer on the reference path."""

    def __init__(self, shape, device):
        self.shape = shape

    def __call__(self, *arguments):
        kernel(self.run)(*arguments)

    def run(
        self,
        products,
        taps,
        bias,
        dt,
        a,
        d,
        norm,
        eps,
        inputs,
        memory,
        out,
        other,
        positions,
        begun,
    ):
        odd = other is not None and int(positions[0] - begun[0]) % 2 == 1
        held, to = ((inputs, memory), other or (inputs, memory))[:: -1 if odd else 1]
        weights = {"convolution": taps, "bias": bias, "dt": dt, "a": a, "d": d, "norm": norm}
        net = state_space(self.shape, eps=eps, **weights)
        state = RecurrentState(*inputs.shape, tuple(memory.shape), CPU)
        state.load(0, (0, *held))
        states = (SimpleNamespace(layers=[state]),)
        n = len(products)
        out.copy_(net.mixed(products, Batch((n,), (0,), torch.arange(n), states)))
        for place, new in zip(to, (state.inputs, state.memory)):
            place.copy_(new)


class Sampler:
    """Choose the most probable token, whatever the settings."""

    def __init__(self, n_vocab, device):
        pass

    def __call__(self, logits, *arguments):
        kernel(self.run)(logits, *arguments[-3:])

    def run(self, logits, tokens, positions, history):
        tokens[0] = logits.argmax()
        positions[0] += 1
        history[positions[0]] = int(tokens[0])


def in_pieces(steps, tokens: torch.Tensor, state) -> torch.Tensor:
    """Append tokens in pieces of several sizes, then one by one: logits float32[n, vocab]."""
    pieces = tokens.split([8, 1, 1, 3, *[1] * (len(tokens) - 13)])
    return torch.cat([steps.extend(piece, state, all_logits=True) for piece in pieces])


def install(monkeypatch, attention: int = 232448, products: int = 232448) -> SimpleNamespace:
    """Install a device that is the CPU, with this many bytes of shared memory for blocks of
    attention and of products. `emptied` counts calls of torch.cuda.empty_cache.
    """
    seen = SimpleNamespace(emptied=0)
    Graph.alive, Graph.replays, Graph.recording = weakref.WeakSet(), 0, None

    @contextmanager
    def capture(graph, **options):
        Graph.recording = graph
        try:
            yield
        finally:
            Graph.recording = None

    def empty_cache():
        seen.emptied += 1

    stream = SimpleNamespace(
        wait_stream=lambda other: None,
        record_event=lambda event=None: SimpleNamespace(synchronize=lambda: None),
    )
    zeros, limits = torch.zeros, DeviceLimits(132, products, products // 2, products // 2)
    facts = SimpleNamespace(shared_memory_per_block_optin=attention, multi_processor_count=132)
    for owner, name, value in (
        *(row for subject in SUBJECTS for row in subject.REPLACED),
        (torch.cuda, "Stream", lambda device: stream),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (torch.cuda, "device", lambda device: nullcontext()),
        (torch.cuda, "Event", lambda blocking=False: None),
        (torch.cuda, "CUDAGraph", Graph),
        (torch.cuda, "graph", capture),
        (torch.cuda, "empty_cache", empty_cache),
        (torch.cuda, "get_device_properties", lambda device: facts),
        (torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options)),
        (operands, "device_index", lambda device: 0),
        (operands, "limits", lambda index: limits),
        (step_sampling, "GreedySampler", Sampler),
        (step_sampling, "DrawSampler", Sampler),
        (TensorStore, "matrices", _resident),
        (packed_decode, "_decode", _decoder()),
    ):
        monkeypatch.setattr(owner, name, value)
    return seen


def _decoder():
    """Return a decoder of packed matrices. It decodes each matrix once, as that takes long on the
    CPU.
    """
    real, known = packed_decode._decode, WeakTensorKeyDictionary()

    def decode(m, dtype, ids, first, n_rows, out):
        if m.data not in known:
            known[m.data] = real(replace(m, scale=1.0), torch.float32, None, 0, m.total_rows, None)
        rows = slice(first, first + n_rows) if ids is None else ids
        found = known[m.data][rows]
        if m.scale != 1:
            found = found * m.scale
        return found if out is None else out.copy_(found.view(out.shape))

    return decode


def _resident(store: TensorStore, tensors, n):
    resident = store._resident.setdefault(tensors[0].name, Resident(store.source, tensors, n, CPU))
    return [ResidentMatrix(resident, index) for index in range(n)]
