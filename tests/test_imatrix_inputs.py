"""Wrong inputs and outputs of a collection are reported before it starts, and files with other
names for the same input add up.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import EvaluationError, ImatrixError, OutputError, UsageError
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.imatrix.files.load import load_imatrix, save_imatrix

from .imatrices import N_CTX, tiny_llama_file
from .tiny_checkpoint import PROSE


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama_file(tmp_path_factory.mktemp("inputs"))


def imatrix(name: str, n_cols: int, tokens: int = N_CTX) -> Imatrix:
    return Imatrix({name: Entry(np.ones((1, n_cols)), np.array([tokens]))}, 1, N_CTX)


def never(progress) -> None:
    raise AssertionError("the collection has started")


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"out": "nowhere/x.dat"}, OutputError, "nowhere/x.dat: cannot be written"),
        ({"out": "folder"}, OutputError, "it is a folder"),
        (
            {"in_files": [imatrix("blk.0.attn_q.weight", 8)]},
            ImatrixError,
            "tensor 'blk.0.attn_q.weight': .* has 8 values",
        ),
        (
            {"in_files": [imatrix("blk.0.attn_q.weight", 256)], "in_weights": [-1]},
            UsageError,
            "a weight is -1",
        ),
        (
            {"in_files": [imatrix("blk.0.attn_q.weight", 256)], "in_weights": [1, 2]},
            UsageError,
            "2 weights are given for 1",
        ),
        ({"in_weights": [1]}, UsageError, "no importance matrix"),
        (
            {"in_files": [imatrix("blk.0.attn_q.weight", 256)], "in_weights": []},
            UsageError,
            "0 weights are given for 1",
        ),
        (
            {"in_files": [imatrix("blk.0.attn_q.weight", 256)], "in_weights": ["a"]},
            UsageError,
            r"in_weights\[0\] is 'a', expected a number",
        ),
        ({"text_weights": ["a"]}, UsageError, r"text_weights\[0\] is 'a', expected a number"),
        (
            {"min_tokens": -1},
            UsageError,
            "min_tokens is -1, expected 0 or more",
        ),
        ({"prior_tokens": "x"}, UsageError, "prior_tokens is 'x', expected a number"),
        (
            {"save_frequency": "x"},
            UsageError,
            "save_frequency is 'x', expected a whole number",
        ),
        (
            {"output_frequency": -1},
            UsageError,
            "chunks between two writes is -1, expected a whole number from 0 on",
        ),
        ({"batch_tokens": 0}, UsageError, "batch_tokens is 0, expected 1 or more"),
        ({"from_chunk": -1}, UsageError, "from_chunk is -1, expected 0 or more"),
        ({"dataset": 5}, UsageError, "dataset is 5, expected a name"),
        (
            {"text_weights": [1e7]},
            UsageError,
            "the weight of a text is 1e.07, expected a positive number, at most 1e.06",
        ),
    ],
)
def test_errors_before_any_work(model, tmp_path, monkeypatch, options, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(error, match=message):
        iqforge.collect_imatrix(
            model, PROSE, **{"out": "x.dat", "n_ctx": N_CTX, "chunks": 2} | options, progress=never
        )
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_no_text_is_not_taken_for_missing_weights(model):
    for weights in (None, [], [1.0]):
        with pytest.raises(UsageError, match="there is no text to collect from"):
            iqforge.collect_imatrix(model, [], text_weights=weights, n_ctx=N_CTX, progress=never)


def test_a_text_that_is_too_short_is_named(model, tmp_path):
    for name, content in (("long.txt", PROSE), ("short.txt", "of 12")):
        (tmp_path / name).write_text(content)
    with pytest.raises(EvaluationError, match="short.txt: the text has"):
        iqforge.collect_imatrix(
            model, [tmp_path / "long.txt", tmp_path / "short.txt"], n_ctx=N_CTX, progress=never
        )


def test_entries_that_the_model_has_no_tensor_for(model, caplog):
    both = imatrix("blk.0.attn_q.weight", 256)
    both.entries["blk.7.attn_q.weight"] = both.entries["blk.0.attn_q.weight"]
    options = {"n_ctx": N_CTX, "chunks": 1, "in_files": [both]}
    told = r"8 layers, the model has 1 layer; .* no tensor for 1 of 2 entries \(blk.7.attn_q.weight"
    with pytest.raises(ImatrixError, match=told):
        iqforge.collect_imatrix(model, PROSE, **options, progress=never)
    found = iqforge.collect_imatrix(model, PROSE, **options, force=True)
    assert found.entries["blk.0.attn_q.weight"].counts.tolist() == [2 * N_CTX]
    assert re.search(told, caplog.text)
    caplog.clear()
    iqforge.collect_imatrix(
        model, PROSE, n_ctx=N_CTX, chunks=1, in_files=[imatrix("blk.0.attn_q.weight", 256)]
    )
    assert not caplog.records


def test_a_missing_output_matrix(model, caplog):
    options = {"n_ctx": N_CTX, "chunks": 1, "process_output": True}
    assert (
        "output.weight" in iqforge.collect_imatrix(model, PROSE, **options).entries
        and not caplog.records
    )
    iqforge.collect_imatrix(model, PROSE, **options, output_name="outputs.weight")
    assert "no product with a matrix outputs.weight was seen" in caplog.text


def test_flags_of_the_command(model, tmp_path, capsys):
    save_imatrix(imatrix("blk.0.attn_q.weight", 256), path := tmp_path / "a.dat")
    out = tmp_path / "b\x1b[31m.dat"
    assert main(["imatrix", "--in-file", str(path), "-o", str(out), "-lsim", "--resume"]) == 0
    told = capsys.readouterr()
    assert (
        "note: --resume, -lsim change nothing here" in told.err
        and "b\\x1b[31m.dat" in told.out
        and "\x1b" not in told.out
    )
    assert load_imatrix(out).chunk_count == 1
    assert main(["imatrix", "--in-file", str(path), "-o", str(out), "--coverage", "-1"]) == 1
    assert "--coverage is -1" in capsys.readouterr().err


def experts(
    kinds: tuple[str, ...], counts: list[int], factor: float = 1.0, router: bool = True
) -> Imatrix:
    entries = {
        f"blk.0.ffn_{kind}.weight": Entry(factor * np.outer(counts, [1.0, 2.0]), np.array(counts))
        for kind in kinds
    }
    return Imatrix(
        entries
        | ({"blk.0.ffn_gate_inp.weight": Entry(np.ones((1, 2)), np.array([64]))} if router else {}),
        2,
        N_CTX,
    )


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("weighting", ["tokens", "calls"])
def test_gate_and_up_in_one_tensor_or_two_add_up(first, weighting):
    two, one, fused = (
        experts(kinds, [30, 34], factor)
        for kinds, factor in (
            (("gate_exps", "up_exps"), 1),
            (("gate_up_exps",), 3),
            (("up_exps",), 5),
        )
    )
    merged = iqforge.merge_imatrices(
        [one, two, fused] if first else [two, one, fused], weighting=weighting
    )
    assert sorted(merged.entries) == [
        f"blk.0.ffn_{kind}.weight" for kind in ("gate_exps", "gate_inp", "up_exps")
    ]
    for kind in ("gate", "up", "gate_up"):
        entry = merged.entry(f"blk.0.ffn_{kind}_exps.weight", (2, 5, 2))
        assert entry.counts.tolist() == [90, 102]
        np.testing.assert_allclose(entry.means, [[3, 6], [3, 6]])
    assert sorted(iqforge.merge_imatrices([one, one]).entries) == sorted(one.entries)
    comparison = iqforge.compare_imatrices(one, two)
    assert [t.name for t in comparison.tensors if "exps" in t.name] == [
        "blk.0.ffn_gate_exps.weight",
        "blk.0.ffn_up_exps.weight",
    ]
    assert comparison.only_in_a == comparison.only_in_b == () and comparison.tensors[
        0
    ].lowest == pytest.approx(1)
    # The entry of latent attention's kv_b is no substitute, as its input is another one.
    a, b = imatrix("blk.0.attn_kv_b.weight", 4), imatrix("blk.0.attn_v_b.weight", 4)
    assert {
        name: entry.counts.tolist()
        for name, entry in iqforge.merge_imatrices([a, b]).entries.items()
    } == {"blk.0.attn_kv_b.weight": [N_CTX], "blk.0.attn_v_b.weight": [N_CTX]}


def test_the_share_of_an_expert_does_not_depend_on_the_weight_of_a_text():
    """A text with weight 2 has twice the tokens of its chunks."""
    calls = Imatrix(
        {
            "blk.0.ffn_up_exps.weight": Entry(np.full((1, 4), 6.0), np.array([3])),
            "blk.0.ffn_gate_inp.weight": Entry(np.full((1, 2), 6.0), np.array([3])),
        },
        3,
        1,
    )
    for weight in (1, 2):
        fresh = experts(("up_exps",), [16 * weight, 48 * weight])
        fresh.entries["blk.0.ffn_gate_inp.weight"].counts *= weight
        merged = iqforge.merge_imatrices([calls, fresh])
        # Half the tokens on average, so 48 of the file's 96.
        assert merged.entries["blk.0.ffn_up_exps.weight"].counts.tolist() == [
            16 * weight + 48,
            48 * weight + 48,
        ]


@pytest.mark.parametrize("words", [["-o", "b.gguf"], ["--show-statistics"]])
def test_files_need_no_torch(tmp_path, words):
    """Importing torch would take most of the memory and the time."""
    save_imatrix(imatrix("blk.0.attn_q.weight", 256), tmp_path / "a.dat")
    words = ["imatrix", "--in-file", "a.dat", *words]
    code = (
        f"import sys; from iqforge.cli import main; sys.exit(main({words}) or 'torch' in"
        " sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment).returncode == 0
    )


def test_inputs_that_are_all_zeros_compare(tmp_path):
    """Nothing differs between a file and itself, and everything differs from zeros."""
    zero, one = (
        Imatrix({"blk.0.attn_q.weight": Entry(np.full((1, 4), value), np.array([8]))}, 1, 8)
        for value in (0.0, 1.0)
    )
    found = [
        iqforge.compare_imatrices(a, b).tensors[0]
        for a, b in ((zero, zero), (zero, one), (one, zero))
    ]
    assert [(t.cosine, t.difference) for t in found] == [(1, 0), (0, 1), (0, 1)]
