"""Types for a given size: the plan, the command, and measured sensitivities."""

from __future__ import annotations

import json
import os

import iqforge
import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import MalformedFileError, NotFoundError, UsageError
from iqforge.formats.ftypes import FILE_TYPES
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.sensitivities import Probe, load_probes, save_probes
from iqforge.formats.types import ggml_type
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.quantize.plan.budget import DEFAULT_TYPES, SHORT_ROW_TYPES, allowed_types
from iqforge.quantize.plan.size_target import parse_size
from iqforge.quantize.searches import encodable_types
from iqforge.runtime.model import load_model

from .imatrices import write_dat
from .tiny_checkpoint import PROSE, make_tiny_llama, make_tiny_qwen3moe
from .tiny_model import write_gguf

TYPES = ["q2_K", "iq4_k", "q8_0"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """llama with four layers and a model with experts, in F32."""
    folder, paths = tmp_path_factory.mktemp("budget"), {}
    make_tiny_llama(folder / "llama", n_layers=4)
    make_tiny_qwen3moe(folder / "moe", tied=True)
    for name in ("llama", "moe"):
        with CheckpointSource(open_checkpoint(folder / name)) as opened:
            paths[name] = write_gguf(folder / f"{name}.gguf", opened)
    return paths | {"folder": folder / "llama"}


def importances(path) -> Imatrix:
    rng = np.random.default_rng(4)
    with open_gguf(path) as source:
        return Imatrix(
            {
                t.name: Entry(
                    rng.lognormal(size=(t.n_matrices, t.n_cols)), np.ones(t.n_matrices, np.int64)
                )
                for t in source.tensors
                if t.name.startswith("blk.") and len(t.shape) > 1
            }
        )


@pytest.mark.slow
@pytest.mark.parametrize("bpw", [3.2, 4.7, 6.0])
@pytest.mark.parametrize("name", ["llama", "moe"])
def test_result_has_the_requested_size(models, tmp_path, name, bpw):
    fitted = iqforge.recipe_for_target(
        models[name], importances(models[name]), bpw=bpw, types=TYPES
    )
    # Three types and few tensors give few sizes.
    assert 0.985 * bpw <= fitted.bits_per_weight <= bpw
    report = iqforge.quantize_model(
        models[name], tmp_path / "out.gguf", fitted.recipe, importances(models[name])
    )
    assert (
        report.target_bytes == fitted.n_bytes and report.bits_per_weight == fitted.bits_per_weight
    )
    with open_gguf(tmp_path / "out.gguf") as source:
        types = {
            tensor.type.name
            for tensor in source.tensors
            if len(tensor.shape) > 1 and "ffn_gate_inp" not in tensor.name
        }
        number = source.metadata["general.file_type"].data
    assert types <= {"Q2_K", "IQ4_K", "Q8_0"} and len(types) > 1
    assert number in {kind.number for kind in FILE_TYPES.values() if kind.base.name in types}


def test_checkpoint_folders_are_quantized_to_a_size_too(models, tmp_path):
    fitted = iqforge.recipe_for_target(
        models["folder"], importances(models["llama"]), bpw=4.2, types=TYPES
    )
    report = iqforge.quantize_model(
        models["folder"], tmp_path / "out.gguf", fitted.recipe, importances(models["llama"])
    )
    assert report.target_bytes == fitted.n_bytes and 0.985 * 4.2 <= report.bits_per_weight <= 4.2


def test_layers_that_are_left_out_do_not_count(models, tmp_path):
    changes = iqforge.Changes(prune_layers=[1, 2])
    fitted = iqforge.recipe_for_target(models["llama"], bpw=4.2, types=TYPES, changes=changes)
    report = iqforge.quantize_model(
        models["llama"], tmp_path / "out.gguf", fitted.recipe, changes=changes
    )
    assert report.target_bytes == fitted.n_bytes and len(fitted.damage) == 2 * 7 + 2
    with pytest.raises(UsageError, match="measured with all layers"):
        iqforge.recipe_for_target(
            models["llama"], bpw=4.2, types=TYPES, changes=changes, damage="d.json"
        )


def test_a_size_is_that_of_the_file(models, tmp_path):
    size = os.path.getsize(models["llama"]) // 8
    for provenance in (True, False):
        fitted = iqforge.recipe_for_target(
            models["llama"], size=size, types=TYPES, provenance=provenance
        )
        iqforge.quantize_model(
            models["llama"], tmp_path / "out.gguf", fitted.recipe, provenance=provenance
        )
        assert 0.99 * size <= os.path.getsize(tmp_path / "out.gguf") <= size


def test_more_bits_where_errors_do_more(models, tmp_path):
    """The measured sensitivity of the same tensors is a thousand times larger in one layer or
    another.
    """
    with open_gguf(models["llama"]) as source:
        names = [t.name for t in source.tensors if len(t.shape) > 1]
    for layer in (0, 3):
        save_probes(
            tmp_path / "d.json",
            [Probe((name,), 0.01, 10.0 if f"blk.{layer}." in name else 0.01) for name in names],
        )
        fitted = iqforge.recipe_for_target(
            models["llama"], bpw=4, types=TYPES, damage=tmp_path / "d.json"
        )
        bits = {
            name: ggml_type(type).bits_per_weight
            for name, type in fitted.recipe.tensor_types.items()
        }
        here, there = (
            [b for name, b in bits.items() if f"blk.{number}." in name]
            for number in (layer, 1 if layer else 2)
        )
        assert min(here) >= max(there) and sum(here) > sum(there)
        assert fitted.sensitivities == "d.json" and fitted.predicted_kld == pytest.approx(
            sum(fitted.damage.values())
        )


def test_types_of_the_user_are_kept_and_count(models):
    given = {
        "custom_q": "attn=iq4_k",
        "token_embedding_type": "q8_0",
        "role_types": {"ffn_down": "q8_0"},
    }
    fitted = iqforge.recipe_for_target(models["llama"], bpw=6, types=TYPES, **given)
    for name, type in fitted.recipe.tensor_types.items():
        assert type == (
            "IQ4_K"
            if "attn" in name
            else "Q8_0"
            if name in ("token_embd.weight",) or "ffn_down" in name
            else type
        )
    assert 0.95 * 6 <= fitted.bits_per_weight <= 6 and not any(
        "attn" in name for name in fitted.damage
    )


@pytest.mark.parametrize("target", [{"bpw": 2}, {"size": 1000}])
def test_an_impossible_target_is_refused_before_anything_is_measured(models, monkeypatch, target):
    def refuse(*_, **__):
        raise AssertionError("errors are measured")

    monkeypatch.setattr("iqforge.quantize.report.stats.collect_stats", refuse)
    with pytest.raises(UsageError, match="smallest possible result has"):
        iqforge.recipe_for_target(models["llama"], types=TYPES, **target)
    with pytest.raises(AssertionError, match="errors are measured"):
        iqforge.recipe_for_target(models["llama"], types=TYPES, bpw=6)


def test_an_impossible_target_names_the_smallest_possible(models, caplog):
    with pytest.raises(
        UsageError,
        match=r"smallest possible result has \d+ bytes of tensors \(2\.\d+ bits per weight",
    ):
        iqforge.recipe_for_target(models["llama"], bpw=2, types=TYPES)
    iqforge.recipe_for_target(models["llama"], bpw=9, types=TYPES)
    assert "come no closer" in caplog.text
    for wrong in (
        {"bpw": 0},
        {"bpw": -1},
        {"bpw": float("nan")},
        {},
        {"bpw": 3, "size": 5},
        {"bpw": 3, "types": ["iq4_k_r4"]},
        {"bpw": 3, "types": ["f16"]},
    ):
        with pytest.raises(UsageError):
            iqforge.recipe_for_target(models["llama"], **wrong)


@pytest.mark.slow
def test_types_that_need_importances_need_them(models):
    types = ["iq2_xxs", *TYPES]
    without = iqforge.recipe_for_target(models["llama"], bpw=3, types=types)
    assert "IQ2_XXS" not in without.recipe.tensor_types.values()
    found = iqforge.recipe_for_target(
        models["llama"], importances(models["llama"]), bpw=2.9, types=types
    ).recipe.tensor_types
    assert (
        "IQ2_XXS" in found.values()
        and found["token_embd.weight"] != "IQ2_XXS" != found["output.weight"]
    )


def test_default_types_are_presets_bases_and_fit_every_row():
    for name in DEFAULT_TYPES:
        assert any(kind.base.name == name for kind in FILE_TYPES.values())
    assert all(ggml_type(name).block_size == 32 for name in SHORT_ROW_TYPES)
    assert len(allowed_types([], encodable_types())) == len({*DEFAULT_TYPES, *SHORT_ROW_TYPES})


@pytest.mark.parametrize(
    "text, size",
    [
        ("12G", 12 * 10**9),
        ("1.5GiB", 3 << 29),
        ("700m", 700 * 10**6),
        ("0.25 ", 0),
        ("123", 123),
        ("2KB", 2000),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "1.G", "-3G", "3X", "1e9"])
def test_texts_that_are_no_sizes(text):
    with pytest.raises(UsageError, match="expected a number"):
        parse_size(text)


def test_command(models, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    words = [
        "--target-types",
        "q2_K,iq4_k",
        "--target-types",
        "q8_0",
        str(models["llama"]),
        str(out),
    ]
    assert (
        main(["quantize", "--target-bpw", "4.5", "--dry-run", "--no-estimate", "--verbose", *words])
        == 0
    )
    printed = capsys.readouterr().out
    assert (
        "types ranked by errors and roles" in printed
        and "predicted KL divergence" not in printed
        and "converting to iq4_k" in printed
        and not out.exists()
    )
    assert main(["quantize", "--target-bpw", "4.5", *words]) == 0
    printed = capsys.readouterr().out
    chosen = float(printed.partition("MiB (")[2].partition(" BPW")[0])
    assert 4.4 < chosen <= 4.5 and f"({chosen:.2f} BPW)" in printed
    first = out.read_bytes()
    assert main(["quantize", "--target-bpw", "4.5", *words, "AUTO", "1"]) == 0
    assert out.read_bytes() == first
    for flags in (["--pure", "--target-bpw", "4.5"], ["--target-types", "q8_0"], []):
        assert main(["quantize", *flags, str(models["llama"]), str(out), "AUTO"]) == 1
    assert main(["quantize", "--target-bpw", "4.5", str(models["llama"]), str(out), "IQ4_K"]) == 1
    assert "AUTO" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_replaced_tensors_give_the_logits_of_the_file(models, tmp_path, name):
    tokens = np.random.default_rng(1).integers(2, 300, 40)
    iqforge.quantize_model(models[name], tmp_path / "q.gguf", "IQ4_K", pure=True)
    with load_model(tmp_path / "q.gguf") as quantized, load_model(models[name]) as model:
        before, expected = model.forward(tokens), quantized.forward(tokens)
        changed = [t for t in quantized.source.tensors if t.type.is_quantized]
        for tensor in changed:
            model.weights.store.replace(
                tensor.name,
                tensor.type,
                np.array(quantized.source.read_rows(tensor, 0, tensor.n_rows)),
            )
        assert torch.equal(model.forward(tokens), expected) and not torch.equal(before, expected)
        for tensor in changed:
            model.weights.store.restore(tensor.name)
        assert torch.equal(model.forward(tokens), before)


def test_sensitivities_are_measured(models, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(PROSE * 20)
    flags = [
        "-f",
        str(text),
        "-c",
        "32",
        "--chunks",
        "2",
        "--type",
        "iq4_k",
        "-o",
        str(tmp_path / "d.json"),
    ]
    words = ["sensitivity", "--device", "cpu", "-m", str(models["llama"]), *flags]
    write_dat(tmp_path / "i.dat", {"blk.0.attn_q.weight": (1, [1.0] * 64)}, 1)
    replaced = ["--imatrix", str(tmp_path / "i.dat"), "-o", str(tmp_path / "i.dat")]
    assert main([*words, *replaced]) == 1 and "same file" in capsys.readouterr().err
    assert main(words) == 0
    probes = {probe.tensors[0]: probe for probe in load_probes(tmp_path / "d.json")}
    assert len(probes) == 4 * 7 + 2 and all(len(probe.tensors) == 1 for probe in probes.values())
    iqforge.measure_perplexity(
        models["llama"], text, n_ctx=32, chunks=2, kl_divergence_base=tmp_path / "base"
    )
    name = "blk.1.ffn_down.weight"
    iqforge.quantize_model(
        models["llama"], tmp_path / "q.gguf", iqforge.Recipe("F32", tensor_types={name: "IQ4_K"})
    )
    expected = iqforge.measure_perplexity(
        tmp_path / "q.gguf", None, kl_divergence_base=tmp_path / "base", kl_divergence=True
    )
    assert probes[name].kld == pytest.approx(expected.mean_kld, rel=1e-6) and probes[name].kld > 0
    assert probes[name].error == pytest.approx(
        iqforge.quantize_stats(models["llama"], ["IQ4_K"], include=[name])
        .total(ggml_type("IQ4_K"))
        .weighted_rmse
        ** 2
    )
    capsys.readouterr()
    together = iqforge.measure_sensitivity(
        models["llama"], text, n_ctx=32, chunks=2, types=["IQ4_K"], layers=2
    )
    assert len(together) == 2 * 7 + 2 and ("blk.2.attn_q.weight", "blk.3.attn_q.weight") in [
        probe.tensors for probe in together
    ]
    assert (
        main(
            [
                "quantize",
                "--target-bpw",
                "4.5",
                "--target-types",
                "q2_K,iq4_k,q8_0",
                "--damage",
                str(tmp_path / "d.json"),
                "--dry-run",
                "--no-estimate",
                str(models["llama"]),
                str(tmp_path / "no.gguf"),
            ]
        )
        == 0
    )
    assert "by d.json" in capsys.readouterr().out


def test_files_of_sensitivities_that_are_none(models, tmp_path):
    with pytest.raises(NotFoundError):
        load_probes(tmp_path / "none.json")
    for content in (
        "",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps({"format": "iqforge sensitivities 1"}),
        json.dumps(
            {
                "format": "iqforge sensitivities 1",
                "probes": [{"tensors": ["a"], "error": 1, "kld": -1}],
            }
        ),
        json.dumps(
            {"format": "iqforge sensitivities 1", "probes": [{"tensors": 5, "error": 1, "kld": 1}]}
        ),
    ):
        (tmp_path / "d.json").write_text(content)
        with pytest.raises(MalformedFileError):
            load_probes(tmp_path / "d.json")
    save_probes(tmp_path / "d.json", [Probe(("output.weight",), 0.1, 0.1)])
    with pytest.raises(UsageError, match="no sensitivity of this tensor"):
        iqforge.recipe_for_target(models["llama"], bpw=4, types=TYPES, damage=tmp_path / "d.json")


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_tensors_in_gpu_memory_are_replaced(models, monkeypatch, name):
    """The memory of a GPU, on the CPU: decoded there as the reference path does it."""
    from iqforge.cuda_kernels.packed import matrix as packed_matrix
    from iqforge.runtime.weights.resident import Resident, ResidentMatrix

    monkeypatch.setattr(packed_matrix, "packable", lambda type, cols: False)
    with iqforge.open_source(models[name]) as source:
        tensor = next(t for t in source.tensors if "ffn_up" in t.name)
        resident = Resident(source, [tensor], tensor.n_matrices, torch.device("cpu"))
        matrix = ResidentMatrix(resident, tensor.n_matrices - 1)

        def values() -> torch.Tensor:
            return torch.cat([part for _, part in matrix.parts()])

        before = values()
        type = ggml_type("Q8_0")
        stored = source.read_rows(tensor, 0, tensor.n_rows)
        blocks = iqforge.encode(type, iqforge.decode(tensor.type, stored, tensor.n_cols))
        expected = iqforge.decode("Q8_0", blocks, tensor.n_cols)
        for _ in range(2):
            resident.replace(type, blocks)
            assert np.array_equal(values().numpy(), expected[-matrix.rows :])
            assert np.array_equal(
                matrix.gather(torch.tensor([3, 0])).numpy(), expected[-matrix.rows :][[3, 0]]
            )
        resident.restore()
        assert torch.equal(values(), before) and resident.type is tensor.type
        resident.replace(type, blocks)
        resident.release()
        assert torch.equal(values(), before)
        with pytest.raises(UsageError, match="is one matrix with others on cpu"):
            Resident(source, [tensor, tensor], 1, torch.device("cpu")).replace(type, blocks)


def test_tensor_that_cannot_be_replaced_on_a_gpu_is_named(models, monkeypatch):
    with load_model(models["llama"]) as model:
        tensor = next(t for t in model.source.tensors if "ffn_up" in t.name)
        blocks = np.array(model.source.read_rows(tensor, 0, tensor.n_rows))
        placement = type(model.weights.placement)
        monkeypatch.setattr(placement, "of", lambda self, name: torch.device("cuda", 0))
        with pytest.raises(UsageError, match=f"{tensor.name}.*is no matrix by itself on cuda:0"):
            model.weights.store.replace(tensor.name, tensor.type, blocks)
