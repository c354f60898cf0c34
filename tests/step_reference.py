"""Attention and choice of experts in float64 on the same bytes, to compare kernels of the decode
step with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from iqforge.cuda_kernels.attention.shape import AttentionShape, shared_limit
from iqforge.cuda_kernels.common.routing import Routing
from iqforge.runtime.layers.moe import Router
from iqforge.runtime.layers.norm import RMSNorm
from iqforge.runtime.layers.rope import Rope
from iqforge.runtime.layers.specs import RouterSpec
from iqforge.runtime.state.cache import CacheSettings, KVCache
from iqforge.runtime.state.cache_tiles import RowLayout
from torch.nn import functional as F


def check_attention(
    case: tuple,
    pasts: tuple[int, ...],
    capacity: int,
    device: torch.device,
    run: Callable,
    **features,
) -> None:
    """Compare a kernel after each of these numbers of positions; see `attention_error`."""
    for n_past in pasts:
        error, same_v, same_k = attention_error(case, n_past, capacity, device, run, **features)
        assert error < allowed(case)
        assert same_v == 1
        # Norm and rotation round differently, which can move an element to the next code.
        assert same_k > 0.99


def attention_error(
    case: tuple,
    n_past: int,
    capacity: int,
    device: torch.device,
    run: Callable,
    seed: int = 0,
    limit: int | None = None,
    **features,
) -> tuple[float, float, float]:
    """Return (relative error of the output, share of V's new bytes and of K's new elements that
    equal the reference path's).

    case: rows, group, kv heads, key length, value length, type of K, of V, rotated, style,
    Hadamard, head norms. features: other fields of the shape. run(shape, capacity, q, k, v, norms,
    eps, angles, cache, positions, scale, out, biases, sinks) launches the kernel, which also gets
    gates that are apart; it is called twice. limit: bytes of shared memory for which the kernel is
    made, where there is no device.
    """
    rows, group, kv, dk, dv, type_k, type_v, n_rot, style, turned, normed = case
    g = torch.Generator(device).manual_seed(seed)
    random = lambda *size: torch.randn(*size, device=device, generator=g)  # noqa: E731
    settings = CacheSettings(type_k, type_v, turned, turned)
    cache, truth = (
        KVCache.alone(capacity, kv, dk, dv, settings, device, RowLayout.TILES) for _ in range(2)
    )
    for storage in (cache.k, cache.v):
        storage.view(torch.uint8).fill_(0xFF)  # NaN where nothing was written
    past = random(n_past, kv, dk), random(n_past, kv, dv)
    q, k, v = random(rows, kv * group, dk), random(rows, kv, dk), random(rows, kv, dv)
    norms = [RMSNorm(1 + 0.1 * random(dk), 1e-6) if normed else None for _ in range(2)]
    rope = Rope(style, n_rot, 10000.0, device=device)
    positions = torch.arange(n_past, n_past + rows, device=device)
    cos, sin = rope.angles(positions)
    angles = torch.stack([cos, sin], -1).contiguous()
    types = cache.type_k.name, cache.type_v.name
    turns = n_rot, style == "neox", normed, cache.hadamard_k, cache.hadamard_v
    shape = AttentionShape(rows, group, kv, dk, dv, *types, *turns, **features)
    gates = random(rows, kv * group, 1 if shape.head_gates else dk)
    given = torch.cat([q, gates], -1) if shape.gate and not shape.gate_apart else q
    biases = random(kv * group, given.shape[-1]), random(kv, dk), random(kv, dv)
    sinks = 3 * random(kv * group)

    def ready(x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        def normed(x: torch.Tensor) -> torch.Tensor:
            if norm is None:
                return x
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm.weight.double()

        turn = lambda x: rope(x[None], (cos.double(), sin.double()))[0]  # noqa: E731
        return normed(turn(x.double())) if shape.norms_last else turn(normed(x.double()))

    if shape.biases:
        q, gates = q + biases[0][:, :dk], gates + biases[0][:, dk:] if shape.gate else gates
        new_k, new_v = k + biases[1], v + biases[2]
    else:
        new_k, new_v = k, v
    if shape.value_norm:
        new_v = new_v * torch.rsqrt(new_v.square().mean(-1, keepdim=True) + 1e-6)
    for one in (cache, truth):
        if n_past:
            one.write(0, *past)
    truth.write(n_past, ready(new_k, norms[1]).float(), new_v)
    new = slice(n_past, n_past + rows)
    if not shape.own_kv:
        cache.load(n_past, truth.save(n_past, n_past + rows))
    results = []
    for _ in range(2):
        out = torch.full((rows, kv * group, dv), float("nan"), device=device)
        run(
            shape,
            capacity,
            given,
            k,
            v,
            [None if n is None else n.weight for n in norms],
            1e-6,
            angles,
            cache,
            positions.int(),
            dk**-0.5,
            out,
            biases if shape.biases else None,
            sinks if shape.sinks else None,
            *([gates] if shape.gate_apart else []),
        )
        results.append(out)
    assert torch.equal(results[0], results[1])

    stored_k, stored_v = zip(
        *(one.save(n_past, n_past + rows) for one in (truth, cache)), strict=True
    )
    if type_k in ("f32", "q8_kv"):  # the scale of a whole row is stored in float32
        keys = (one.read(n_past + rows)[0][new] for one in (truth, cache))
        close = torch.isclose(*keys, rtol=1e-6, atol=1e-6)
    else:
        close = stored_k[0] == stored_k[1]
    alike = (
        torch.isclose(*stored_v, rtol=1e-6, atol=1e-6)
        if type_v == "f32"
        else stored_v[0] == stored_v[1]
    )
    same = alike.double().mean().item(), close.double().mean().item()
    stored_k, stored_v = cache.read(n_past + rows)
    if device.type != "cpu":
        limit = shared_limit(device)
    used = shape if limit is None else shape.fitting(limit)
    if used.on_tensor_cores and cache.type_v.is_quantized:
        stored_v = stored_v.half()
    if used.on_tensor_cores and cache.type_k.is_quantized and not used.is_by_warp:
        stored_k = stored_k.half()
    stored_k, stored_v = stored_k.double(), stored_v.double()
    query = cache.query(ready(q, norms[0])).view(rows, kv, group, dk)
    scores = torch.einsum("rkgd,nkd->rkgn", query, stored_k) * dk**-0.5
    if shape.temperature is not None:
        t, length, offset = shape.temperature
        scores *= (1 + t * torch.log1p(((positions + offset) // length).double()))[
            :, None, None, None
        ]
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    at = torch.arange(n_past + rows, device=device)[None, :]
    hidden = at > positions[:, None]
    if shape.window:
        first = positions - shape.window + 1
        if shape.chunked:
            first = positions // shape.window * shape.window
        hidden |= at < first[:, None]
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    if shape.sinks:
        column = sinks.double().view(1, kv, group, 1).expand(rows, -1, -1, -1)
        shares = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    mixed = torch.einsum("rkgn,nkd->rkgd", shares, stored_v)
    expected = cache.result(mixed).reshape(rows, kv * group, dv)
    if shape.gate:
        gates = gates.double()
        expected = expected * (F.softplus(gates) if shape.softplus_gates else gates.sigmoid())
    return ((results[0].double() - expected).norm() / expected.norm()).item(), *same


# Cases as above of which several blocks of a head join the ranges, where there are enough of them.
SHARED_JOINS = [
    (1, 8, 2, 128, 128, "q8_0", "q8_0", 128, "neox", False, True),
    (1, 4, 2, 128, 128, "q4_0", "q8_0", 128, "neox", True, True),
    (1, 8, 1, 64, 64, "f16", "f16", 64, "norm", False, False),
    (1, 8, 1, 128, 128, "q8_0", "q8_0", 128, "neox", True, True),
    (3, 2, 1, 64, 64, "q6_0", "q4_1", 64, "neox", True, True),
    (1, 1, 2, 64, 64, "bf16", "bf16", 64, "neox", False, True),
    (2, 8, 1, 80, 112, "f16", "f16", 64, "neox", False, True),
    (1, 2, 1, 256, 256, "f16", "q8_0", 64, "neox", True, False),
]
# Fields of a shape that only some models have, for a case as above.
FEATURES = [
    (
        (2, 4, 2, 64, 64, "bf16", "bf16", 32, "neox", False, True),
        {"window": 70, "sinks": True, "biases": True},
    ),
    (
        (3, 2, 1, 64, 64, "f16", "f16", 16, "neox", False, True),
        {"gate": True, "biases": True, "value_norm": True},
    ),
    ((1, 2, 2, 64, 64, "q8_0", "q8_0", 64, "neox", True, True), {"gate": True, "window": 129}),
    (
        (2, 2, 1, 48, 48, "f32", "f32", 48, "norm", False, False),
        {"softcap": 2.0, "window": 5, "temperature": (0.1, 64, 1)},
    ),
    ((3, 2, 2, 64, 64, "f16", "f16", 64, "neox", False, True), {"own_kv": False, "window": 64}),
    ((2, 2, 1, 64, 64, "f16", "f16", 0, "norm", False, False), {"biases": True}),
    (
        (2, 2, 2, 64, 64, "f16", "f16", 64, "neox", False, True),
        {"gate": True, "gate_apart": True, "softplus_gates": True, "window": 64},
    ),
    (
        (2, 3, 2, 64, 64, "f16", "f16", 32, "neox", False, True),
        {"gate": True, "gate_apart": True, "head_gates": True, "window": 64},
    ),
    (
        (2, 4, 1, 64, 64, "f16", "f16", 64, "neox", False, True),
        {"norms_last": True, "window": 101, "chunked": True},
    ),
    (
        (3, 4, 1, 64, 64, "q8_0", "q8_0", 64, "neox", False, True),
        {"window": 50, "chunked": True},
    ),
]


def allowed(case: tuple) -> float:
    """Return the allowed error. In bfloat16 on tensor cores queries and probabilities have 16 bits,
    and so have queries that multiply encoded keys.
    """
    of_16_bits = case[5] == case[6] == "bf16" or case[5] not in ("f32", "f16", "bf16")
    return 1e-4 if of_16_bits else 5e-6


ROUTINGS = [
    Routing(sigmoid=True, choice_bias=True, scale=2.5),
    Routing(sigmoid=True, norm=False, logit_bias=True, groups=4, groups_used=2),
    Routing(norm=False, scale=16.0, groups=4, groups_used=2, group_best=1),
    Routing(logit_bias=True),
    Routing(owned=(4, 9)),
    Routing(shared=2),
    Routing(choice_bias=True, shared=1),
    Routing(sigmoid=True, choice_bias=True, scale=2.5, shared=1, shared_gate=True),
]


def router_case(
    rows: int,
    width: int,
    n_experts: int,
    n_used: int,
    device: torch.device,
    seed: int = 0,
    routing: Routing = Routing(),
):
    """Return (h, norm, router matrix, biases of logits and of the choice with the gate of a shared
    expert, experts and weights in float64).
    """
    g = torch.Generator(device).manual_seed(seed)
    random = lambda *size: torch.randn(*size, device=device, generator=g)  # noqa: E731
    h, norm, matrix = (
        3 * random(rows, width),
        RMSNorm(1 + 0.1 * random(width), 1e-6),
        random(n_experts, width) * width**-0.5,
    )
    logit_bias, choice_bias = random(n_experts), 0.3 * random(n_experts)
    if n_experts > 4:
        matrix[3] = matrix[1]  # equal probabilities go to the lower expert
        logit_bias[3], choice_bias[3] = logit_bias[1], choice_bias[1]
    x = h.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    spec = RouterSpec(
        n_experts,
        n_used,
        "sigmoid" if routing.sigmoid else "softmax",
        routing.groups,
        routing.groups_used,
        routing.group_best,
        routing.norm,
        routing.scale,
    )
    bias = logit_bias.double() if routing.logit_bias else 0.0
    router = Router(
        lambda x: x @ matrix.double().T + bias,
        spec,
        choice_bias.double() if routing.choice_bias else None,
    )
    chosen, weights = router(x)
    biases = (
        logit_bias if routing.logit_bias else None,
        choice_bias if routing.choice_bias else None,
        shared_gate := random(width) * width**-0.5 if routing.shared_gate else None,
    )
    if routing.shared:
        share = (x @ shared_gate.double()).sigmoid() if routing.shared_gate else x.new_ones(rows)
        weights = torch.cat([weights, share[:, None].expand(rows, routing.shared)], 1)
    if routing.owned is not None:
        first, last = routing.owned
        chosen = torch.where((chosen >= first) & (chosen < last), chosen - first, -1)
    return h, norm, matrix, biases, chosen, weights
