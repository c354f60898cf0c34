"""Files of every preset: their tensors have the types and bytes of the reference's plans, and hold
numbers.
"""

from __future__ import annotations

import json

import iqforge
import numpy as np
import pytest
from iqforge.formats.codecs.codec import decode, encode_float
from iqforge.formats.ftypes import FILE_TYPES, file_type
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.types import ggml_type
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.quantize.plan.mainline import MAINLINE
from iqforge.quantize.plan.recipe import Recipe

from .planned_models import expected, model, model_of
from .shared import shared


def written(path, tensors, metadata) -> Imatrix:
    """Write a model with these tensors, of random values, and importances for its matrices."""
    generator, entries = np.random.default_rng(0), {}
    with GGUFWriter(path, metadata, tensors) as sink:
        for tensor in tensors:
            sink.write(
                tensor,
                encode_float(
                    "F32",
                    generator.standard_normal((tensor.n_rows, tensor.n_cols)).astype(np.float32),
                ),
            )
            entries[tensor.name] = Entry(
                generator.lognormal(size=(tensor.n_matrices, tensor.n_cols)),
                np.ones(tensor.n_matrices, dtype=int),
            )
    return Imatrix(entries, 1, 512)


def outputs_of(folder, src, recipes: list[Recipe], imatrix: Imatrix) -> list:
    paths = [folder / f"{number}.gguf" for number in range(len(recipes))]
    iqforge.quantize_models(src, list(zip(paths, recipes)), imatrix, provenance=False)
    return paths


def some_of_every_type(plans: dict[str, list]) -> list[str]:
    """Return names of plans in which every type of all plans is."""
    found, names = set(), []
    for name, kinds in sorted(plans.items(), key=lambda item: -len(set(item[1]))):
        if not found.issuperset(kinds):
            found.update(kinds)
            names.append(name)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_files_are_the_reference_s_plans(tmp_path, every):
    """The plans of all presets are compared with the reference's, also without files, in
    test_quantize_mixes.py.
    """
    golden = json.loads(shared("golden/tools/plan/rows.json").read_text())
    tensors, metadata = model_of(golden["meta"])
    imatrix = written(tmp_path / "m.gguf", tensors, metadata)
    names = [name for name in golden["plan"] if "+" not in name]
    given = [golden["plan"][f"{name}+imatrix"] for name in names]
    wanted = [golden["plan"][name] if plan == "same" else plan for name, plan in zip(names, given)]
    plans = {
        name: [
            t.type if kind == "kept" else ggml_type(kind)
            for t, kind in zip(tensors, expected(tensors, plan))
        ]
        for name, plan in zip(names, wanted)
        if "error" not in plan
    }
    assert len(plans) == 83
    chosen = list(plans) if every else some_of_every_type(plans)
    recipes = [Recipe(name) for name in chosen]
    for name, path in zip(chosen, outputs_of(tmp_path, tmp_path / "m.gguf", recipes, imatrix)):
        kinds = plans[name]
        with open_gguf(path) as result:
            assert [(t.name, t.type) for t in result.tensors] == [
                (t.name, kind) for t, kind in zip(tensors, kinds)
            ], name
            assert sum(t.n_bytes for t in result.tensors) == sum(
                kind.tensor_bytes(t.shape) for t, kind in zip(tensors, kinds)
            ), name
            assert result.metadata["general.file_type"].data == file_type(name).number


@pytest.mark.slow
@pytest.mark.parametrize(  # the test above makes files of "ik" with every type
    "rules", [pytest.param("ik", marks=pytest.mark.full), "mainline"]
)
def test_files_of_every_preset_hold_numbers(tmp_path, rules):
    tensors, metadata = model(1, kv_heads=2)
    imatrix = written(tmp_path / "m.gguf", tensors, metadata)
    recipes = [
        Recipe(name, rules=rules)
        for name in FILE_TYPES
        if rules == "ik" or name in MAINLINE.presets
    ]
    for recipe, path in zip(recipes, outputs_of(tmp_path, tmp_path / "m.gguf", recipes, imatrix)):
        with open_gguf(path) as result, open_gguf(tmp_path / "m.gguf") as source:
            assert [t.type for t in result.tensors] == [
                plan.target.type for plan in recipe.plan(tensors, metadata, imatrix=True)
            ], recipe.type
            for before, after in zip(source.tensors, result.tensors):
                x = np.array(source.read_rows(before, 0, before.n_rows)).view(np.float32)
                y = decode(
                    after.type,
                    result.read_rows(after, 0, after.n_rows),
                    after.n_cols,
                    as_weights=True,
                )
                assert np.isfinite(y).all() and np.square(x - y).mean() < np.square(x).mean(), (
                    recipe.type,
                    after,
                )
