"""Experts of many rows on the CPU in compiled code, against torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.layers import expert_rows, many_rows
from iqforge.runtime.layers.moe import MoE, Router
from iqforge.runtime.layers.specs import FFNSpec, RouterSpec
from iqforge.runtime.model import Model
from iqforge.runtime.network.experts import experts_of
from iqforge.runtime.simd import tiles
from iqforge.runtime.weights.matrix import FEW_ROWS
from iqforge.runtime.weights.rounded import Rounded, RoundedRows

N = 40
needs_tiles = pytest.mark.skipif(not tiles.available(), reason="needs AVX-512 with VNNI")


@pytest.fixture
def threads():
    """Put back the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@contextmanager
def experts(precision: str) -> Iterator[MoE]:
    """The first experts of a model with random weights."""
    with Model(SyntheticSource("qwen3moe-tiny:Q8_0"), "cpu", precision=precision) as model:
        yield next(experts_of(model.network.blocks[0]))


def rows_and_choices(moe: MoE, n: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, moe.experts.down.rows, generator=generator)
    return x, *moe.router(x)


@pytest.mark.parametrize(
    ("score", "bias", "grouped"),
    [
        ("softmax", False, False),
        ("sigmoid", True, True),
        ("selected", False, False),
        ("sqrt_softplus", True, False),
        ("sparse_mixer", False, False),
    ],
)
def test_choices_are_those_of_torch(score, bias, grouped):
    groups = {"groups": 4, "groups_used": 2} if grouped else {}
    spec = RouterSpec(16, 3, score, norm=score != "selected", scale=1.5, **groups)
    logits = torch.randn(N, 16) * 3
    logits[5] = 1  # the lowest of equal ones wins
    router = Router(None, spec, torch.rand(16) / 8 if bias else None)
    expected = router.choose(logits)
    with many_rows.compiled_rows():
        assert expert_rows.choose(logits, spec, router.bias) is not None
        found = router.choose(logits)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("owned", [None, (2, 6), (7, 8)])
@pytest.mark.parametrize("reduction", [None, (1, 0.9)])
def test_sums_of_experts_are_the_same_bits(owned, reduction, monkeypatch):
    """Also where slots belong to experts elsewhere, or are left out."""
    monkeypatch.setattr(many_rows, "gate_silu", lambda gate, up: None)
    with experts("f32") as moe:
        moe.router.reduction = reduction
        x, chosen, weights = rows_and_choices(moe)
        if owned is not None:
            moe.owned = owned
            chosen[3] = 0  # a row with no expert here
            for linear in moe.experts.linears:
                linear.matrices = linear.matrices[slice(*owned)]
        expected = moe.mix(x, chosen, weights)
        with many_rows.compiled_rows():
            assert expert_rows.mix(moe, x, chosen, weights) is not None
            found = moe.mix(x, chosen, weights)
    assert expected.any() and torch.equal(found, expected)
    assert owned is None or not found[3].any()


@pytest.mark.parametrize("gated", [False, True])
def test_an_expert_that_works_on_every_row(gated):
    with experts("f32") as moe:
        moe.shared = lambda x: x.flip(1)  # pyright: ignore[reportAttributeAccessIssue]  a stub
        moe.shared_gate = (lambda x: 2 * x[:, :1]) if gated else None  # pyright: ignore[reportAttributeAccessIssue]
        x, chosen, weights = rows_and_choices(moe)
        expected = moe(x)
        assert not torch.allclose(expected, moe.mix(x, chosen, weights))
        with many_rows.compiled_rows():
            torch.testing.assert_close(moe(x), expected, rtol=1e-4, atol=1e-5)


@needs_tiles
@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_rows_that_are_rounded_once_give_the_same_bits(limit, monkeypatch):
    n = 16 * FEW_ROWS
    with experts("int8") as moe, many_rows.compiled_rows():
        moe.experts.spec = FFNSpec(limit=limit)
        x, chosen, weights = rows_and_choices(moe, n)
        found = moe.mix(x, chosen, weights)
        counts, grouped = torch.bincount(chosen.view(-1), minlength=moe.spec.n_experts), []
        assert all(linear.multiplies_rounded(counts.tolist()) for linear in moe.experts.linears)
        monkeypatch.setattr(expert_rows, "_in_8_bits", lambda *_: grouped.append(1))
        assert torch.equal(found, moe.mix(x, chosen, weights)) and grouped


@needs_tiles
def test_few_rows_and_observers_see_experts_one_by_one():
    with experts("int8") as moe:
        down, seen = moe.experts.down, []
        many = [FEW_ROWS + 1] * moe.spec.n_experts
        assert down.multiplies_rounded(many) and down.multiplies_rounded([0, *many[1:]])
        assert not down.multiplies_rounded([FEW_ROWS, *many[1:]])
        down._taps.observers.append(lambda name, x, experts: seen.append((name, len(x))))
        assert not down.multiplies_rounded(many)
        with many_rows.compiled_rows():
            moe(rows_and_choices(moe)[0])
        rows = dict(seen)
        assert all(rows[linear.name] == N * moe.spec.n_used for linear in moe.experts.linears)


@needs_tiles
def test_gates_are_rounded_as_they_are_computed():
    merged = torch.randn(N, 128)
    for gate, up in (merged.chunk(2, dim=-1), (merged[:, :64].contiguous(), merged[:, 64:])):
        found = Rounded.gated(gate, up)
        with many_rows.compiled_rows():
            inner = many_rows.gate_silu(gate.clone(), up.contiguous())
        assert inner is not None
        expected = RoundedRows(inner)
        for name in ("_codes", "_scales", "_starts"):
            assert torch.equal(getattr(found, name)[:N], getattr(expected, name)[:N])
        assert not found._scales[N:].any() and not found._starts[N:].any()


@needs_tiles
@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_changes_nothing():
    found = []
    with experts("int8") as moe, many_rows.compiled_rows():
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(moe(rows_and_choices(moe, 100)[0]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
