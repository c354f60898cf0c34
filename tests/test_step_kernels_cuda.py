"""Kernels of the decode step on a GPU against float64 on the same bytes.

`test_step_kernels_on_host.py` tests them without a GPU.
"""

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from iqforge.cuda_kernels.attention.step import StepAttention  # noqa: E402
from iqforge.cuda_kernels.step import between as step_between  # noqa: E402
from iqforge.cuda_kernels.step.router import StepRouter  # noqa: E402
from iqforge.cuda_kernels.step.sample import DrawSampler, GreedySampler, step_angles  # noqa: E402
from iqforge.runtime.layers.rope import Rope  # noqa: E402
from iqforge.runtime.network.sampling import Sampling, sample  # noqa: E402

from .step_reference import FEATURES, ROUTINGS, SHARED_JOINS, check_attention, router_case  # noqa: E402

GPU = torch.device("cuda")

# rows, group, kv heads, key length, value length, type of K, of V, rotated, style, Hadamard, head
# norms
CASES = [
    (1, 8, 4, 128, 128, "f16", "f16", 128, "neox", False, True),
    (1, 4, 8, 128, 128, "f16", "f16", 128, "norm", False, False),
    (8, 8, 4, 128, 128, "f16", "f16", 128, "neox", False, True),
    (5, 1, 3, 80, 64, "bf16", "f32", 40, "norm", False, True),
    (3, 6, 3, 80, 96, "bf16", "bf16", 40, "norm", False, True),
    (7, 5, 2, 192, 128, "f16", "f16", 64, "norm", False, False),
    (2, 3, 2, 256, 256, "f32", "f32", 128, "neox", False, False),
    (1, 2, 2, 64, 64, "q8_0", "q4_0", 64, "norm", True, False),
    (3, 4, 2, 96, 32, "q5_0", "iq4_nl", 64, "neox", False, True),
    (5, 4, 2, 128, 64, "q8_kv", "q5_0", 64, "neox", True, True),
    (2, 2, 1, 64, 64, "q8_kv", "f32", 64, "norm", False, False),
    (1, 8, 2, 256, 256, "q8_kv", "q8_0", 64, "neox", False, True),
    (4, 4, 2, 256, 128, "q6_0", "q5_1", 64, "neox", True, False),
    (8, 2, 2, 64, 64, "iq4_nl", "q4_1", 64, "norm", True, True),
    (2, 2, 2, 64, 64, "q5_1", "q8_0", 64, "norm", False, True),
    (1, 8, 2, 512, 512, "f16", "f16", 512, "neox", False, True),
    (8, 8, 2, 512, 512, "bf16", "bf16", 512, "neox", False, True),
    (2, 4, 1, 512, 512, "q8_0", "q8_0", 512, "neox", False, True),
    (2, 8, 2, 128, 128, "f16", "f16", 128, "neox", False, True),
    (2, 7, 2, 128, 128, "q8_0", "q8_0", 128, "neox", False, True),
    (1, 8, 2, 256, 256, "f16", "f16", 64, "neox", False, True),
    (1, 8, 2, 256, 256, "q8_0", "q8_0", 64, "neox", True, True),
    *(
        (1, group, 3, 128, 128, key, value, 128, "norm", turned, False)
        for key, value in [
            ("bf16", "bf16"),
            ("q8_0", "f16"),
            ("q8_kv", "f16"),
            ("q8_kv", "q8_0"),
            ("f16", "q4_1"),
            ("q8_0", "q4_0"),
            ("q6_0", "q6_0"),
            ("q5_1", "q5_1"),
            ("q5_0", "q5_0"),
            ("q4_1", "q4_1"),
            ("iq4_nl", "iq4_nl"),
        ]
        for group, turned in [(4, False), (6, True)]
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_attention(case):
    _compare(case)


@pytest.mark.parametrize("case", SHARED_JOINS, ids=lambda case: "-".join(map(str, case)))
def test_ranges_that_several_blocks_join(case):
    """Of few ranges and of many, of more than a thread reads at once."""
    _compare(case, 2048, (90, 127, 300, 1900), shortest=16)


@pytest.mark.parametrize("group", [2, 8])
@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0"])
def test_long_heads_of_deep_contexts(type, group):
    """In floats, six warps take their own tiles."""
    case = (1, group, 2, 256, 256, type, type, 64, "neox", False, True)
    _compare(case, 8192, (0, 700, 8000))


@pytest.mark.parametrize("case, features", FEATURES, ids=lambda x: "-".join(map(str, x)))
def test_attention_that_only_some_models_have(case, features):
    _compare(case, **features)


def _compare(case, capacity=1024, lengths=(0, 61, 700), **features):
    kernels = {}

    def run(shape, capacity, q, k, v, norms, eps, angles, cache, *more):
        if capacity not in kernels:
            kernels[capacity] = StepAttention(shape, capacity, GPU)
        *more, gates = more if shape.gate_apart else (*more, None)
        *more, biases, sinks = more
        attend = kernels[capacity]
        options = {"biases": biases, "sinks": sinks, "gates": gates}
        attend(q, k, v, *norms, eps, angles, cache.k, cache.v, *more, **options)
        for _, part, *_, parts in attend._pieces:
            assert not part.is_by_warp or (parts == -1).all(), (
                "a later launch would take what is left"
            )

    # A block alone, also on a tile that is not full, and several that have to be joined.
    check_attention(case, lengths, capacity, GPU, run, **features)


def _normed(x, weight, eps=1e-6):
    return torch.nn.functional.rms_norm(x.double(), weight.shape, weight.double(), eps)


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("width", [64, 5376])
def test_sums_of_norms(n, width):
    first, second = (torch.randn(n, width, device=GPU) for _ in range(2))
    weights, out = [torch.randn(width, device=GPU) for _ in range(2)], torch.empty_like(first)
    expected = _normed(first, weights[0]) + _normed(second, weights[1])
    step_between.sum_normed(first, weights[0], 1e-6, second, weights[1], 1e-6, out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert not second.any()


@pytest.mark.parametrize("n", [1, 3])
def test_inputs_of_layers(n):
    layers, length = 5, 256
    projected, table = (torch.randn(n, layers, length, device=GPU) for _ in range(2))
    weight, out = torch.randn(length, device=GPU), torch.empty(layers, n, length, device=GPU)
    step_between.layer_inputs(projected, 0.02, weight, 1e-6, table, 16.0, out)
    expected = (_normed(projected * 0.02, weight) + 16 * table.double()) * 0.5**0.5
    torch.testing.assert_close(out.double(), expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_capped_logits():
    x = 40 * torch.randn(2, 1000, device=GPU)
    expected = 30 * (x.double() / 30).tanh()
    step_between.cap(x, 30.0)
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-5)


def test_angles():
    rope, positions = Rope("neox", 64, 1e6, device=GPU), torch.tensor([0, 7, 100_000], device=GPU)
    angles = torch.empty(3, 32, 2, device=GPU)
    step_angles(rope.rates, rope.magnitude, positions.int(), angles)
    assert torch.allclose(angles, torch.stack(rope.angles(positions), -1), atol=1e-7)


@pytest.mark.parametrize(
    "rows, width, n_experts, n_used",
    [(1, 2048, 128, 8), (8, 2048, 128, 8), (3, 516, 6, 2), (2, 8192, 257, 32), (1, 7168, 256, 8)],
)
def test_router(rows, width, n_experts, n_used):
    h, norm, matrix, _, chosen, expected = router_case(rows, width, n_experts, n_used, GPU)
    for reduction in (None, (1, 0.5)):
        ids = torch.full((rows, n_used), -7, dtype=torch.int32, device=GPU)
        weights = torch.full((rows, n_used), float("nan"), device=GPU)
        router = StepRouter(rows, width, n_experts, n_used, GPU, reduction)
        for _ in range(2):  # the state that it leaves serves the next launch
            router(h, norm.weight, norm.eps, matrix, ids, weights)
        if reduction:
            kept = expected > reduction[1] * expected[:, :1]
            kept[:, : reduction[0]] = True
            chosen, expected = (
                torch.where(kept, chosen, -1),
                expected * kept / (expected * kept).sum(-1, keepdim=True),
            )
        assert torch.equal(ids.long(), chosen)
        assert torch.allclose(weights.double(), expected, rtol=1e-5)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize(
    "rows, width, n_experts, n_used", [(1, 2048, 256, 8), (8, 7168, 256, 8), (2, 516, 16, 5)]
)
def test_other_routings(routing, rows, width, n_experts, n_used):
    h, norm, matrix, biases, chosen, expected = router_case(
        rows, width, n_experts, n_used, GPU, routing=routing
    )
    ids = torch.full((rows, n_used), -7, dtype=torch.int32, device=GPU)
    weights = torch.full(expected.shape, float("nan"), device=GPU)
    router = StepRouter(rows, width, n_experts, n_used, GPU, None, routing)
    for _ in range(2):
        router(h, norm.weight, norm.eps, matrix, ids, weights, *biases)
    assert torch.equal(ids.long(), chosen)
    assert torch.allclose(weights.double(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=3),
        Sampling(2.0, 64, 1.0, 0.0, seed=2**63 + 5),
        Sampling(1.5, 0, 0.9, 0.0, seed=4),
    ],
)
def test_draws(sampling):
    for n in (7, 1000, 128256, 151936):
        logits, tokens = torch.empty(n, device=GPU), torch.zeros(8, dtype=torch.int64, device=GPU)
        positions, history = (torch.zeros(k, dtype=torch.int32, device=GPU) for k in (8, 20))
        seed = torch.tensor([sampling.seed - (sampling.seed >> 63 << 64)], device=GPU)
        sampler = DrawSampler(n, GPU)
        for step in range(1, 9):
            logits.normal_().mul_(3)
            logits[n // 3] = logits.max()  # two that are equal
            expected = sample(logits, sampling, step)
            sampler(
                logits,
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
                sampling.min_p,
                seed,
                tokens,
                positions,
                history,
            )
            assert int(tokens[0]) == int(history[step]) == expected and int(positions[0]) == step
        logits[n // 2] = float("inf")
        sampler(
            logits,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            seed,
            tokens,
            positions,
            history,
        )
        assert (int(tokens[0]), int(history[9])) == (0, -1)


def test_greedy():
    for n in (7, 1000, 151936):
        logits, tokens = torch.randn(n, device=GPU), torch.zeros(8, dtype=torch.int64, device=GPU)
        positions, history = (torch.zeros(k, dtype=torch.int32, device=GPU) for k in (8, 20))
        sampler = GreedySampler(n, GPU)
        for step in range(1, 4):
            best = int(logits.argmax())
            logits[n - 1] = logits[best]  # the first of equals
            sampler(logits, tokens, positions, history)
            assert int(tokens[0]) == int(history[step]) == best
            assert int(positions[0]) == step
            logits = torch.randn(n, device=GPU)
        logits[n // 2] = float("nan")
        sampler(logits, tokens, positions, history)
        assert (int(tokens[0]), int(history[4])) == (0, -1)
