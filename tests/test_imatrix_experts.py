"""Experts that see few tokens: the report of coverage, and what is written for them, on a model
with an expert that is never chosen.
"""

from __future__ import annotations

import json

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import UsageError
from iqforge.formats.codecs import codec
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.imatrix.cold_experts import NEIGHBOURS, cosines, fill_cold_experts
from iqforge.imatrix.coverage import measure_coverage
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.imatrix.files.load import load_imatrix, save_imatrix

from .tiny_checkpoint import PROSE, make_tiny_qwen3moe
from .tiny_model import write_gguf

N_CTX, N_EXPERTS, COLD, NEAR = 32, 16, 5, 2
GATE, UP, DOWN = (f"blk.0.ffn_{kind}_exps.weight" for kind in ("gate", "up", "down"))
ROUTER = "blk.0.ffn_gate_inp.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write a model in which expert COLD's router row is a small fraction of NEAR's: it has the
    same direction, and its logit is never among the largest.
    """
    folder = tmp_path_factory.mktemp("experts")
    make_tiny_qwen3moe(folder / "hf", n_experts=N_EXPERTS, n_layers=1)
    with CheckpointSource(open_checkpoint(folder / "hf")) as source:
        write_gguf(folder / "plain.gguf", source)
    with (
        open_gguf(folder / "plain.gguf") as source,
        GGUFWriter(folder / "model.gguf", source.metadata, source.tensors) as writer,
    ):
        for tensor in source.tensors:
            rows = source.read_rows(tensor, 0, tensor.n_rows)
            if tensor.name == ROUTER:
                values = codec.decode(tensor.type, rows, tensor.n_cols).copy()
                values[COLD] = 0.05 * values[NEAR]
                rows = values.astype("<f4").view(np.uint8)
            writer.write(tensor, rows)
    (folder / "text.txt").write_text(PROSE * 2)
    return folder / "model.gguf"


def collected(model, method: str, out=None, **options) -> Imatrix:
    return iqforge.collect_imatrix(
        model, PROSE, out, n_ctx=N_CTX, chunks=6, cold_experts=method, **options
    )


def test_an_expert_that_is_never_chosen(model, tmp_path, caplog):
    """A file of either layout has ones for it with `none`, and the layer's mean with `prior`."""
    raw, prior = (
        collected(model, method, tmp_path / f"{method}.gguf", min_tokens=1)
        for method in ("none", "prior")
    )
    collected(model, "none", tmp_path / "none.dat")
    assert "1 of 16 experts saw no input" in caplog.text
    caplog.clear()
    collected(model, "prior", tmp_path / "prior.dat", min_tokens=1)
    assert "saw no input" not in caplog.text
    assert [int(n) for n in np.flatnonzero(raw.entries[UP].counts == 0)] == [COLD]
    for suffix in ("gguf", "dat"):
        none, filled = (
            load_imatrix(tmp_path / f"{method}.{suffix}") for method in ("none", "prior")
        )
        for name in (GATE, UP, DOWN):
            entry, shape = raw.entries[name], (N_EXPERTS, 256, raw.entries[name].sums.shape[1])
            a, b = none.importance(name, shape), filled.importance(name, shape)
            assert (a[COLD] == 1).all()
            warm = np.arange(N_EXPERTS) != COLD
            np.testing.assert_array_equal(a[warm], b[warm])  # the others keep exactly what they saw
            mean = entry.sums.sum(0) / entry.counts.sum()
            expected = np.full_like(mean, mean.mean()) if name == DOWN else mean
            np.testing.assert_allclose(b[COLD], expected, rtol=1e-6)
    assert prior.entries[UP].counts.tolist() == np.maximum(raw.entries[UP].counts, 1).tolist()


@pytest.mark.parametrize("suffix", ["gguf", "dat"])
def test_filling_when_files_are_added_up(tmp_path, suffix, capsys):
    """Two files of raw sums give the result of one collection of both texts. Either layout shows
    which experts saw nothing.
    """
    save_imatrix(handmade(), path := tmp_path / f"a.{suffix}")
    words = [
        "imatrix",
        "--in-file",
        str(path),
        "--in-file",
        str(path),
        "-c",
        "382",
        "-o",
        str(tmp_path / f"b.{suffix}"),
    ]
    for method in ("prior", "none"):
        assert main([*words, "--cold-experts", method, "--coverage", "129"]) == 0
        means, entry = (
            load_imatrix(tmp_path / f"b.{suffix}").importance(UP, (4, 3, 2)),
            handmade().entries[UP],
        )
        assert np.allclose(
            means[0],
            (
                1
                if method == "none"
                else entry.sums[1:].sum(0) / entry.counts.sum()
                if suffix == "gguf"
                else [1, 2]
            ),
        )
        np.testing.assert_allclose(means[[1, 3]], entry.means[[1, 3]], rtol=1e-6)
    assert (
        main([*words, "--cold-experts", "neighbours"]) == 1
        and "needs a model" in capsys.readouterr().err
    )


def test_neighbours_are_those_with_the_nearest_router_rows(model):
    raw, filled = collected(model, "none"), collected(model, "neighbours", min_tokens=1)
    with open_gguf(model) as source:
        tensor = source.tensor(ROUTER)
        router = codec.decode(
            tensor.type, source.read_rows(tensor, 0, tensor.n_rows), tensor.n_cols
        )
    rows = router - router.mean(0)
    near = [
        float(rows[COLD] @ row / np.linalg.norm(row) / np.linalg.norm(rows[COLD])) for row in rows
    ]
    np.testing.assert_allclose(cosines(router)[COLD], near, rtol=1e-4, atol=1e-6)
    chosen = [expert for expert in np.argsort(near)[::-1] if expert != COLD][:NEIGHBOURS]
    assert 0 < len(chosen) < N_EXPERTS - 1
    for name in (GATE, UP, DOWN):
        entry = raw.entries[name]
        mean = entry.sums[chosen].sum(0) / entry.counts[chosen].sum()
        np.testing.assert_allclose(
            filled.entries[name].means[COLD], mean.mean() if name == DOWN else mean, rtol=1e-9
        )
    with pytest.raises(UsageError, match="blk.0.ffn_gate_inp.weight"):
        fill_cold_experts(raw, "neighbours")


def test_all_experts_leaves_none_cold(model):
    found = []
    wide = collected(model, "all-experts", on_coverage=found.append)
    assert (
        wide.entries[DOWN].counts.tolist() == [6 * N_CTX] * N_EXPERTS
        and (wide.entries[DOWN].sums[COLD] > 0).any()
    )
    np.testing.assert_allclose(wide.entries[UP].sums[COLD], wide.entries[ROUTER].sums[0], rtol=1e-6)
    assert found[0].summary() == [
        f"each of {N_EXPERTS} experts in 1 layer saw at least {6 * N_CTX} tokens (the least in"
        " blk.0)"
    ]


def test_the_prior_is_worth_its_tokens():
    sums = np.array([[6.0, 2.0], [30.0, 10.0], [0.0, 0.0]])
    imatrix = Imatrix(
        {
            UP: Entry(sums, np.array([2, 10, 0])),
            DOWN: Entry(sums, np.array([2, 10, 0])),
            "blk.0.attn_q.weight": Entry(sums[:1], np.array([2])),
        },
        1,
        8,
    )
    filled = fill_cold_experts(imatrix, "prior", least=10, prior_tokens=4)
    m = np.array([36.0, 12.0]) / 12
    np.testing.assert_allclose(filled.entries[UP].means, [(sums[0] + 4 * m) / 6, sums[1] / 10, m])
    np.testing.assert_allclose(
        filled.entries[DOWN].means, [(sums[0] + 4 * m.mean()) / 6, sums[1] / 10, [m.mean()] * 2]
    )
    assert filled.entries[UP].counts.tolist() == [2, 10, 1]
    assert filled.entries["blk.0.attn_q.weight"] is imatrix.entries["blk.0.attn_q.weight"]
    assert (
        fill_cold_experts(imatrix, "none") is imatrix
        and fill_cold_experts(imatrix, "all-experts") is imatrix
    )
    nothing = Imatrix({UP: Entry(0 * sums, np.zeros(3, dtype=np.int64))}, 1, 8)
    assert not fill_cold_experts(nothing).entries[UP].counts.any()
    for wrong in ({"method": "mean"}, {"prior_tokens": 0.0}, {"prior_tokens": float("nan")}):
        with pytest.raises(UsageError):
            fill_cold_experts(imatrix, **wrong)


def handmade() -> Imatrix:
    counts = np.array([0, 200, 64, 500])
    entries = {name: Entry(np.outer(counts, [1.0, 2.0]), counts) for name in (GATE, UP, DOWN)}
    entries["blk.10.ffn_up_exps.weight"] = entries["blk.2.ffn_up_exps.weight"] = Entry(
        np.ones((4, 2)), np.array([150, 151, 152, 153])
    )
    return Imatrix(entries | {ROUTER: Entry(np.ones((1, 2)), np.array([764]))}, 2, 382)


def test_the_report():
    coverage = measure_coverage(handmade(), 128)
    assert [layer.layer for layer in coverage.layers] == ["blk.0", "blk.2", "blk.10"]
    assert [layer.tensors for layer in coverage.layers] == [
        ("gate", "up", "down"),
        ("up",),
        ("up",),
    ]
    assert coverage.cold(coverage.layers[0]).tolist() == [0, 2] and coverage.n_experts == 12
    assert coverage.summary() == [
        "2 of 12 experts in 3 layers saw fewer than 128 tokens, 1 of them none:",
        "  blk.0 expert 0 (0), blk.0 expert 2 (64)",
    ]
    assert coverage.table()[1].split() == [
        "blk.0",
        "gate,up,down",
        "4",
        "1",
        "2",
        "0",
        "132",
        "500",
        "0(0)",
        "2(64)",
    ]
    assert measure_coverage(handmade(), 1).summary()[0].startswith("1 of 12")
    assert (
        measure_coverage(Imatrix({ROUTER: Entry(np.ones((1, 2)), np.array([3]))})).summary() == []
    )
    many = Imatrix({UP: Entry(np.zeros((40, 2)), np.zeros(40, dtype=np.int64))}, 1, 8)
    assert measure_coverage(many).summary()[1].endswith("blk.0 expert 11 (0), and 28 more")


def test_the_report_of_a_file(tmp_path, capsys):
    save_imatrix(handmade(), tmp_path / "x.gguf")
    save_imatrix(handmade(), tmp_path / "x.dat")
    assert (
        main(["imatrix-coverage", str(tmp_path / "x.gguf"), "--min-tokens", "152", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (
        found["least"] == 152
        and found["layers"][0]["tokens"] == [0, 200, 64, 500]
        and found["layers"][2]["cold"] == [0, 1]
    )
    assert main(["imatrix-coverage", str(tmp_path / "x.gguf")]) == 0
    assert "blk.0 expert 2 (64)" in capsys.readouterr().out
    assert main(["imatrix-coverage", str(tmp_path / "x.dat")]) == 0
    assert "1 of 4 experts in 1 layer saw no input" in capsys.readouterr().out
    assert main(["imatrix-coverage", str(tmp_path / "x.gguf"), "--min-tokens", "-1"]) == 1


def test_the_command(model, tmp_path, capsys):
    words = [
        "imatrix",
        "--device",
        "cpu",
        "-m",
        str(model),
        "-f",
        str(model.parent / "text.txt"),
        "-c",
        str(N_CTX),
        "--chunks",
        "2",
        "--no-ppl",
    ]
    for method in ("prior", "neighbours", "all-experts", "none"):
        assert (
            main(
                [
                    *words,
                    "-o",
                    str(tmp_path / f"{method}.gguf"),
                    "--cold-experts",
                    method,
                    "--coverage",
                    "2",
                    "-lsim",
                ]
            )
            == 0
        )
        out = capsys.readouterr().out
        assert "sorted ffn importances" in out
        assert ("each of 16 experts" in out) == (method == "all-experts") and (
            "blk.0 expert 5 (0)" in out
        ) == (method != "all-experts")
        assert (load_imatrix(tmp_path / f"{method}.gguf").entries[UP].counts[COLD] == 0) == (
            method == "none"
        )
    assert main([*words, "-o", str(tmp_path / "x.gguf"), "--prior-tokens", "0"]) == 1
    assert "positive" in capsys.readouterr().err and not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("suffix", ["dat", "gguf"])
def test_quantizing_finds_every_expert(model, tmp_path, suffix):
    """By default each expert has importances, also with merged gate and up."""
    iqforge.merge_gate_up(model, tmp_path / "merged.gguf")
    for name, path in (("plain", model), ("merged", tmp_path / "merged.gguf")):
        iqforge.collect_imatrix(
            path, PROSE, tmp_path / f"imatrix-{name}.{suffix}", n_ctx=N_CTX, chunks=6, min_tokens=1
        )
    for source, path in (("merged", model), ("plain", tmp_path / "merged.gguf")):
        imatrix = load_imatrix(tmp_path / f"imatrix-{source}.{suffix}")
        report = iqforge.quantize_model(path, tmp_path / "out.gguf", "IQ2_XS", imatrix)
        assert report.tensors
        with open_gguf(path) as opened:
            for tensor in opened.tensors:
                if "_exps" in tensor.name:
                    assert (imatrix.importance(tensor.name, tensor.shape)[COLD] != 1).any(), (
                        tensor.name
                    )
