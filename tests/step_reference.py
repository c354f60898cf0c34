"""Attention and choice of experts in float64 on the same bytes, to compare kernels of the decode
step with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from iqforge.cuda_kernels.step_attention import AttentionShape
from iqforge.runtime.layers.norm import RMSNorm
from iqforge.runtime.layers.rope import Rope
from iqforge.runtime.state.cache import CacheSettings, KVCache


def attention_error(
    case: tuple, n_past: int, capacity: int, device: torch.device, run: Callable, seed: int = 0
) -> tuple[float, float, float]:
    """Return (relative error of the output, share of V's new bytes and of K's new elements that
    equal the reference path's).

    case: rows, group, kv heads, key length, value length, type of K, of V, rotated, style,
    Hadamard, head norms. run(shape, capacity, q, k, v, norms, eps, angles, cache, positions, scale,
    out) launches the kernel; it is called twice.
    """
    rows, group, kv, dk, dv, type_k, type_v, n_rot, style, turned, normed = case
    g = torch.Generator(device).manual_seed(seed)
    random = lambda *size: torch.randn(*size, device=device, generator=g)  # noqa: E731
    cache = KVCache.alone(
        capacity, kv, dk, dv, CacheSettings(type_k, type_v, turned, turned), device
    )
    for storage in (cache.k, cache.v):
        storage.view(torch.uint8).fill_(0xFF)  # NaN where nothing was written
    if n_past:
        cache.write(0, random(n_past, kv, dk), random(n_past, kv, dv))
    q, k, v = random(rows, kv * group, dk), random(rows, kv, dk), random(rows, kv, dv)
    norms = [RMSNorm(1 + 0.1 * random(dk), 1e-6) if normed else None for _ in range(2)]
    rope = Rope(style, n_rot, 10000.0, device=device)
    positions = torch.arange(n_past, n_past + rows, device=device)
    cos, sin = rope.angles(positions)
    angles = torch.stack([cos, sin], -1).contiguous()
    shape = AttentionShape(
        rows,
        group,
        kv,
        dk,
        dv,
        cache.type_k.name,
        cache.type_v.name,
        n_rot,
        style == "neox",
        normed,
        cache.hadamard_k,
        cache.hadamard_v,
    )
    results = []
    for _ in range(2):
        out = torch.full((rows, kv * group, dv), float("nan"), device=device)
        run(
            shape,
            capacity,
            q,
            k,
            v,
            [None if n is None else n.weight for n in norms],
            1e-6,
            angles,
            cache,
            positions.int(),
            dk**-0.5,
            out,
        )
        results.append(out)
    assert torch.equal(results[0], results[1])

    def ready(x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        x = x.double()
        if norm is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm.weight.double()
        return rope(x[None], (cos.double(), sin.double()))[0]

    truth = KVCache.alone(
        capacity, kv, dk, dv, CacheSettings(type_k, type_v, turned, turned), device
    )
    truth.write(n_past, ready(k, norms[1]).float(), v)
    new = slice(n_past, n_past + rows)
    close = (
        torch.isclose(truth.k[new], cache.k[new], rtol=1e-6, atol=1e-6)
        if type_k == "f32"
        else truth.k[new] == cache.k[new]
    )
    same = (truth.v[new] == cache.v[new]).double().mean().item(), close.double().mean().item()
    stored_k, stored_v = (x.double() for x in cache.read(n_past + rows))
    scores = (
        torch.einsum(
            "rkgd,nkd->rkgn", cache.query(ready(q, norms[0])).view(rows, kv, group, dk), stored_k
        )
        * dk**-0.5
    )
    hidden = torch.arange(n_past + rows, device=device)[None, :] > positions[:, None]
    mixed = torch.einsum(
        "rkgn,nkd->rkgd",
        scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1),
        stored_v,
    )
    expected = cache.result(mixed).reshape(rows, kv * group, dv)
    return ((results[0].double() - expected).norm() / expected.norm()).item(), *same


def allowed(case: tuple) -> float:
    """Return the allowed error. In bfloat16 on tensor cores queries and probabilities have 16
    bits.
    """
    return 3e-5 if case[5] == case[6] == "bf16" else 5e-6


def router_case(
    rows: int, width: int, n_experts: int, n_used: int, device: torch.device, seed: int = 0
):
    """Return (h, norm, router matrix, experts and weights in float64)."""
    g = torch.Generator(device).manual_seed(seed)
    random = lambda *size: torch.randn(*size, device=device, generator=g)  # noqa: E731
    h, norm, matrix = (
        3 * random(rows, width),
        RMSNorm(1 + 0.1 * random(width), 1e-6),
        random(n_experts, width) * width**-0.5,
    )
    if n_experts > 4:
        matrix[3] = matrix[1]  # equal probabilities go to the lower expert
    x = h.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    p = (x @ matrix.double().T).softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights = p.values[:, :n_used] / p.values[:, :n_used].sum(-1, keepdim=True)
    return h, norm, matrix, p.indices[:, :n_used], weights
