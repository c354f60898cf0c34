"""How flash attention of prompts is divided, and what it refuses, without a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from iqforge.cuda_kernels.compile import wgmma
from iqforge.cuda_kernels.prompt import flash, flash_plan
from iqforge.errors import ShapeError

GPU, PROCESSORS = torch.device("cuda"), 132


@pytest.fixture(autouse=True)
def processors(monkeypatch):
    monkeypatch.setattr(flash_plan, "multiprocessors", lambda device: PROCESSORS)


SHAPES = [
    ((128, 128), 32, 8),
    ((64, 64), 64, 8),
    ((256, 256), 8, 1),
    ((96, 96), 12, 1),
    ((192, 128), 128, 128),
    ((80, 80), 7, 7),
]


@pytest.mark.parametrize("lengths, heads, kv_heads", SHAPES, ids=str)
def test_parts_share_the_multiprocessors(lengths, heads, kv_heads):
    """All tiles with their parts are at most as many, and a part has some blocks of positions."""
    for n, depth, sequences in itertools.product((1, 9, 130, 700), (0, 513, 70_000), (1, 3, 200)):
        shapes = (sequences, n, heads, lengths[0]), (sequences, depth + n, kv_heads, lengths[1])
        plan = flash_plan.plan_of(*shapes, GPU)
        rows, pairs, parts = flash_plan.division(*shapes, GPU, plan)
        assert rows % plan.rows == 0 and 0 <= rows - n * (heads // kv_heads) < plan.rows
        assert pairs == sequences * kv_heads and parts >= 1
        if parts > 1:
            assert parts * pairs * rows // plan.rows <= PROCESSORS
            assert parts * plan.positions * 3 <= depth + n


@pytest.mark.parametrize("lengths, heads, kv_heads", SHAPES, ids=str)
def test_fewer_tokens_and_heads_allocate_no_more_than_is_announced(lengths, heads, kv_heads):
    (key, value), some = lengths, {1, kv_heads // 2, kv_heads} - {0}
    for rows, total in itertools.product((1, 40, 600, 2048), (300, 4096, 100_000)):
        announced = flash_plan.partial_bytes(
            (1, rows, heads, key), (1, total, kv_heads, value), GPU
        )
        divided = 0
        for n, kept, seen in itertools.product((1, 2, 33, 600, 2048), some, (300, 4096, 100_000)):
            if n > rows or seen > total or n > seen:
                continue
            shapes = (1, n, kept * (heads // kv_heads), key), (1, seen, kept, value)
            found = flash_plan.division(*shapes, GPU, flash_plan.plan_of(*shapes, GPU)).partial
            divided = max(divided, 4 * found * (value + 2))
        assert divided <= announced <= 4 * PROCESSORS * 192 * (value + 2)
        assert bool(announced) == (total > 300)


def test_products_are_those_of_the_plans():
    plans = [plan for plans in flash_plan.PLANS.values() for plan in plans]
    assert set(wgmma.POSITIONS) == {plan.positions for plan in plans}
    assert set(wgmma.VALUES) == {value for _, value in flash_plan.PLANS}


@pytest.mark.parametrize("lengths", flash_plan.PLANS, ids=str)
def test_blocks_fit_the_shared_memory_of_a_multiprocessor(lengths):
    for plan in flash_plan.PLANS[lengths]:
        assert plan.shared(*lengths) + 8 * (2 + 4 * 2) <= 227 * 1024


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def test_what_does_not_fit_together():
    q, k, v, out = (
        halves(2, 20, 8, 128),
        halves(2, 40, 2, 128),
        halves(2, 40, 2, 128),
        halves(2, 20, 8, 128),
    )
    turned = k.transpose(1, 2).contiguous().transpose(1, 2)
    apart = halves(2, 50, 2, 128)[:, :40]  # sequences do not follow each other
    for message, operands in {
        "attention of": (q, k[:, :10], v[:, :10], out),
        "heads that do not follow": (q, turned, v, out),
        "or sequences that do not": (q, apart, v, out),
        "16 bytes": (q, k.flatten()[1:].as_strided((2, 39, 2, 128), k.stride()), v[:, :39], out),
        "values in torch.bfloat16": (q, k, v.bfloat16(), out),
    }.items():
        with pytest.raises(ShapeError, match=message):
            flash.flash_attention(*operands, scale=1.0)


def test_sequences_of_one_token(monkeypatch):
    """Their tokens are rows of a wider matrix, as far apart as sequences."""
    launched = []
    monkeypatch.setattr(flash, "function", lambda spec, name, device: name)
    monkeypatch.setattr(flash, "launch", lambda name, *rest, **_: launched.append(rest[2:]))
    wide = halves(3, 8 * 256 + 64)[:, : 8 * 256].unflatten(1, (8, 2, 128))
    gates = wide[:, :, 1].view(3, 1, 8, 128)
    assert gates.stride(1) != gates.stride(0) == 8 * 256 + 64
    q = halves(3, 8 * 128 + 64)[:, : 8 * 128].unflatten(1, (1, 8, 128))
    k, v = halves(3, 40, 2, 128), halves(3, 40, 2, 128)
    flash.flash_attention(q, k, v, halves(3, 1, 8, 128), scale=1.0, gates=gates)
    [arguments] = launched
    assert arguments[4:8] == (8 * 128 + 64, 256, 256, 8 * 128)
    assert arguments[-4:-1] == (8 * 256 + 64, 256, 1)
    flash.flash_attention(q, k, v, halves(3, 1, 8, 128), scale=1.0, gates=gates[..., :1])
    assert launched[-1][-4:-1] == (8 * 256 + 64, 256, 0)


def test_gates_that_do_not_fit_results():
    q, k, v, out = (halves(2, n, heads, 128) for n, heads in ((20, 8), (40, 2), (40, 2), (20, 8)))
    odd = halves(2, 20, 8, 129)[..., :128]
    apart = halves(2, 30, 8, 128)[:, :20]
    for gates in (out.bfloat16(), out[:, :, :4], odd, apart, out.transpose(0, 1).contiguous()):
        with pytest.raises(ShapeError, match="gates"):
            flash.flash_attention(q, k, v, out, scale=1.0, gates=gates)
