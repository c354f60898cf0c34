"""The kernels of the decode step without a GPU: compiled by g++, except for a few hardware
instructions.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from iqforge.cuda_kernels.common.routing import Routing
from iqforge.cuda_kernels.step.router import router_spec
from iqforge.cuda_kernels.step.sample import MOST_BEST, SAMPLE
from iqforge.runtime.network.sampling import GREEDY, Sampling, sample

from .kernels_on_host import (
    LIMIT,
    RUN_ATTENTION,
    RUN_ROUTER,
    RUN_SAMPLE,
    library,
    pointer,
)
from .step_reference import (
    FEATURES,
    ROUTINGS,
    SHARED_JOINS,
    attention_error,
    check_attention,
    router_case,
)

CPU = torch.device("cpu")


def part_of_full_matrix(*cases: tuple) -> list:
    return [pytest.param(case, marks=pytest.mark.full) for case in cases]


@pytest.mark.parametrize(
    "case",
    [
        (8, 4, 1, 64, 64, "bf16", "bf16", 64, "norm", False, False),
        (2, 3, 1, 80, 72, "f16", "f32", 40, "norm", False, True),
        (1, 4, 2, 64, 64, "q8_0", "q5_1", 64, "norm", True, False),
        (3, 2, 1, 96, 32, "q6_0", "iq4_nl", 64, "neox", False, True),
        (1, 6, 2, 64, 64, "q4_1", "iq4_nl", 64, "norm", False, False),
        (1, 8, 3, 128, 128, "q8_kv", "q8_0", 128, "neox", False, True),
        (3, 2, 1, 64, 32, "q8_kv", "f32", 64, "norm", True, False),
        (3, 8, 1, 64, 64, "q8_kv", "iq4_nl", 64, "norm", False, False),
        (1, 4, 1, 128, 128, "q8_0", "f16", 128, "neox", False, True),
        (1, 2, 1, 128, 192, "q5_1", "q6_0", 64, "neox", True, True),
        (1, 8, 1, 256, 256, "q4_0", "q5_0", 64, "neox", False, True),
        (1, 4, 1, 64, 96, "iq4_nl", "q5_1", 64, "neox", False, True),
        (1, 4, 1, 64, 32, "q5_0", "q4_1", 64, "neox", False, True),
        (1, 16, 1, 96, 96, "q8_0", "q4_0", 64, "neox", False, True),
        (1, 8, 1, 256, 256, "f16", "f16", 64, "neox", False, True),  # six warps
        (8, 2, 1, 16, 16, "f16", "f16", 16, "neox", False, True),  # rows shorter than their number
        *part_of_full_matrix(
            (1, 8, 2, 128, 128, "f16", "f16", 128, "neox", False, True),
            (2, 7, 1, 64, 64, "q5_0", "q6_0", 64, "norm", False, False),
            (1, 4, 2, 64, 64, "q8_0", "f16", 64, "norm", False, False),
            (1, 4, 2, 128, 128, "q8_0", "q8_0", 128, "neox", False, True),
            (4, 4, 2, 64, 64, "q4_0", "iq4_nl", 64, "neox", False, True),
            (1, 16, 1, 64, 64, "q6_0", "q4_1", 64, "neox", False, True),
        ),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_attention(case, tmp_path):
    _compare(case, tmp_path)


@pytest.mark.parametrize("case, features", FEATURES, ids=lambda x: "-".join(map(str, x)))
def test_attention_that_only_some_models_have(case, features, tmp_path):
    _compare(case, tmp_path, **features)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_queries_in_bytes_that_are_no_numbers(value, tmp_path):
    """They give no numbers, and those of other heads do."""
    run, outs = _runner(tmp_path), []

    def changed(shape, capacity, q, *rest):
        q = q.clone()
        q[0, 2, 5] = value
        run(shape, capacity, q, *rest)
        outs.append(rest[-3].clone())
        rest[-3].zero_()

    case = (1, 4, 1, 64, 64, "q8_0", "q8_0", 64, "norm", False, False)
    attention_error(case, 40, 256, CPU, changed)
    assert torch.isfinite(outs[0]).all(-1)[0].tolist() == [True, True, False, True]


IN_LITTLE_MEMORY = [  # case, positions of a tile
    ((1, 8, 1, 512, 512, "f16", "f16", 512, "neox", False, True), 16),
    ((1, 2, 1, 512, 512, "bf16", "f32", 256, "neox", False, True), 16),
    ((2, 4, 1, 512, 512, "q8_0", "q8_0", 512, "neox", False, True), 8),
    ((1, 8, 1, 512, 512, "q8_0", "q4_0", 512, "neox", True, False), 8),
]


@pytest.mark.parametrize(
    "case, tile, window",
    [
        *((*given, number % 2 * 100) for number, given in enumerate(IN_LITTLE_MEMORY)),
        *(
            pytest.param(*given, 100 - number % 2 * 100, marks=pytest.mark.full)
            for number, given in enumerate(IN_LITTLE_MEMORY)
        ),
    ],
    ids=lambda case: "-".join(map(str, case)) if isinstance(case, tuple) else str(case),
)
def test_heads_of_512_in_little_shared_memory(case, tile, window, tmp_path):
    run, limit = _runner(tmp_path, 97 << 10, tile), 97 << 10
    check_attention(case, (0, 61, 300), 512, CPU, run, limit=limit, window=window)


@pytest.mark.parametrize(
    "case",
    [*SHARED_JOINS[:2], *SHARED_JOINS[4:], *part_of_full_matrix(*SHARED_JOINS[2:4])],
    ids=lambda case: "-".join(map(str, case)),
)
def test_ranges_that_several_blocks_join(case, tmp_path):
    """Of few ranges and of many, of more than a thread reads at once."""
    check_attention(case, (90, 127, 300, 740), 768, CPU, _runner(tmp_path), shortest=16)


def _compare(case, tmp_path, **features):
    # A block alone, also on a tile that is not full, and several that have to be joined.
    check_attention(case, (0, 61, 300), 512, CPU, _runner(tmp_path), **features)


def _runner(tmp_path, limit=LIMIT, tile=None):
    """Return what runs a kernel on the CPU, compiled at the first call."""
    loaded = []

    def run(shape, capacity, q, k, v, norms, eps, angles, cache, positions, scale, out, *more):
        if not loaded:
            used = shape.fitting(limit)
            assert tile in (None, used.tile(limit)[0])
            loaded.append(library(tmp_path, used.spec(limit), RUN_ATTENTION))
        biases, sinks, *gates = more
        left = loaded[0].run(
            -(-capacity // shape.shortest),
            *map(pointer, (q, k, v, *norms)),
            ctypes.c_float(eps),
            pointer(angles),
            pointer(cache.k),
            pointer(cache.v),
            pointer(positions),
            ctypes.c_float(scale),
            *map(pointer, biases or (None, None, None)),
            pointer(sinks),
            *map(pointer, (out, *gates)),
        )
        assert left == 0, "a later launch would take what this one has left"

    return run


@pytest.mark.parametrize(
    "rows, width, n_experts, n_used, reduction",
    [
        (1, 2048, 64, 8, None),
        (3, 516, 6, 2, None),
        (2, 512, 16, 6, (2, 0.4)),
        (2, 64, 512, 10, None),
        (1, 64, 300, 32, (1, 0.4)),
        (8, 64, 2, 1, None),
    ],
)
def test_router(rows, width, n_experts, n_used, reduction, tmp_path):
    h, norm, matrix, _, chosen, expected = router_case(rows, width, n_experts, n_used, CPU)
    if reduction:
        kept = expected > reduction[1] * expected[:, :1]
        kept[:, : reduction[0]] = True
        assert 0 < int(kept.sum()) < kept.numel()
        chosen, expected = (
            torch.where(kept, chosen, -1),
            expected * kept / (expected * kept).sum(-1, keepdim=True),
        )
    ids, weights = (
        torch.full((rows, n_used), -7, dtype=torch.int32),
        torch.full((rows, n_used), float("nan")),
    )
    router = library(tmp_path, router_spec(rows, width, n_experts, n_used, reduction), RUN_ROUTER)
    router.run(
        pointer(h),
        pointer(norm.weight),
        ctypes.c_float(norm.eps),
        pointer(matrix),
        None,
        None,
        None,
        pointer(ids),
        pointer(weights),
    )
    assert torch.equal(ids.long(), chosen)
    assert torch.allclose(weights.double(), expected, rtol=1e-5)


@pytest.mark.parametrize("routing", [Routing(), Routing(sigmoid=True, choice_bias=True)], ids=str)
def test_many_equal_experts(routing, tmp_path):
    """The lower ones are chosen, and each once; logits that are not numbers are the smallest."""
    rows, width, n_experts, n_used = 2, 8, 384, 6
    kernel = library(
        tmp_path, router_spec(rows, width, n_experts, n_used, None, routing), RUN_ROUTER
    )
    choice_bias = torch.zeros(n_experts)
    for equal in ("all", "many", "infinite", "not a number"):
        h, norm, matrix = torch.ones(rows, width), torch.ones(width), torch.zeros(n_experts, width)
        h[1] = -1.0
        if equal == "many":
            matrix[7:] = torch.randn(n_experts - 7, 1).sort(0).values.round(decimals=1) / 16
        elif equal == "infinite":
            matrix[:, 0] = float("-inf")
            matrix[300:305, 0] = 0.1
        elif equal == "not a number":
            h[0, 3] = float("nan")
        ids = torch.full((rows, n_used), -7, dtype=torch.int32)
        weights = torch.full((rows, n_used), float("nan"))
        kernel.run(
            *map(pointer, (h, norm)),
            ctypes.c_float(1e-6),
            pointer(matrix),
            None,
            pointer(choice_bias),
            None,
            pointer(ids),
            pointer(weights),
        )
        normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        products = normed.double()[:, None] * matrix.double()
        logits = torch.where(matrix == 0, 0 * normed.double()[:, None], products).sum(-1)
        logits = logits.nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf)
        order = logits.sort(descending=True, stable=True).indices
        assert torch.equal(ids.long(), order[:, :n_used]), equal
        if equal in ("all", "many"):
            assert weights.sum(1).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize(
    "routing, n_experts",
    [*((routing, 16) for routing in ROUTINGS), (ROUTINGS[0], 320), (ROUTINGS[1], 320)],
    ids=str,
)
def test_other_routings(routing, n_experts, tmp_path):
    rows, width, n_used = 3, 516, 5
    h, norm, matrix, biases, chosen, expected = router_case(
        rows, width, n_experts, n_used, CPU, routing=routing
    )
    ids = torch.full((rows, n_used), -7, dtype=torch.int32)
    weights = torch.full(expected.shape, float("nan"))
    spec = router_spec(rows, width, n_experts, n_used, None, routing)
    library(tmp_path, spec, RUN_ROUTER).run(
        pointer(h),
        pointer(norm.weight),
        ctypes.c_float(norm.eps),
        pointer(matrix),
        *map(pointer, biases),
        pointer(ids),
        pointer(weights),
    )
    if routing.owned is not None:
        assert (chosen < 0).any() and (chosen >= 0).any()
    assert torch.equal(ids.long(), chosen)
    assert torch.allclose(weights.double(), expected, rtol=1e-5)


def test_draws_are_those_of_the_host(tmp_path):
    kernels = library(tmp_path, SAMPLE, RUN_SAMPLE)
    n, number = 3000, ctypes.c_double
    samplings = [
        GREEDY,
        Sampling(),
        Sampling(seed=2**63 + 5),
        Sampling(1.5, 0, 0.9, 0, seed=3),
        Sampling(0.7, 5, 1.0, 0.2),
        Sampling(2.0, 0, 1.0, 0.0, seed=9),
        Sampling(2.0, 64, 1.0, 0.0, seed=11),
        Sampling(1.0, 50, 0.5, 0.0, seed=12),
    ]
    for case, sampling in enumerate(samplings):
        logits = 3 * torch.randn(n, generator=torch.Generator().manual_seed(case))
        logits[100] = logits[200] = logits.max()  # the lower one of equals
        tokens, seed = (
            torch.zeros(8, dtype=torch.int64),
            torch.tensor([sampling.seed - (sampling.seed >> 63 << 64)]),
        )
        positions, history = (
            torch.full((8,), 40 + case, dtype=torch.int32),
            torch.zeros(60, dtype=torch.int32),
        )
        after = tuple(map(pointer, (tokens, positions, history)))
        for step in range(3):
            if step == 2:
                logits[7] = float("inf")
            position = 41 + case + step
            drawn = sample(logits, sampling, position) if step < 2 else -1  # not finite
            how = (
                number(sampling.temperature),
                number(sampling.top_p),
                number(sampling.min_p),
                pointer(seed),
                *after,
            )
            for kernel in (
                ("greedy",)
                if sampling.is_greedy
                else ("draw", "best")
                if 0 < sampling.top_k <= MOST_BEST
                else ("draw",)
            ):
                positions[0] = position - 1
                if kernel == "greedy":
                    kernels.greedy(pointer(logits), n, 5, *after)
                elif kernel == "best":
                    kernels.best(pointer(logits), n, sampling.top_k, *how)
                else:
                    values, ids = logits.sort(descending=True, stable=True)
                    kernels.draw(pointer(values), pointer(ids), n, sampling.top_k or n, *how)
                assert (int(history[position]), int(tokens[0]), int(positions[0])) == (
                    drawn,
                    max(drawn, 0),
                    position,
                )
                history[position] = tokens[0] = -7
