"""Kernels of the decoding step against float64 on the same bytes."""

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

from iqforge.runtime.cache import CacheSettings, KVCache  # noqa: E402
from iqforge.runtime.layers.norm import RMSNorm  # noqa: E402
from iqforge.runtime.layers.rope import Rope  # noqa: E402

# rows, group, kv heads, key length, value length, type of K, of V, rotated, style, Hadamard, head norms
SHAPES = [
    (1, 8, 4, 128, 128, "f16", "f16", 128, "neox", False, True),
    (1, 4, 8, 128, 128, "f16", "f16", 128, "norm", False, False),
    (8, 8, 4, 128, 128, "f16", "f16", 128, "neox", False, True),
    (5, 1, 3, 80, 64, "bf16", "f32", 40, "norm", False, True),
    (3, 6, 3, 80, 96, "bf16", "bf16", 40, "norm", False, True),
    (7, 5, 2, 192, 128, "f16", "f16", 64, "norm", False, False),
    (2, 3, 2, 72, 40, "f16", "f16", 72, "neox", False, True),
    (2, 3, 2, 256, 256, "f32", "f32", 128, "neox", False, False),
    (1, 2, 2, 64, 64, "q8_0", "q4_0", 64, "norm", True, False),
    (3, 4, 2, 96, 32, "q5_0", "iq4_nl", 64, "neox", False, True),
    (4, 4, 2, 256, 128, "q6_0", "q5_1", 64, "neox", True, False),
    (1, 7, 1, 32, 96, "q4_1", "q6_0", 32, "norm", False, False),
    (8, 2, 2, 64, 64, "iq4_nl", "q4_1", 64, "norm", True, True),
    (2, 2, 2, 64, 64, "q5_1", "q8_0", 64, "norm", False, True),
    (2, 2, 2, 64, 64, "q4_0", "q5_0", 64, "norm", True, True),
]


def attention_error(shape, n_past: int, capacity: int, seed: int = 0, shortest: int = 128, repeat: bool = True):
    """(relative error of the mix, share of V's bytes and of K's bytes that equal the truth path's, both over the new rows)."""
    from iqforge.cuda_kernels.step_attention import AttentionShape, StepAttention
    from iqforge.cuda_kernels.step_sample import step_angles

    rows, group, kv, dk, dv, type_k, type_v, n_rot, style, turned, normed = shape
    device, g = torch.device("cuda"), torch.Generator("cuda").manual_seed(seed)
    random = lambda *size: torch.randn(*size, device=device, generator=g)  # noqa: E731
    cache = KVCache(capacity, kv, dk, dv, CacheSettings(type_k, type_v, turned, turned), device)
    if n_past:
        cache.write(0, random(n_past, kv, dk), random(n_past, kv, dv))
    q, k, v = random(rows, kv * group, dk), random(rows, kv, dk), random(rows, kv, dv)
    norms = [RMSNorm(1 + 0.1 * random(dk), 1e-6) if normed else None for _ in range(2)]
    rope = Rope(style, n_rot, 10000.0, device=device)
    positions = torch.arange(n_past, n_past + rows, device=device)
    angles = torch.empty(rows, n_rot // 2, 2, device=device)
    step_angles(rope.rates, rope.magnitude, positions.int(), angles)
    cos, sin = rope.angles(positions)
    assert torch.allclose(angles, torch.stack([cos, sin], -1), atol=1e-7)

    attention = StepAttention(AttentionShape(rows, group, kv, dk, dv, cache.type_k.name, cache.type_v.name, n_rot, style == "neox",
                                             normed, cache.hadamard_k, cache.hadamard_v, shortest), capacity, device)
    results = []
    for _ in range(2 if repeat else 1):
        out = torch.full((rows, kv * group, dv), float("nan"), device=device)
        attention(q, k, v, *(None if n is None else n.weight for n in norms), 1e-6, angles, cache.k, cache.v, positions.int(), dk**-0.5,
                  out)
        results.append(out)
    assert torch.equal(results[0], results[-1])

    def ready(x, norm):
        x = x.double()
        if norm is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm.weight.double()
        return rope(x[None], (cos.double(), sin.double()))[0]

    truth = KVCache(capacity, kv, dk, dv, CacheSettings(type_k, type_v, turned, turned), device)
    truth.write(n_past, ready(k, norms[1]).float(), v)
    new = slice(n_past, n_past + rows)
    close = torch.isclose(truth.k[new], cache.k[new], rtol=1e-6, atol=1e-6) if type_k == "f32" else truth.k[new] == cache.k[new]
    same = (truth.v[new] == cache.v[new]).double().mean().item(), close.double().mean().item()
    stored_k, stored_v = (x.double() for x in cache.read(n_past + rows))
    scores = torch.einsum("rkgd,nkd->rkgn", cache.query(ready(q, norms[0])).view(rows, kv, group, dk), stored_k) * dk**-0.5
    hidden = torch.arange(n_past + rows, device=device)[None, :] > positions[:, None]
    mixed = torch.einsum("rkgn,nkd->rkgd", scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1), stored_v)
    truth = cache.result(mixed).reshape(rows, kv * group, dv)
    return ((out.double() - truth).norm() / truth.norm()).item(), *same


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("n_past", [0, 61, 700])
def test_attention(shape, n_past):
    error, same_v, same_k = attention_error(shape, n_past, 1024)
    assert error < (3e-5 if shape[5] == shape[6] == "bf16" else 5e-6)  # there queries and probabilities have 16 bits
    assert same_v == 1
    assert same_k > 0.99  # norm and rotation round differently, which can move an element to the next code


def router_case(rows: int, width: int, n_experts: int, n_used: int, reduction=None, seed: int = 0):
    from iqforge.cuda_kernels.step_router import StepRouter

    g = torch.Generator("cuda").manual_seed(seed)
    random = lambda *size: torch.randn(*size, device="cuda", generator=g)  # noqa: E731
    h, norm, matrix = 3 * random(rows, width), RMSNorm(1 + 0.1 * random(width), 1e-6), random(n_experts, width) * width**-0.5
    if n_experts > 4:
        matrix[3] = matrix[1]  # equal probabilities go to the lower expert
    router = StepRouter(rows, width, n_experts, n_used, torch.device("cuda"), reduction)
    ids = torch.full((rows, n_used), -1, dtype=torch.int32, device="cuda")
    weights = torch.full((rows, n_used), float("nan"), device="cuda")
    for _ in range(2):
        router(h, norm.weight, norm.eps, matrix, ids, weights)
    x = h.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    p = (x @ matrix.double().T).softmax(-1).sort(dim=-1, descending=True, stable=True)
    truth = p.values[:, :n_used] / p.values[:, :n_used].sum(-1, keepdim=True)
    return ids, weights, p.indices[:, :n_used], truth


@pytest.mark.parametrize("rows, width, n_experts, n_used",
                         [(1, 2048, 128, 8), (8, 2048, 128, 8), (3, 516, 6, 2), (2, 8192, 257, 32), (1, 512, 8, 8), (1, 7168, 256, 8)])
def test_router(rows, width, n_experts, n_used):
    ids, weights, chosen, truth = router_case(rows, width, n_experts, n_used)
    assert torch.equal(ids.long(), chosen)
    assert torch.allclose(weights.double(), truth, rtol=1e-5)


def test_router_leaves_out_improbable_experts():
    _, full, chosen, _ = router_case(4, 512, 16, 6)
    ids, weights, _, _ = router_case(4, 512, 16, 6, reduction=(2, 0.4))
    kept = full > 0.4 * full[:, :1]
    kept[:, :2] = True
    assert 0 < int(kept.sum()) < kept.numel()
    assert torch.equal(ids.long(), torch.where(kept, chosen, -1))
    assert torch.allclose(weights, full * kept / (full * kept).sum(-1, keepdim=True), rtol=1e-5)


def test_greedy():
    from iqforge.cuda_kernels.step_sample import GreedySampler

    for n in (7, 1000, 151936):
        logits, tokens = torch.randn(n, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda")
        positions, history = (torch.zeros(k, dtype=torch.int32, device="cuda") for k in (8, 20))
        sampler = GreedySampler(n, torch.device("cuda"))
        for step in range(1, 4):
            best = int(logits.argmax())
            logits[n - 1] = logits[best]  # the first of equals
            sampler(logits, tokens, positions, history)
            assert int(tokens[0]) == int(history[step]) == best
            assert int(positions[0]) == step
            logits = torch.randn(n, device="cuda")
        logits[n // 2] = float("nan")
        sampler(logits, tokens, positions, history)
        assert (int(tokens[0]), int(history[4])) == (0, -1)
