"""Which types are rounded on trial to choose types for a size, and what is compiled for that."""

from __future__ import annotations

import functools

import iqforge
import numpy as np
import pytest
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.kernel import rehearse
from iqforge.formats.types import ggml_type
from iqforge.imatrix.moments.lookup import imatrix_of, moments_of
from iqforge.quantize.report.stats import StatsReport, collect_stats
from iqforge.quantize.rounding import methods
from iqforge.quantize.rounding.factor import factored
from iqforge.quantize.rounding.layouts.codes import code_layout
from iqforge.quantize.rounding.layouts.vectors import vector_layout
from iqforge.quantize.rounding.layouts.words import word_layout
from iqforge.quantize.rounding.methods import rounder_of
from iqforge.quantize.rounding.proxy import RoundedErrors
from iqforge.quantize.run.compilation import tasks_of_rounding
from iqforge.quantize.run.compile_task import is_decoder

from .imatrices import N_CTX, tiny_llama_file
from .tiny_checkpoint import PROSE


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("types")
    path = tiny_llama_file(folder)
    return path, iqforge.collect_hessian(path, PROSE * 40, folder / "h.safetensors", n_ctx=N_CTX)


def test_only_types_that_may_be_chosen_are_tried(llama, monkeypatch):
    """The choice is that of all errors, and every matrix is factored once each time."""
    path, made = llama
    factored_of = []

    def counted(*given):
        factored_of.append(given[2])
        return factored(*given)

    monkeypatch.setattr(methods, "factored", counted)
    names = ["Q4_0", "IQ4_NL", "Q5_0", "Q6_0", "Q8_0"]
    with open_gguf(path) as source:
        report = StatsReport(path, names, 32)
        tensors = [source.tensor(f"blk.0.{n}.weight") for n in ("ffn_down", "attn_q")]
        types, imatrix = [ggml_type(name) for name in names], imatrix_of(made)
        collect_stats(source, tensors, types, report, importance=imatrix.importance)
        given = source, report.tensors, functools.partial(moments_of, made), imatrix.importance

        def cheapest(stats):
            def cost(one):
                return one.weighted_rmse**2 + 1e-3 * one.bits_per_weight

            return [min(own.errors.values(), key=cost).type for own in stats]

        announced = []
        whole, few = (
            RoundedErrors(*given),
            RoundedErrors(*given, announce=lambda *said: announced.append(said)),
        )
        exact = whole.all()
        assert len(factored_of) == len(set(factored_of)) == len(tensors)
        found = few.for_choice(cheapest)
        assert cheapest(found) == cheapest(exact)
        assert 0 < few.tried <= whole.tried / 2 and announced
        for type, own, all_of in zip(cheapest(found), found, exact, strict=True):
            assert own.errors[type.name] == all_of.errors[type.name]
        tried = few.tried
        few.for_choice(cheapest)
        assert few.tried == tried
        again = RoundedErrors(*given, threads=3).for_choice(cheapest)
        assert again == found


@pytest.mark.parametrize(
    "name", ["Q4_0", "IQ4_K", "IQ2_XXS", pytest.param("IQ2_KT", marks=pytest.mark.full)]
)
def test_code_of_rounding_is_found_without_running_it(name):
    """What is kept of a type on the way, such as where its codes are, is not spoiled by that."""
    type = ggml_type(name)
    [task] = [one for one in tasks_of_rounding([type]) if one.kind == "round"]
    for cached in (code_layout, vector_layout, word_layout):
        cached.cache_clear()
    missing = task.missing()
    found = rehearse(task.work, is_decoder)
    assert set(missing) <= set(found) and not any(is_decoder(code.loop) for code in found)
    n = 512
    x = np.random.default_rng(3).standard_normal((2, n)).astype(np.float32)
    factor = factored(np.eye(n) + 0.5, 0.25)
    *_, after = rounder_of(type, n, factor, 1).stages(x)
    for cached in (code_layout, vector_layout, word_layout):
        cached.cache_clear()
    *_, run = rounder_of(type, n, factor, 1).stages(x)
    np.testing.assert_array_equal(after, run)
    assert task.missing() == []
