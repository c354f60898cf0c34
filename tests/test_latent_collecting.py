"""Statistics of latent attention from the inputs of the fast path, against the reference path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.imatrix.collecting import collect
from iqforge.imatrix.moments.collector import collect_moments, survey_inputs
from iqforge.imatrix.moments.layers import LayerMoments
from iqforge.imatrix.moments.options import HessianOptions
from iqforge.imatrix.texts import Text
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.engine import Engine
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.tokenizer import SpecialTokens

from . import prompt_on_cpu
from .step_graphs_on_cpu import CPU
from .tiny_cases import CASES, WIDE
from .tiny_model import write_gguf
from .tiny_models import HALF, make_tiny_model

N_CTX = 32
CACHE = CacheSettings("f32", "f32")
LIMIT = 2e-3  # how far sums may differ
OPTIONS = {"n_ctx": N_CTX, "batch_tokens": 2 * N_CTX, "compute_perplexity": False}
TEXTS = [Text([1 + i * 37 % 200 for i in range(n)], str(n)) for n in (128, 96)]
# Queries from latent vectors and without, experts, an indexer; then the layouts of the matrices.
MODELS = {
    "deepseek_v2_lite": ("deepseek_v2_lite", "mainline", ()),
    "deepseek_v3": ("deepseek_v3", "mainline", ()),
    "glm_moe_dsa": ("glm_moe_dsa", "mainline", ()),
    "all": ("deepseek_v3", "ik", ()),
    "joined": ("deepseek_v3", "ik", ("k", "v")),
}


QUICK = ("glm_moe_dsa", "all")


@pytest.fixture(
    scope="module",
    params=[
        name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in MODELS
    ],
)
def file(request, tmp_path_factory):
    """The file of a random model, made before anything is replaced."""
    folder = tmp_path_factory.mktemp("latent")
    name, layout, without = MODELS[request.param]
    tiny = make_tiny_model(CASES[name], WIDE, folder / "hf", HALF)
    drop = tuple(f"blk.{i}.attn_{x}_b.weight" for i in range(8) for x in without)
    with CheckpointSource(open_checkpoint(tiny.folder), mla_layout=layout) as source:
        return write_gguf(folder / "f32.gguf", source, drop=drop)


@pytest.fixture
def opened(monkeypatch, file):
    """Return opened(fast): the model. Its fast path is plain torch in float32, with attention in
    float16. Caches are in float32: rounded keys of an indexer would change which positions it
    chooses.
    """
    prompt_on_cpu.install(monkeypatch)
    models = []

    def make(fast: bool) -> Model:
        models.append(model := load_model(file, cache=CACHE))
        model.special_tokens = SpecialTokens()
        context = Context(CPU, torch.float32, settings=CACHE, taps=model.weights.taps)
        model.__dict__["engine"] = Engine(model.network, context) if fast else None
        assert not any(kind == "MLA" for kind, *_ in context.slow)
        return model

    yield make
    for model in models:
        model.close()


def test_sums_are_those_of_the_reference_path(opened, monkeypatch):
    slow, model = collect(opened(False), TEXTS, **OPTIONS), opened(True)
    monkeypatch.setattr(model._reference, "hidden", lambda *args: pytest.fail("reference path"))
    fast = collect(model, TEXTS, **OPTIONS)
    assert fast.entries.keys() == slow.entries.keys()
    assert any("_b.weight" in name for name in slow.entries)
    for name, entry in slow.entries.items():
        found = fast.entries[name]
        assert found.sums.shape == entry.sums.shape and found.counts.sum() == entry.counts.sum()
        if "exps" in name:  # a token may choose other experts
            assert np.abs(found.counts - entry.counts).sum() <= LIMIT * entry.counts.sum()
            total, whole = found.sums.sum(0), entry.sums.sum(0)
        else:
            assert np.array_equal(found.counts, entry.counts)
            total, whole = found.sums, entry.sums
        assert np.linalg.norm(total - whole) <= LIMIT * np.linalg.norm(whole), name


def test_second_moments_are_those_of_the_reference_path(opened):
    options, found = HessianOptions(n_ctx=N_CTX, batch_tokens=2 * N_CTX), []
    for is_fast in (True, False):
        model = opened(is_fast)
        found.append(collect_moments(model, TEXTS, options, survey_inputs(model, options)))
    fast, slow = found
    assert fast.inputs == slow.inputs and fast.sums.keys() == slow.sums.keys()
    for key, sums in slow.sums.items():
        assert fast.counts[key].sum() == slow.counts[key].sum()
        mine, theirs = fast.sums[key].sum(0), sums.sum(0)
        assert (mine - theirs).norm() <= LIMIT * theirs.norm(), key


def test_layers_in_turn_give_what_passes_give(opened, tmp_path):
    """Whichever layers are collected: the others run in the same form."""
    options = HessianOptions(n_ctx=N_CTX, batch_tokens=2 * N_CTX)
    model = opened(True)
    whole = collect_moments(model, TEXTS, options, survey_inputs(model, options))
    layers = LayerMoments(model, TEXTS, options, str(tmp_path))
    layers.wanted.add(1)
    layers.needed[1] = 1
    made = layers.layer(1)
    assert any("attn_" in name for name in made.inputs)
    for name, one in made.inputs.items():
        counts = whole.counts[name, "fit"].numpy()
        for index in range(one.n_matrices):
            mine = made.matrix(name, "fit", index) * max(counts[index], 1)
            theirs = whole.sums[name, "fit"][index].numpy()
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    layers.close()
