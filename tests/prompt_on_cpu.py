"""Replace what the prompt path needs of a GPU: its kernels and flash attention as plain torch on
the CPU (in addition to `step_on_cpu`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from iqforge.cuda_kernels.attention import mla as attention_mla
from iqforge.cuda_kernels.common.gating import NO_TERMS, Gating
from iqforge.cuda_kernels.common.routing import Routing
from iqforge.cuda_kernels.packed.decode import decode_matrix
from iqforge.cuda_kernels.prompt import attention as prompt_attention
from iqforge.cuda_kernels.prompt import cached as prompt_cached
from iqforge.cuda_kernels.prompt import experts as prompt_experts
from iqforge.cuda_kernels.prompt import grouped as prompt_grouped
from iqforge.cuda_kernels.prompt import mla as prompt_mla
from iqforge.cuda_kernels.prompt import rounded as prompt_rounded
from iqforge.cuda_kernels.prompt import rows as prompt_rows
from iqforge.cuda_kernels.prompt import short_conv as prompt_conv
from iqforge.cuda_kernels.prompt import state_space as state_space_kernels
from iqforge.cuda_kernels.step.kimi_delta import KimiDeltaShape
from iqforge.runtime.cuda.prompt import expert_products
from iqforge.runtime.cuda.prompt.common import graphs as prompt_graphs
from iqforge.runtime.cuda.prompt.common.stream import Stream
from iqforge.runtime.cuda.prompt.mixers import delta as prompt_delta
from iqforge.runtime.cuda.prompt.mixers import kimi_delta as prompt_kimi_delta
from iqforge.runtime.cuda.prompt.mixers import state_space as prompt_state_space
from iqforge.runtime.layers.attend import attend, visible
from iqforge.runtime.layers.batch import Batch
from iqforge.runtime.layers.ffn import activate, gated
from iqforge.runtime.layers.moe import Router
from iqforge.runtime.layers.norm import RMSNorm
from iqforge.runtime.layers.specs import FFNSpec, Xielu
from iqforge.runtime.state.cache_tiles import RowLayout, get, put
from iqforge.runtime.state.cache_types import CACHE_TYPES
from iqforge.runtime.state.hadamard import hadamard as turned
from iqforge.runtime.state.recurrent import RecurrentState
from torch.nn import functional as F

from . import step_on_cpu
from .kimi_delta_reference import kimi_delta
from .permuted_columns import permutation
from .state_space_reference import state_space
from .step_attention_on_cpu import rotated, seen_of
from .step_experts_on_cpu import router_spec
from .step_graphs_on_cpu import CPU
from .step_recurrent_on_cpu import convolved, delta_net
from .step_rows_on_cpu import normed


def add_norm(
    h,
    weight,
    eps,
    out,
    *,
    delta=None,
    rows=None,
    weights=None,
    extra=None,
    shares=None,
    exact=None,
    permuted=False,
    plain=None,
    centered=False,
    bias=None,
    post_weight=None,
    post_eps=0.0,
    scale=1.0,
):
    assert plain is None or permuted
    assert delta is None or weights is not None or len(delta) == len(h)
    if delta is not None:
        y = (
            delta.float()
            if weights is None
            else (delta.float()[rows.long().clamp(0)] * weights[..., None])
            .masked_fill(rows[..., None] < 0, 0)
            .sum(1)
        )
        if extra is not None:
            y = y + (1 if shares is None else shares.sigmoid()[:, None]) * extra.float()
        h += y if post_weight is None else normed(y, post_weight, post_eps)
        h *= scale
    if out is not None:
        x = F.layer_norm(h, weight.shape, weight, bias, eps) if centered else normed(h, weight, eps)
        out.copy_(permuted_columns(x, out) if permuted else x)
        for other in (exact, plain):
            if other is not None:
                other.copy_(x)


def permuted_columns(x, out):
    n = out.shape[1]
    return F.pad(x, (0, n - x.shape[1]))[:, permutation(n)]


def grouped_product(m, ends, x, out, sources=None, n_slots=1, terms=NO_TERMS, n_experts=0):
    n = int(ends[-1])
    x = x if sources is None else x[sources[:n].long() // n_slots]
    x = x[:n, prompt_grouped.places(m.cols, CPU)]
    weights = decode_matrix(m, x.dtype).to(x.dtype).view(m.n_matrices, m.rows, m.cols)
    parts = [
        (a.float() @ w.float().t()).to(a.dtype)  # halves are slow on a CPU
        for a, w in zip(x.tensor_split(ends[:-1].long()), weights, strict=True)
    ]
    out[:n] = expert_products.with_terms(torch.cat(parts), terms, ends)


def grouped_gate_up(
    matrices,
    ends,
    x,
    out,
    sources=None,
    n_slots=1,
    gating=Gating(),
    terms=(NO_TERMS, NO_TERMS),
    n_experts=0,
):
    both = []
    for m, of_m in zip(matrices, terms, strict=True):
        both.append(x.new_empty(len(out), m.rows))
        grouped_product(m, ends, x, both[-1], sources, n_slots, of_m)
    gate, up = both if len(both) == 2 else both[0].chunk(2, dim=1)
    joined = torch.empty_like(gate)
    join_gate(gate, up, joined, gating)
    n = int(ends[-1])
    out[:n] = permuted_columns(joined, out)[:n]


def reads_packed_experts(monkeypatch) -> None:
    """Let products read packed experts, as on Hopper."""
    for name in ("fits", "gate_up_fits"):
        monkeypatch.setattr(prompt_grouped, name, lambda *_: True)
    for kernel in (grouped_product, grouped_gate_up):
        monkeypatch.setattr(prompt_grouped, kernel.__name__, kernel)


def join_gate(gate, up, out, gating=Gating()):
    spec = FFNSpec(gating.activation, limit=gating.limit)
    out.copy_(gated(spec, gate.float(), up.float()))


def xielu(x, *numbers):
    x.copy_(activate(FFNSpec("xielu", gated=False, xielu=Xielu(*numbers)), x.float()))


def take_sinks(x, log_sums, sinks):
    x *= (log_sums - sinks[:, None]).sigmoid().transpose(1, 2)[..., None].to(x.dtype)


def converted(x, out):
    out.view(x.shape).copy_(x)


def row_factors(products, queries, key_at, keys, eps, out):
    for i, (first, n) in enumerate(((0, queries), (key_at, keys))):
        if n:
            x = products[:, first : first + n].float()
            out[:, i] = torch.rsqrt(x.square().mean(1) + eps)


def gather_rows(x, sources, n_slots, out):
    out.copy_(x[sources.long().clamp(0) // n_slots])


def rotate_heads(
    qkv,
    q,
    k,
    v,
    first,
    cos,
    sin,
    *,
    neox,
    gated=False,
    q_norm=None,
    k_norm=None,
    eps=0.0,
    value_eps=None,
    norms_last=False,
    factors=None,
    own=None,
):
    (tokens, n_heads, size), n_kv, value_size = q.shape, k.shape[1], v.shape[2]
    assert tokens == len(qkv) and tokens % len(cos) == 0 and q.dtype == k.dtype == v.dtype
    if gated:
        queries, rest = qkv.split([2 * n_heads * size, qkv.shape[1] - 2 * n_heads * size], 1)
        qkv = torch.cat([queries.unflatten(1, (-1, 2, size))[:, :, 0].flatten(1), rest], 1)
    if qkv.shape[1] == (n_heads + n_kv) * size and value_size == size and n_kv:  # values are keys
        qkv = torch.cat([qkv, qkv[:, n_heads * size :]], 1)
    of_queries, of_keys = (n_heads, n_kv) if own is None else (own.n_queries, own.n_keys)
    sizes = of_queries * size, of_keys * size, n_kv * value_size
    cos, sin = (x.repeat(tokens // len(cos), 1)[:, None] for x in (cos, sin))
    queries, keys, values = (
        x.unflatten(1, (-1, length))
        for x, length in zip(qkv.float().split(sizes, 1), (size, size, value_size), strict=True)
    )
    taken = (slice(None),) * 2 if own is None else own.heads.long().split([n_heads, n_kv])
    to_k = k[first : first + tokens]
    for i, (x, weight, to) in enumerate(((queries, q_norm, q), (keys, k_norm, to_k))):
        if factors is None:
            x = x if norms_last else normed(x, weight, eps)
        elif x.shape[1]:
            x = x * factors[:, i, None, None] * weight.view(-1, size)
        x = x[:, taken[i]]
        turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
        a, b = turned.chunk(2, -1) if neox else (turned[..., 0::2], turned[..., 1::2])
        a, b = a * cos - b * sin, a * sin + b * cos
        x = torch.cat([a, b, rest] if neox else [torch.stack([a, b], -1).flatten(-2), rest], -1)
        to.copy_(normed(x, weight, eps) if norms_last else x)
    if value_eps is not None:
        values = F.rms_norm(values, (value_size,), None, value_eps)
    v[first : first + tokens] = values


def norm_rows(x, weight, eps, out):
    out.copy_(normed(x.float(), weight, eps))


def _turned(x, cos, sin, neox):
    angles = torch.stack([cos, sin], -1).repeat(len(x) // len(cos), 1, 1)
    return rotated(x, angles, 2 * cos.shape[-1], neox)


def latent_rows(x, weight, eps, cos, sin, rows, first, neox=False):
    c, key = x.float().split([len(weight), 2 * cos.shape[1]], 1)
    c = normed(c, weight, eps)
    rows[first : first + len(x)] = torch.cat([_turned(key[:, None], cos, sin, neox)[:, 0], c], 1)


def latent_heads(q, cos, sin, factors, out, neox=False):
    q = q.float().unflatten(1, out.shape[1:])
    nope = out.shape[2] - 2 * cos.shape[1]
    q = torch.cat([q[..., :nope], _turned(q[..., nope:], cos, sin, neox)], -1)
    if factors is not None:
        q = q * factors.repeat(len(q) // len(factors))[:, None, None]
    out.copy_(q)


def latent_keys(rows, rope, keys):
    keys[..., -rope:] = rows[:, None, :rope]


def softmax_scores(scores, out, queries, first, *, scale, window=0, softcap=0.0, sinks=None):
    x = scores * scale
    x = softcap * torch.tanh(x / softcap) if softcap else x
    rows, keys = torch.arange(x.shape[1])[:, None] % queries + first, torch.arange(x.shape[2])
    hidden = (keys > rows) | (keys <= rows - window if window else keys < 0)
    x = x.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        of_rows = sinks.view(len(x), -1).repeat_interleave(queries, 1)
        x = torch.cat([x, of_rows[..., None]], -1)
    out.copy_(x.softmax(-1)[..., : scores.shape[2]])


def attend_chosen(shape, queries, rows, chosen, position, partial):
    n, rope = len(chosen), shape.rope
    whole = queries[: n * shape.heads].float().sum(1).view(n, shape.heads, -1) * math.log(2)
    seen = seen_of(chosen, len(rows))
    scores = (whole @ rows.float().T).masked_fill(~seen[:, None], float("-inf"))
    assert partial.numel() == n * shape.row_tiles * shape.part_floats
    return scores.softmax(-1) @ rows[:, rope:].float()


def route(logits, ids, weights, ser=None, routing=Routing(), choice_bias=None, bias=None):
    assert logits.dim() == 2 and bias is None
    spec = router_spec(logits.shape[1], ids.shape[1], routing)
    chosen, shares = Router(None, spec, choice_bias, ser).choose(logits)
    ids.copy_(chosen)
    weights.copy_(shares)


def group_rows(ids, ends, sources, rows):
    flat = ids.flatten()
    order = torch.where(flat < 0, len(ends), flat).sort(stable=True).indices
    order = order[: int((flat >= 0).sum())]
    ends.copy_(torch.bincount(flat[flat >= 0], minlength=len(ends)).cumsum(0))
    sources.fill_(-1)
    sources[: len(order)] = order
    rows.fill_(-1)
    rows.view(-1)[order] = torch.arange(len(order), dtype=torch.int32)


def flash(
    q,
    k,
    v,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout,
    is_causal,
    debug,
    *,
    scale,
    window_size_left=None,
    window_size_right=None,
):
    assert (max_q, max_k) == (q.shape[1], k.shape[1]) and is_causal
    assert (window_size_left is None) == (window_size_right is None)
    window = 0 if window_size_left is None else window_size_left + 1
    dtype, q, k, v = q.dtype, q.float(), k.float(), v.float()
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("snhd,smhd->shnm", q, keys) * scale
    mask = visible(max_q, max_k, window, CPU)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return attend(q, k, v, scale, window).to(dtype), scores.logsumexp(-1)


def delta_rule(kernels, weights, products, z, rates, n_sequences, past, before, after, out, buffer):
    net = delta_net(
        kernels,
        weights.taps,
        weights.dt,
        weights.a,
        RMSNorm(weights.norm, weights.eps),
        products[:, : len(weights.taps)].float() if not kernels.joined else products.float(),
        z.float(),
    )
    beta, alpha = rates.chunk(2, dim=1)
    net.beta, net.alpha = (lambda x: beta), (lambda x: alpha)
    evaluate_after(net, products, n_sequences, (past, before), after, out, weights.taps)


def kimi_delta_rule(
    kernels, weights, products, decay, z, rates, n_sequences, past, before, after, out, buffer
):
    w, (heads, bound) = weights, kernels
    shape = KimiDeltaShape(len(products), heads.key_heads, heads.key_length, heads.taps, bound)
    net = kimi_delta(shape, convolution=w.taps, dt=w.dt, a=w.a, norm=RMSNorm(w.norm, w.eps))

    def evaluated(products, batch):
        return net.mixed(products, decay.float(), z.float(), rates, batch)

    inputs = products[:, : len(w.taps)].float()
    evaluate_after(evaluated, inputs, n_sequences, (past, before), after, out, w.taps)


def state_space_rule(shape, weights, products, n_sequences, past, before, after, out, buffer):
    w = weights
    tensors = {"convolution": w.taps, "bias": w.bias, "dt": w.dt, "a": w.a, "d": w.d}
    net = state_space(shape, norm=w.norm, eps=w.eps, **tensors)
    evaluate_after(net.mixed, products.float(), n_sequences, (past, before), after, out, w.taps)


def evaluate_after(net, products, n_sequences, kept, after, out, taps):
    """Let `net`, a function of products and a batch, change the memory of the inputs and the memory
    `kept`, None for zeros, to `after`.
    """
    batch = Batch.of(n_sequences, len(products) // n_sequences, 0, CPU)
    if after is None:
        out.copy_(net(products, batch))
        return
    channels, n_taps = taps.shape
    state = RecurrentState(n_taps - 1, channels, tuple(after.shape), CPU)
    if kept[0] is not None:
        state.load(0, (0, *kept))
    out.copy_(net(products, replace(batch, states=(SimpleNamespace(layers=[state]),))))
    after.copy_(state.memory)


def short_conv(products, past, taps, n_sequences, out):
    b, c, x = products.float().chunk(3, 1)
    before = past if past is not None else b.new_zeros(taps.shape[1] - 1, taps.shape[0])
    found = [convolved(torch.cat([before, y]), taps) for y in (b * x).chunk(n_sequences)]
    out.copy_(c * torch.cat(found))


def rates_product(x, weights, out):
    out.copy_(F.linear(x.float(), weights.float()))


def mm(real, a, b, out_dtype=None, out=None):
    """A product as on a GPU, where sums of halves are float32: so is this one, which takes a fifth
    of the time of torch's product of halves on a CPU.
    """
    if a.dtype not in (torch.float16, torch.bfloat16):
        return real(a, b) if out is None else real(a, b, out=out)
    result = real(a.float(), b.float()).to(out_dtype or a.dtype)
    return result if out is None else out.copy_(result)


def bmm(a, b, out_dtype=None, out=None):
    result = torch.matmul(a.float(), b.float()).to(out_dtype or a.dtype)
    return result if out is None else out.copy_(result)


class Graph:
    """A segment of a pass. Capturing it does not change memory, and the host continues. A replay
    works only on the memory of the capture.
    """

    replays = 0

    def __init__(self, parts, stream, batch):
        self.parts, self.h, self.batch, self.context = parts, stream.h, batch, stream.context
        self.pending, self.angles = stream.pending(), dict(self.context._angles)
        before = {name: held.clone() for name, held in self.context._buffers.items()}
        prompt_graphs.launch(parts, stream, batch)
        # Memory that is allocated in a capture belongs to the graph.
        assert before.keys() == self.context._buffers.keys()
        for name, held in before.items():
            self.context._buffers[name].copy_(held)

    def replay(self) -> None:
        Graph.replays += 1
        # A graph reads angles where they were when it was captured.
        now = self.context._angles
        assert not self.batch.begins or all(now[key] is held for key, held in self.angles.items())
        stream = Stream(self.h, self.context)
        stream.left(self.pending)
        # Where its positions were, there is something else by now.
        gone = torch.full_like(self.batch.positions, -1)
        prompt_graphs.launch(self.parts, stream, replace(self.batch, positions=gone))


def captures(monkeypatch) -> None:
    """Let passes be captured as on a GPU, in graphs that launch their parts on the CPU."""
    monkeypatch.setattr(prompt_graphs, "can_capture", lambda device: True)
    monkeypatch.setattr(
        prompt_graphs.PassGraphs,
        "_capture",
        lambda self, parts, stream, batch: Graph(parts, stream, batch),
    )
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def rounded_rows(x, out, scales):
    x = x.float()
    size = prompt_rounded.GROUP
    transformed = (x.view(len(x), -1, size) @ _hadamard(size)).view_as(x)
    scales.copy_(transformed.abs().amax(1) / 127)
    out.copy_((transformed / scales[:, None].clamp_min(1e-30)).round())


def rounded_weights(m, first, out, scales):
    rounded_rows(decode_matrix(m, torch.float32, first_row=first, n_rows=len(out)), out, scales)


def _hadamard(size):
    h = torch.ones(1, 1)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def scaled_sums(sums, of_rows, of_columns, out, bias=None):
    y = sums.float() * of_rows[:, None] * of_columns / prompt_rounded.GROUP
    out.copy_(y if bias is None else y + bias.float())


def store_rows(x, cache, first, type, hadamard=0, alone=False):
    kind, rows = CACHE_TYPES[type.lower()], slice(first, first + len(x))
    put(
        RowLayout.FIELDS if alone else RowLayout.TILES,
        kind,
        cache,
        rows,
        kind.encode(turned(x, hadamard) if hadamard else x),
    )


def read_rows(cache, out, first, type, alone=False):
    kind, rows = CACHE_TYPES[type.lower()], slice(first, first + len(out))
    layout = RowLayout.FIELDS if alone else RowLayout.TILES
    out.copy_(kind.decode(get(layout, kind, cache, rows)))


def install(monkeypatch) -> None:
    """Install a device that is the CPU, without grouped products."""
    Graph.replays = 0
    step_on_cpu.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    monkeypatch.setattr(prompt_delta, "shared_limit", lambda device: 232448)
    monkeypatch.setattr(prompt_delta, "_kernels", lambda heads, half, device: heads)
    monkeypatch.setattr(prompt_delta, "delta_rule", delta_rule)
    monkeypatch.setattr(prompt_delta, "rates_product", rates_product)
    monkeypatch.setattr(prompt_state_space, "shared_limit", lambda device: 232448)
    monkeypatch.setattr(prompt_state_space, "_kernels", lambda shape, half, device: shape)
    monkeypatch.setattr(state_space_kernels, "state_space", state_space_rule)
    monkeypatch.setattr(prompt_kimi_delta, "shared_limit", lambda device: 232448)
    monkeypatch.setattr(
        prompt_kimi_delta, "_kernels", lambda heads, half, device, bound: (heads, bound)
    )
    monkeypatch.setattr(prompt_kimi_delta, "kimi_delta_rule", kimi_delta_rule)
    monkeypatch.setattr(prompt_kimi_delta, "rates_product", rates_product)
    monkeypatch.setattr(prompt_conv, "short_conv", short_conv)
    monkeypatch.setattr(torch, "bmm", bmm)
    monkeypatch.setattr(torch, "mm", partial(mm, torch.mm))
    for kernel in (add_norm, join_gate, take_sinks, converted, gather_rows, row_factors, xielu):
        monkeypatch.setattr(prompt_rows, kernel.__name__, kernel)
    for kernel in (rotate_heads, softmax_scores):
        monkeypatch.setattr(prompt_attention, kernel.__name__, kernel)
    for kernel in (store_rows, read_rows):
        monkeypatch.setattr(prompt_cached, kernel.__name__, kernel)
    for kernel in (route, group_rows):
        monkeypatch.setattr(prompt_experts, kernel.__name__, kernel)
    for kernel in (norm_rows, latent_rows, latent_heads, latent_keys):
        monkeypatch.setattr(prompt_mla, kernel.__name__, kernel)
    for kernel in (rounded_rows, rounded_weights, scaled_sums):
        monkeypatch.setattr(prompt_rounded, kernel.__name__, kernel)
    monkeypatch.setattr(attention_mla, "attend_chosen", attend_chosen)
