"""Importance matrices and second moments from the inputs of the fast path."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.prompt import grouped as prompt_grouped
from iqforge.imatrix.collecting import collect
from iqforge.imatrix.collector import rows_of_experts
from iqforge.imatrix.moments.collector import collect_moments, survey_inputs
from iqforge.imatrix.moments.file import load_moments_snapshot, save_moments_snapshot
from iqforge.imatrix.moments.layers import LayerMoments
from iqforge.imatrix.moments.options import HessianOptions
from iqforge.imatrix.texts import Text
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.engine import Engine
from iqforge.runtime.model import Model
from iqforge.runtime.tokenizer import SpecialTokens
from iqforge.runtime.weights.taps import GroupedRows

from . import prompt_on_cpu
from .loud_source import LoudSource
from .step_graphs_on_cpu import CPU

SPECS = ["llama-tiny:Q8_0", "qwen3moe-tiny:Q8_0", "qwen35-tiny:Q8_0"]
FULL_CASE = pytest.param(SPECS[2], "each", marks=pytest.mark.full)
TEXTS = [Text([1 + i * 37 % 200 for i in range(n)], str(n)) for n in (64, 48)]
OPTIONS = {"n_ctx": 16, "batch_tokens": 32, "compute_perplexity": False}


@pytest.fixture
def opened(monkeypatch):
    """Return opened(spec): a model whose fast path, in float16, runs as plain torch."""
    prompt_on_cpu.install(monkeypatch)
    models = []

    def make(spec: str) -> Model:
        model = Model(SyntheticSource(spec), CPU)
        models.append(model)
        model.special_tokens = SpecialTokens()
        context = Context(CPU, torch.float16, taps=model.weights.taps)
        model.__dict__["engine"] = Engine(model.network, context)
        return model

    yield make
    for model in models:
        model.close()


def reference(model: Model):
    """Return the model without its fast path."""
    model.__dict__["engine"] = None
    return model


@pytest.mark.parametrize("spec", SPECS)
def test_sums_are_those_of_the_reference_path(opened, spec):
    fast = collect(opened(spec), TEXTS, **OPTIONS)
    slow = collect(reference(opened(spec)), TEXTS, **OPTIONS)
    assert fast.entries.keys() == slow.entries.keys()
    for name, entry in slow.entries.items():
        found = fast.entries[name]
        assert found.counts.sum() == entry.counts.sum()
        if len(entry.counts) == 1:
            np.testing.assert_allclose(found.sums, entry.sums, rtol=0.03, err_msg=name)
        else:  # a token may choose other experts
            assert np.abs(found.counts - entry.counts).sum() <= 0.05 * entry.counts.sum()
            total = entry.sums.sum(0)
            np.testing.assert_allclose(found.sums.sum(0), total, rtol=0.1, err_msg=name)


def test_nothing_runs_on_the_reference_path(opened, monkeypatch):
    model = opened("llama-tiny:Q8_0")
    monkeypatch.setattr(model._reference, "hidden", lambda *args: pytest.fail("reference path"))
    assert collect(model, TEXTS, **OPTIONS).entries


def test_a_resumed_run_gives_the_same_bits(opened):
    spec, taken = "qwen3moe-tiny:Q8_0", []
    whole = collect(opened(spec), TEXTS, **OPTIONS, on_pass=lambda done, take: taken.append(take()))
    again = collect(opened(spec), TEXTS, **OPTIONS, start=taken[0])
    for name, entry in whole.entries.items():
        assert np.array_equal(entry.sums, again.entries[name].sums)
        assert np.array_equal(entry.counts, again.entries[name].counts)


def test_texts_count_by_their_weights(opened):
    once = collect(opened(SPECS[0]), TEXTS[:1], **OPTIONS)
    thrice = collect(opened(SPECS[0]), [Text(TEXTS[0].content, "", 3.0)], **OPTIONS)
    for name, entry in once.entries.items():
        np.testing.assert_allclose(thrice.entries[name].sums, 3 * entry.sums, rtol=1e-6)
        assert (thrice.entries[name].counts == 3 * entry.counts).all()


@pytest.mark.parametrize(
    ("spec", "experts"),
    [*((spec, "each") for spec in SPECS[:2]), (SPECS[1], "layer"), FULL_CASE],
)
def test_second_moments_are_those_of_the_reference_path(opened, spec, experts):
    options = HessianOptions(n_ctx=16, batch_tokens=32, experts=experts)
    found = []
    for model in (opened(spec), reference(opened(spec))):
        total = collect_moments(model, TEXTS, options, survey_inputs(model, options))
        found.append(total)
    fast, slow = found
    assert fast.inputs == slow.inputs and fast.sums.keys() == slow.sums.keys()
    for key, sums in slow.sums.items():
        assert fast.counts[key].sum() == slow.counts[key].sum()
        mine, theirs = fast.sums[key].sum(0), sums.sum(0)
        assert (mine - theirs).norm() <= 0.05 * theirs.norm(), key


def test_rows_of_experts():
    groups = GroupedRows(torch.tensor([2, 2, 5]), torch.tensor([0, 3, 1, 2, 5, -1]), 2)
    expected = [[1, 1, 0], [0, 0, 0], [1, 1, 1]]  # rows 0, 1; none; 0, 1, 2
    assert rows_of_experts(groups, 3).tolist() == expected
    grouped = GroupedRows(torch.tensor([1, 3]))
    assert rows_of_experts(grouped, 4).tolist() == [[1, 0, 0, 0], [0, 1, 1, 0]]


@pytest.mark.parametrize("cols", [96, 128, 768])
def test_places_undo_the_order_of_grouped_products(cols):
    places = prompt_grouped.places(cols, CPU)
    for column, place in enumerate(places.tolist()):
        group, p = divmod(place, 128)
        s = p % 16
        assert column == 128 * group + s % 8 // 2 * 32 + p // 16 * 4 + s % 2 + s // 8 * 2


def test_ranks_with_the_whole_model_add_up_the_same(opened):
    """What a rank hands over after each pass, weighted by who adds it, is what one process adds."""
    texts = [Text(TEXTS[0].content, "", 2.5)]
    alone = collect(opened(SPECS[1]), texts, **OPTIONS)
    model = opened(SPECS[1])
    model.peers = SimpleNamespace(rank=0, size=1, exchange=lambda own: [own])
    shared = collect(model, texts, **OPTIONS)
    assert shared.entries.keys() == alone.entries.keys()
    for name, entry in alone.entries.items():
        assert np.array_equal(shared.entries[name].sums, entry.sums), name
        assert np.array_equal(shared.entries[name].counts, entry.counts)


@pytest.fixture
def in_half(monkeypatch):
    """Return in_half(source): a model in float16 whose fast path runs as plain torch."""
    prompt_on_cpu.install(monkeypatch)
    monkeypatch.setattr(Model, "is_fast", property(lambda self: self.precision != "f32"))
    models = []

    def make(source: SyntheticSource) -> Model:
        models.append(model := Model(source, CPU))
        model.special_tokens, model.precision = SpecialTokens(), "f16"
        return model

    yield make
    for model in models:
        model.close()


def test_importances_start_again_in_bfloat16(in_half, caplog):
    model, taken = in_half(LoudSource("llama-tiny:BF16")), []
    made = collect(model, TEXTS, **OPTIONS, on_pass=lambda done, take: taken.append(take()))
    assert model.precision == "bf16" and "range of float16" in caplog.text
    assert made.chunk_count == 7
    expected = collect(reference(in_half(LoudSource("llama-tiny:BF16"))), TEXTS, **OPTIONS)
    for name, entry in expected.entries.items():
        assert made.entries[name].counts.sum() == entry.counts.sum()
        np.testing.assert_allclose(made.entries[name].sums, entry.sums, rtol=0.1, err_msg=name)
    again = in_half(LoudSource("llama-tiny:BF16"))
    resumed = collect(again, TEXTS, **OPTIONS, start=taken[0])
    assert again.precision == "bf16"
    for name, entry in made.entries.items():
        assert np.array_equal(entry.sums, resumed.entries[name].sums)


def test_second_moments_start_again_in_bfloat16(in_half, tmp_path):
    """Layers before the one that exceeds the range keep what was collected."""
    options, source = HessianOptions(n_ctx=16, batch_tokens=32), "llama-tiny:BF16"
    model = in_half(LoudSource(source))
    whole = collect_moments(model, TEXTS[:1], options, survey_inputs(model, options))
    assert whole.widened and not whole.dropped and model.precision == "bf16"
    save_moments_snapshot(whole, tmp_path / "a.resume", {"run": {}})
    assert load_moments_snapshot(tmp_path / "a.resume", {}, whole).widened
    found = []
    for wanted in ({0, 1}, {1}):
        layers = LayerMoments(
            model := in_half(LoudSource(source)), TEXTS[:1], options, str(tmp_path)
        )
        layers.wanted |= wanted
        layers.needed.update(wanted)
        found.append({number: layers.layer(number) for number in sorted(wanted)})
        assert model.precision == "bf16"
        layers.close()
    quiet = LayerMoments(in_half(SyntheticSource(source)), TEXTS[:1], options, str(tmp_path))
    quiet.wanted.add(0)
    quiet.needed[0] = 1
    first = quiet.layer(0)
    for name in first.inputs:
        assert np.array_equal(found[0][0].matrix(name, "fit", 0), first.matrix(name, "fit", 0))
    quiet.close()
    for name in found[0][1].inputs:
        mine, theirs = (one[1].matrix(name, "fit", 0) for one in found)
        assert np.isfinite(mine).all() and np.array_equal(mine, theirs)


@pytest.mark.parametrize("spec", SPECS)
def test_layers_in_turn_give_what_passes_give(opened, spec, tmp_path):
    """On the fast path, too, and whichever layers are collected."""
    options = HessianOptions(n_ctx=16, batch_tokens=32)
    model = opened(spec)
    whole = collect_moments(model, TEXTS, options, survey_inputs(model, options))
    for wanted in ({0, 1}, {1}):
        layers = LayerMoments(model, TEXTS, options, str(tmp_path))
        layers.wanted |= wanted
        layers.needed.update(wanted)
        for number in sorted(wanted):
            made = layers.layer(number)
            for name, one in made.inputs.items():
                assert f".{number}." in name
                for fold in ("fit", "hold"):
                    counts = whole.counts[name, fold].numpy()
                    assert np.array_equal(made.counts(name, fold), counts)
                    for index in range(one.n_matrices):
                        mine = made.matrix(name, fold, index) * max(counts[index], 1)
                        theirs = whole.sums[name, fold][index].numpy()
                        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
        layers.close()
