"""Kernels of the prompt path: they compile everywhere, and on a device each agrees with a few lines
of torch in float64.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from iqforge.cuda_kernels.common.gating import ACTIVATIONS, Gating
from iqforge.cuda_kernels.prompt import attention as prompt_attention
from iqforge.cuda_kernels.prompt import experts as prompt_experts
from iqforge.cuda_kernels.prompt import rows as prompt_rows
from iqforge.cuda_kernels.prompt import scores as prompt_scores
from iqforge.cuda_kernels.prompt.grouped import padded
from iqforge.runtime.layers.ffn import activate, gated
from iqforge.runtime.layers.specs import FFNSpec, Xielu
from torch.nn import functional as F

from .permuted_columns import permutation

gpu = pytest.mark.gpu
needs_device = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cuda") is None,
    reason="needs a CUDA device and cuda-core",
)
HALVES = (torch.bfloat16, torch.float16)
# Half a unit in the last place, relative.
EPS = {
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    torch.float32: 2**-23,
}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check equality up to one rounding to `found`'s dtype, after arithmetic in float32."""
    expected = expected.double()
    assert not found.isnan().any()
    limit = EPS[found.dtype] * 1.01 * expected.abs() + 4e-6 * expected.abs().max()
    assert ((found.double() - expected).abs() <= limit).all()


@pytest.fixture
def rng():
    return torch.Generator("cuda").manual_seed(7)


def randn(rng, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=rng, device="cuda").to(dtype)


def poisoned(*shape, dtype):
    return torch.full(shape, float("nan"), device="cuda").to(dtype)


@gpu
@needs_device
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("width", [64, 2048, 2880, 4096, 8192, 12296])
def test_add_norm(rng, half, width):
    h, weight = randn(rng, 9, width) * 3, randn(rng, width)
    before, delta, out = h.clone(), randn(rng, 9, width, dtype=half), poisoned(9, width, dtype=half)
    exact = poisoned(9, width, dtype=torch.float32)

    def normed(x):
        return (
            x.double()
            / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
            * weight.double()
        )

    prompt_rows.add_norm(h, weight, 1e-5, out)
    assert torch.equal(h, before)
    close(out, normed(before))
    prompt_rows.add_norm(h, weight, 1e-5, out, delta=delta, exact=exact)
    assert torch.equal(h, before + delta.float())
    close(out, normed(h))
    close(exact, normed(h))
    stored = padded(width)  # rows are filled up with zeros
    other = poisoned(9, stored, dtype=half)
    prompt_rows.add_norm(h, weight, 1e-5, other, permuted=True, exact=exact)
    assert torch.equal(other, F.pad(out, (0, stored - width))[:, permutation(stored, "cuda")])
    close(exact, normed(h))
    h.copy_(before)
    prompt_rows.add_norm(h, weight, 1e-5, None, delta=delta)
    assert torch.equal(h, before + delta.float())


@gpu
@needs_device
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("width", [64, 5376, 12296])
def test_norms_of_what_is_added(rng, half, width):
    """Of one row per token, or of the weighted rows of experts."""
    tokens, k = 9, 3
    h, weight, post = randn(rng, tokens, width), randn(rng, width), randn(rng, width)
    delta, out = randn(rng, tokens * k, width, dtype=half), poisoned(tokens, width, dtype=half)
    rows = torch.randperm(tokens * k, generator=rng, device="cuda").to(torch.int32).view(tokens, k)
    weights = randn(rng, tokens, k).abs()
    mixed = (delta.double()[rows.long()] * weights[..., None]).sum(1)
    for given, y in (
        ({"delta": delta[:tokens]}, delta[:tokens].double()),
        ({"delta": delta, "rows": rows, "weights": weights}, mixed),
    ):
        expected = F.rms_norm(y, (width,), post.double(), 1e-6)
        expected = (h.double() + expected) * 0.75
        prompt_rows.add_norm(
            h, weight, 1e-5, out, post_weight=post, post_eps=1e-6, scale=0.75, **given
        )
        assert (h - expected).abs().max() < 1e-5 * expected.abs().max()
        close(out, F.rms_norm(h.double(), (width,), weight.double(), 1e-5))


@gpu
@needs_device
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (7, 0.0), (0, 2.0), (300, 2.0)])
def test_softmax_of_scores(rng, half, window, softcap, with_sinks):
    """Query i of 20 sees keys up to 500 + i of 530."""
    queries, first, keys = 20, 500, 530
    scores = 3 * randn(rng, 2, 3 * queries, keys)
    x = scores.double() * 0.5
    x = softcap * (x / softcap).tanh() if softcap else x
    last = (torch.arange(3 * queries, device="cuda") % queries + first)[:, None]
    at = torch.arange(keys, device="cuda")
    hidden = (at > last) | ((at <= last - window) if window else (at < 0))
    out = poisoned(2, 3 * queries, keys, dtype=half)
    sinks = 5 * randn(rng, 6) if with_sinks else None
    prompt_attention.softmax_scores(
        scores, out, queries, first, scale=0.5, window=window, softcap=softcap, sinks=sinks
    )
    x = x.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        x = torch.cat([x, sinks.double().view(2, 3, 1).repeat_interleave(queries, 1)], -1)
    expected = x.softmax(-1)[..., :keys]
    assert not out[:, hidden].any()
    assert (out.double() - expected).abs().max() < 2**-8 * expected.max()


@gpu
@needs_device
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("width", [64, 6144])
def test_layer_norm(rng, half, width):
    h, weight, bias = 5 + randn(rng, 9, width) * 3, randn(rng, width), randn(rng, width)
    delta, out = randn(rng, 9, width, dtype=half), poisoned(9, width, dtype=half)
    for offset in (None, bias):
        before = h.clone()
        prompt_rows.add_norm(h, weight, 1e-5, out, delta=delta, centered=True, bias=offset)
        assert torch.equal(h, before + delta.float())
        given = (weight.double(), None if offset is None else offset.double())
        close(out, torch.nn.functional.layer_norm(h.double(), (width,), *given, 1e-5))


@gpu
@needs_device
@pytest.mark.parametrize("half", HALVES)
def test_outputs_of_experts_are_added_in_order(rng, half):
    tokens, k, width = 50, 3, 520
    h, y, weights = (
        randn(rng, tokens, width),
        randn(rng, tokens * k, width, dtype=half),
        randn(rng, tokens, k).abs(),
    )
    rows = torch.randperm(tokens * k, generator=rng, device="cuda").to(torch.int32).view(tokens, k)
    rows[3, 1] = rows[7, 0] = -1
    expected, out = h.double(), poisoned(tokens, width, dtype=half)
    for slot in range(k):
        kept = (rows[:, slot] >= 0)[:, None]
        expected = expected + torch.where(
            kept, weights[:, slot, None].double() * y[rows[:, slot].long()].double(), 0.0
        )
    prompt_rows.add_norm(
        h, torch.ones(width, device="cuda"), 1e-6, out, delta=y, rows=rows, weights=weights
    )
    close(h, expected)


@gpu
@needs_device
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("width", [64, 2048, 5120, 12296])
@pytest.mark.parametrize("shared", [False, True])
def test_what_is_added_next_to_experts(rng, half, width, shared):
    tokens, k = 9, 3
    h, weight, extra = (
        randn(rng, tokens, width),
        randn(rng, width),
        randn(rng, tokens, width, dtype=half),
    )
    delta, weights = randn(rng, tokens * k, width, dtype=half), randn(rng, tokens, k).abs()
    rows = torch.randperm(tokens * k, generator=rng, device="cuda").to(torch.int32).view(tokens, k)
    shares = randn(rng, tokens) if shared else None
    factor = 1.0 if shares is None else shares.double().sigmoid()[:, None]
    expected = h.double() + factor * extra.double()
    expected = expected + (delta.double()[rows.long()] * weights[..., None]).sum(1)
    out, plain = (poisoned(tokens, n, dtype=half) for n in (padded(width), width))
    prompt_rows.add_norm(
        h,
        weight,
        1e-5,
        out,
        delta=delta,
        rows=rows,
        weights=weights,
        extra=extra,
        shares=shares,
        permuted=True,
        plain=plain,
    )
    close(h, expected)
    close(plain, F.rms_norm(h.double(), (width,), weight.double(), 1e-5))
    filled = F.pad(plain, (0, padded(width) - width))
    assert torch.equal(out, filled[:, permutation(padded(width), "cuda")])


@gpu
@needs_device
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32])
def test_conversion(rng, half, given):
    x, out = randn(rng, 5, 7, 24, dtype=given) * 100, poisoned(35, 24, dtype=half)
    for given in (x, x.transpose(0, 1)):
        prompt_rows.converted(given, out)
        assert torch.equal(out, given.reshape(35, 24).to(half))


@gpu
@needs_device
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("limit", [0.0, 3.0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_joining_gate_and_up(rng, half, activation, limit):
    both, out = randn(rng, 33, 2 * 264, dtype=half) * 4, poisoned(33, 264, dtype=half)
    gate, up = both.chunk(2, dim=1)
    prompt_rows.join_gate(gate, up, out, Gating(activation, limit))
    close(out, gated(FFNSpec(activation, limit=limit), gate.double(), up.double()))


@gpu
@needs_device
@pytest.mark.parametrize("half", HALVES)
def test_xielu(rng, half):
    x, by = randn(rng, 33, 264, dtype=half) * 4, Xielu(0.75, 0.6, 0.5, -1e-6)
    expected = activate(FFNSpec("xielu", gated=False, xielu=by), x.double())
    prompt_rows.xielu(x, by.alpha_p, by.alpha_n, by.beta, by.eps)
    close(x, expected)


@gpu
@needs_device
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("by_head", [False, True])
def test_sinks_take_their_share(rng, half, by_head):
    x, log_sums = randn(rng, 2, 70, 5, 24, dtype=half), randn(rng, 2, 5, 70)
    if by_head:  # the memory has a head's rows one after the other
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    sinks = randn(rng, 5)
    shares = (log_sums.double() - sinks[:, None]).sigmoid().transpose(1, 2)
    expected = x.double() * shares[..., None]
    prompt_rows.take_sinks(x, log_sums, sinks)
    close(x, expected)


@gpu
@needs_device
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "neox,normed,size,n_rot",
    [
        (False, False, 128, 128),
        (True, True, 128, 128),
        (True, False, 96, 64),
        (False, True, 256, 32),
        (True, True, 64, 64),
        (True, True, 512, 512),
        (True, False, 512, 128),
        (False, True, 320, 160),
    ],
)
@pytest.mark.parametrize("other", [0, 8, -8])
def test_heads_are_normed_and_rotated(rng, half, stored, neox, normed, size, n_rot, other):
    """`other`: heads of values are so much longer."""
    per, tokens, n_heads, n_kv, first, of_value = 7, 21, 6, 2, 5, min(size + other, 512)
    sizes = n_heads * size, n_kv * size, n_kv * of_value
    qkv = randn(rng, tokens, sum(sizes), dtype=half)
    angle = randn(rng, per, n_rot // 2) * 9
    cos, sin = angle.cos() * 1.2, angle.sin() * 1.2
    norms = [randn(rng, size) if normed else None for _ in range(2)]
    q = poisoned(tokens, n_heads, size, dtype=stored)
    k, v = (poisoned(30, n_kv, length, dtype=stored) for length in (size, of_value))
    prompt_attention.rotate_heads(
        qkv, q, k, v, first, cos, sin, neox=neox, q_norm=norms[0], k_norm=norms[1], eps=1e-6
    )

    def expected(x, norm):
        x = x.double()
        if norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
        c, s = (a.double().repeat(tokens // per, 1)[:, None] for a in (cos, sin))
        out, half_rot = x.clone(), n_rot // 2
        at = (
            (slice(0, half_rot), slice(half_rot, n_rot))
            if neox
            else (slice(0, n_rot, 2), slice(1, n_rot, 2))
        )
        a, b = x[..., at[0]], x[..., at[1]]
        out[..., at[0]], out[..., at[1]] = a * c - b * s, a * s + b * c
        return out

    parts = qkv.split(sizes, dim=1)
    close(q, expected(parts[0].view(tokens, n_heads, size), norms[0]))
    close(k[first : first + tokens], expected(parts[1].view(tokens, n_kv, size), norms[1]))
    assert torch.equal(v[first : first + tokens], parts[2].view(tokens, n_kv, -1).to(stored))
    assert (
        k[:first].isnan().all()
        and k[first + tokens :].isnan().all()
        and v[:first].isnan().all()
        and v[first + tokens :].isnan().all()
    )


@gpu
@needs_device
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("size", [64, 256, 512])
def test_values_that_are_keys(rng, half, size):
    """Before norm and rotation; values have a norm without weights."""
    tokens, n_heads, n_kv = 9, 6, 2
    qkv = randn(rng, tokens, (n_heads + n_kv) * size, dtype=half)
    angle, weight = randn(rng, tokens, size // 2) * 9, randn(rng, size)
    q = poisoned(tokens, n_heads, size, dtype=half)
    k, v = (poisoned(tokens, n_kv, size, dtype=half) for _ in range(2))
    angles = angle.cos(), angle.sin()
    options = {"neox": True, "q_norm": weight, "k_norm": weight, "eps": 1e-6}
    prompt_attention.rotate_heads(qkv, q, k, v, 0, *angles, **options, value_eps=1e-5)
    keys = qkv[:, n_heads * size :].view(tokens, n_kv, size)
    close(v, F.rms_norm(keys.double(), (size,), None, 1e-5))
    # The same as with values of their own, and as queries and keys apart.
    both, own_k, own_q = (torch.empty_like(x) for x in (q, k, q))
    prompt_attention.rotate_heads(
        torch.cat([qkv, keys.flatten(1)], 1), both, own_k, k.clone(), 0, *angles, **options
    )
    assert torch.equal(both, q) and torch.equal(own_k, k)
    none = q.new_empty(tokens, 0, size)
    prompt_attention.rotate_heads(
        qkv[:, : n_heads * size].contiguous(), own_q, none, none, 0, *angles, **options
    )
    assert torch.equal(own_q, q)


@gpu
@needs_device
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("size", [64, 256])
def test_gates_of_queries_are_left_out(rng, half, size):
    tokens, n_heads, n_kv = 9, 6, 2
    queries = randn(rng, tokens, n_heads, 2, size, dtype=half)
    others, weight = randn(rng, tokens, 2 * n_kv * size, dtype=half), randn(rng, size)
    angle, found = randn(rng, tokens, size // 2) * 9, []
    for rows in (queries, queries[:, :, 0]):
        q = poisoned(tokens, n_heads, size, dtype=half)
        k, v = (poisoned(tokens, n_kv, size, dtype=half) for _ in range(2))
        qkv = torch.cat([rows.flatten(1), others], 1)
        options = {"q_norm": weight, "k_norm": weight, "eps": 1e-6, "gated": rows is queries}
        prompt_attention.rotate_heads(
            qkv, q, k, v, 0, angle.cos(), angle.sin(), neox=True, **options
        )
        found.append((q, k, v))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@gpu
@needs_device
@pytest.mark.parametrize("tokens,n,width", [(2048, 128, 2048), (301, 60, 2880), (5, 512, 7168)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_routers(rng, tokens, n, width, dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    if not prompt_scores.fits(n, width, device):
        pytest.skip("the device has too little shared memory")
    x, w = randn(rng, tokens, width), randn(rng, n, width, dtype=dtype)
    parts = prompt_scores.parts_of(tokens, width, n, device)
    found = [poisoned(parts, tokens, n, dtype=torch.float32) for _ in range(2)]
    for out in found:
        prompt_scores.scores(x, w, out)
    assert torch.equal(*found)
    bound = x.double().abs() @ w.double().abs().T
    off = (found[0].double().sum(0) - x.double() @ w.double().T).abs() / bound
    assert float(off.max()) < 2**-20


@gpu
@needs_device
@pytest.mark.parametrize("n_experts,n_used", [(8, 2), (128, 8), (60, 4), (500, 32)])
@pytest.mark.parametrize("ser", [None, (1, 0.5)])
def test_routing(rng, n_experts, n_used, ser):
    tokens = 301
    logits = randn(rng, tokens, n_experts) * 2
    logits[:40] = logits[:40].round()  # equal ones
    ids, weights = (
        torch.empty(tokens, n_used, dtype=torch.int32, device="cuda"),
        poisoned(tokens, n_used, dtype=torch.float32),
    )
    prompt_experts.route(logits, ids, weights, ser)
    p = logits.double().softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :n_used]
    top = p.gather(1, order)
    kept = torch.ones_like(top, dtype=torch.bool)
    if ser:
        ratio = top / top[:, :1]
        kept[:, ser[0] :] = ratio[:, ser[0] :] > ser[1]
        clear = ((ratio - ser[1]).abs() > 1e-5).all(1)
    else:
        clear = torch.ones(tokens, dtype=torch.bool, device="cuda")
    top = torch.where(kept, top, 0.0)
    assert torch.equal(ids[clear], torch.where(kept, order, -1).to(torch.int32)[clear])
    close(weights[clear], (top / top.sum(-1, keepdim=True))[clear])


@gpu
@needs_device
@pytest.mark.parametrize(
    "tokens,k,n_experts", [(1, 2, 8), (700, 8, 128), (5000, 8, 128), (40, 3, 300)]
)
def test_rows_are_grouped_by_expert_in_order(rng, tokens, k, n_experts):
    ids = torch.randint(-1, n_experts, (tokens, k), generator=rng, device="cuda", dtype=torch.int32)
    ids[ids == 1] = 0  # an expert without rows
    n = ids.numel()
    ends, sources, rows = (
        torch.full((size,), -7, dtype=torch.int32, device="cuda") for size in (n_experts, n, n)
    )
    prompt_experts.group_rows(ids, ends, sources, rows)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    order = order[flat[order] >= 0]
    expected = torch.full((n,), -1, dtype=torch.int32, device="cuda")
    expected[order] = torch.arange(len(order), device="cuda", dtype=torch.int32)
    assert torch.equal(
        ends, torch.bincount(flat[flat >= 0], minlength=n_experts).cumsum(0).to(torch.int32)
    )
    assert (
        torch.equal(sources[: len(order)], order.to(torch.int32))
        and (sources[len(order) :] == -1).all()
    )
    assert torch.equal(rows, expected)
    x, out = (
        randn(rng, tokens, 264, dtype=torch.bfloat16),
        torch.zeros(n, 264, dtype=torch.bfloat16, device="cuda"),
    )
    prompt_rows.gather_rows(x, sources, k, out)
    assert torch.equal(out[: len(order)], x[order // k]) and not out[len(order) :].any()
