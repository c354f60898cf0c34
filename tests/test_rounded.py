"""Products of many rows in 8 bits on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from iqforge.errors import NonFiniteError
from iqforge.formats.codecs import codec
from iqforge.formats.types import ggml_type
from iqforge.runtime.bench.random_blocks import random_rows
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.model import Model
from iqforge.runtime.network.experts import experts_of
from iqforge.runtime.simd import tiles
from iqforge.runtime.weights import store
from iqforge.runtime.weights.encoded import DEFAULT_CACHE_BYTES
from iqforge.runtime.weights.kept import Multiplication, kept_rows, products_of_each
from iqforge.runtime.weights.matrix import FEW_ROWS, FEW_ROWS_ONCE
from iqforge.runtime.weights.rounded import RoundedRows, can_be_rounded, packed
from iqforge.runtime.weights.switches import Switches

pytestmark = pytest.mark.skipif(not tiles.available(), reason="needs AVX-512 with VNNI")

ROWS, COLUMNS = 96, 256


def packed_and_rounded(type: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random matrix of a type packed, and what it is in 8 bits."""
    stored = random_rows(type, ROWS, COLUMNS, 0.1, np.random.default_rng(seed))
    weights = codec.decode(ggml_type(type), stored, COLUMNS, as_weights=True)
    return packed(kept_rows(ggml_type(type), stored, COLUMNS)), in_8_bits(weights)


def in_8_bits(values) -> torch.Tensor:
    """Each 32 of a row as codes of 8 bits with a scale."""
    groups = torch.as_tensor(values).unflatten(1, (-1, 32))
    largest = groups.abs().amax(2, keepdim=True)
    codes = (groups * (127 / largest.clamp_min(1e-30))).round()
    return (codes * (largest / 127)).flatten(1).double()


def activations(n: int) -> torch.Tensor:
    x = torch.randn(n, COLUMNS) * torch.logspace(-3, 3, n)[:, None]
    x[0] = 0
    return x


@pytest.mark.parametrize("type", ["Q8_0", "IQ4_K"])
@pytest.mark.parametrize("n", [5, 24, 31])
def test_products_are_those_of_rounded_factors(type, n):
    memory, weights = packed_and_rounded(type, n)
    x = activations(n)
    y, proof = RoundedRows(x).products([(memory, 0, n)], ROWS)
    expected = in_8_bits(x) @ weights.T
    assert y.shape == (n, ROWS) and not proof.any()
    close = (y - expected).norm(dim=1) / (1e-30 + expected.norm(dim=1))
    assert close.max() < 2e-3  # a value between two codes may be rounded to the other one


@pytest.fixture
def threads():
    """Put back the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_changes_nothing():
    memory, _ = packed_and_rounded("Q8_0", 0)
    x, found = activations(29), []
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        found.append(RoundedRows(x).products([(memory, 0, 29)], ROWS)[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_groups_of_rows_have_their_own_matrices():
    matrices = [packed_and_rounded("Q8_0", seed)[0] for seed in range(3)]
    counts, x, start = [7, 1, 20], activations(28), 0
    groups = []
    for memory, n in zip(matrices, counts, strict=True):
        groups.append((memory, start, n))
        start += n
    together, _ = RoundedRows(x).products(groups, ROWS)
    for memory, first, n in groups:
        alone, _ = RoundedRows(x[first : first + n]).products([(memory, 0, n)], ROWS)
        assert torch.equal(together[first : first + n], alone)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_the_proof(value):
    memory, _ = packed_and_rounded("Q8_0", 0)
    x = activations(9)
    x[4, 77] = value
    y, proof = RoundedRows(x).products([(memory, 0, 9)], ROWS)
    assert not proof.sum().isfinite()
    assert not y[4].isfinite().any() and y[3].isfinite().all() and y[5].isfinite().all()


def test_rows_after_the_last_one_are_multiplied_with_zeros(monkeypatch):
    """Whatever memory had before: products with subnormal numbers take long."""
    empty = torch.empty

    def used(*size, **options):
        return empty(*size, **options).fill_(1)

    memory, _ = packed_and_rounded("Q8_0", 0)
    x = activations(7)
    expected, _ = RoundedRows(x).products([(memory, 0, 7)], ROWS)
    monkeypatch.setattr(torch, "empty", used)
    rows = RoundedRows(x)
    assert not rows._scales[7:].any() and not rows._starts[7:].any()
    assert len(rows._scales) == len(rows._codes) == 7 + tiles.TILE
    assert torch.equal(rows.products([(memory, 0, 7)], ROWS)[0], expected)


def test_rows_that_change_are_rounded_again():
    x = activations(6)
    rows = RoundedRows(x)
    assert rows.are_of(x) and not rows.are_of(x.clone())
    x += 1
    assert not rows.are_of(x)


def test_float_types_and_odd_sizes_stay_in_float32():
    assert can_be_rounded(ggml_type("IQ4_K"), 64, 256)
    assert not can_be_rounded(ggml_type("BF16"), 64, 256)
    assert not can_be_rounded(ggml_type("Q8_0"), 40, 256)


@pytest.mark.parametrize("spec", ["llama-tiny:Q8_0", "qwen3moe-tiny:Q8_0"])
def test_a_model_in_8_bits_is_close_to_float32(spec):
    tokens = torch.arange(48) % 500
    found = {}
    for precision in ("f32", "int8"):
        with Model(SyntheticSource(spec), "cpu", precision=precision) as model:
            found[precision] = model.forward(tokens).log_softmax(-1)
    exact, rounded = found["f32"], found["int8"]
    divergence = (exact.exp() * (exact - rounded)).sum(-1)
    assert 0 < divergence.mean() < 0.01


def test_a_product_that_is_not_finite_is_named():
    with Model(SyntheticSource("llama-tiny:Q8_0"), "cpu", precision="int8") as model:
        model.network.blocks[1].branches[0].norm.weight[3] = float("inf")
        with pytest.raises(NonFiniteError, match=r"blk\.1\.attn_[qkv]\.weight"):
            model.forward(torch.arange(20))


@pytest.mark.parametrize("type", ["Q8_0", "IQ4_K_R4"])
def test_embeddings_are_those_of_the_reference_path(type):
    """Bit for bit, from the rows that steps keep."""
    tokens, found = torch.tensor([3, 1, 3, 400]), []
    for precision in ("f32", "int8"):
        with Model(SyntheticSource(f"llama-tiny:{type}"), "cpu", precision=precision) as model:
            found.append(model.network.embedding(tokens))
    assert torch.equal(*found)


@pytest.mark.parametrize("merged", [False, True])
def test_experts_with_few_rows_are_multiplied_as_they_are_stored(merged, monkeypatch):
    """More rows are few where experts in 8 bits do not stay in memory, whatever the size of the
    cache.
    """
    counts, found = [0, 3, 40, 16, 17, 1, 70, 5], {}
    is_few = torch.tensor(counts).repeat_interleave(torch.tensor(counts)) <= FEW_ROWS_ONCE
    is_fewest = torch.tensor(counts).repeat_interleave(torch.tensor(counts)) <= FEW_ROWS
    x = torch.randn(sum(counts), 256, generator=torch.Generator().manual_seed(0))
    large = DEFAULT_CACHE_BYTES
    for stays, size in ((2**20, large), (2**20, 2**20), (large, large), (large, 2**20)):
        monkeypatch.setattr(store, "DEFAULT_CACHE_BYTES", stays)
        options = {"switches": Switches(merge_gate_up=merged), "cache_bytes": size}
        source = SyntheticSource("qwen3moe-tiny:IQ4_K")
        with Model(source, "cpu", precision="int8", **options) as model:
            experts = next(experts_of(model.network.blocks[0])).experts
            linear = experts.gate_up if merged else experts.up
            assert linear is not None
            found[stays, size] = linear(x, torch.tensor(counts))
            each = [m.few(part) for m, part in zip(linear.matrices, x.split(counts), strict=True)]
            alone = torch.cat([y for y in each if y is not None])
            exact = torch.cat(
                [
                    part @ torch.cat([w for _, w in m.parts()]).T
                    for m, part in zip(linear.matrices, x.split(counts), strict=True)
                ]
            )
    dropped, kept = found[2**20, large], found[large, large]
    assert torch.equal(dropped, found[2**20, 2**20])
    assert torch.equal(kept, found[large, 2**20])
    assert torch.equal(dropped[is_few], alone[is_few])
    assert torch.equal(kept[is_fewest], alone[is_fewest])
    assert torch.equal(dropped[~is_few], kept[~is_few])
    assert not torch.equal(dropped[is_few], kept[is_few])
    for y in (dropped, kept):
        assert (y - exact).norm() < 0.02 * exact.norm()


def test_rows_that_memory_cannot_keep_stay_in_8_bits(monkeypatch):
    """Though experts in 8 bits do not stay in memory either."""
    counts = torch.tensor([0, 0, FEW_ROWS + 1, FEW_ROWS_ONCE, 0, FEW_ROWS_ONCE + 1, 0, 0])
    x = torch.randn(int(counts.sum()), 256, generator=torch.Generator().manual_seed(0))
    found = []
    for stays, share in ((DEFAULT_CACHE_BYTES, store.KEPT_SHARE), (2**20, 0.0)):
        monkeypatch.setattr(store, "DEFAULT_CACHE_BYTES", stays)
        monkeypatch.setattr(store, "KEPT_SHARE", share)
        source = SyntheticSource("qwen3moe-tiny:IQ4_K")
        with Model(source, "cpu", precision="int8") as model:
            experts = next(experts_of(model.network.blocks[0])).experts
            assert experts.up is not None
            found.append(experts.up(x, counts))
    assert torch.equal(*found)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rounds", [False, True])
def test_products_with_chosen_matrices_are_those_of_each(rounds):
    type, n = ggml_type("IQ4_K"), 150  # more than are in one operation
    stored = random_rows(type, 5 * ROWS, COLUMNS, 0.1, np.random.default_rng(0))
    whole, x = kept_rows(type, stored, COLUMNS), activations(n)
    numbers = [i * i % 5 for i in range(n)]
    matrices = [Multiplication(whole, i * ROWS, (i + 1) * ROWS, rounds=rounds) for i in range(5)]
    expected = torch.cat([matrices[e](x[i, None]) for i, e in enumerate(numbers)])
    for n_threads in (1, 2, 3):
        torch.set_num_threads(n_threads)
        assert torch.equal(products_of_each(whole, ROWS, numbers, x, rounds=rounds), expected)
