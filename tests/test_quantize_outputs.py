"""Several outputs from one pass over the source: each equals the file of a separate run."""

from __future__ import annotations

from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import OutputError, UsageError
from iqforge.formats.codecs.codec import encode_float
from iqforge.formats.gguf.reader import GGUFFile, open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import string
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.imatrix.files.load import save_imatrix
from iqforge.quantize.commands.arguments import parse_words
from iqforge.quantize.plan.plan import PlannedTensor
from iqforge.quantize.plan.recipe import Recipe
from iqforge.quantize.run.stream import RunOutput, stream

from .uniform_plan import plan_uniform


def info(name, shape, kind="BF16"):
    return TensorInfo(name, shape, ggml_type(kind))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    tensors = [
        info("token_embd.weight", (40, 256)),
        info("blk.0.attn_norm.weight", (256,), "F32"),
        info("blk.0.attn_q.weight", (40, 256)),
        info("blk.0.ffn_up_exps.weight", (3, 8, 256), "F16"),
        info("blk.0.ffn_down.weight", (16, 512), "F32"),
        info("output.weight", (40, 256)),
    ]
    path, generator = tmp_path_factory.mktemp("model") / "model.gguf", np.random.default_rng(3)
    with GGUFWriter(path, {"general.architecture": string("llama")}, tensors) as sink:
        for tensor in tensors:
            sink.write(
                tensor,
                encode_float(
                    tensor.type,
                    generator.standard_normal((tensor.n_rows, tensor.n_cols)).astype(np.float32),
                ),
            )
    return path


TYPES = ("Q4_0", "Q8_0_R8", "BF16")


def test_each_file_equals_that_of_a_separate_run(model, tmp_path):
    alone = [(tmp_path / f"alone-{type}.gguf", type) for type in TYPES]
    expected = [iqforge.quantize_model(model, out, type, pure=True) for out, type in alone]
    together = [(tmp_path / f"together-{type}.gguf", type) for type in TYPES[:2]] + [
        (tmp_path / "together-BF16.gguf", Recipe("BF16", pure=True))
    ]
    reports = iqforge.quantize_models(model, together, pure=True, threads=3)
    for (one, type), (other, _), report, of_one in zip(alone, together, reports, expected):
        assert one.read_bytes() == other.read_bytes(), type
        assert report == of_one
    assert len(list(tmp_path.iterdir())) == 2 * len(TYPES)


def test_a_missing_folder_is_found_before_any_work(model, tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("iqforge.api.quantize.open_source", opened.append)
    there, missing = tmp_path / "a.gguf", tmp_path / "none" / "b.gguf"
    with pytest.raises(OutputError, match="b.gguf: cannot be written: No such file"):
        iqforge.quantize_models(model, [(there, "Q4_0"), (missing, "Q8_0")])
    assert not opened and not list(tmp_path.iterdir())
    monkeypatch.undo()
    words = ["quantize", "--dry-run", "--no-estimate", str(model), str(missing), "Q8_0"]
    assert main(words) == 0
    assert f"WARNING: {missing}: cannot be written: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--include-weights", "--exclude-weights"])
def test_parts_of_names_that_no_entry_has_are_warnings(model, tmp_path, capsys, flag):
    entry = Entry(np.ones((1, 256), np.float32), np.array([10]))
    save_imatrix(Imatrix({"blk.0.attn_q.weight": entry}), tmp_path / "m.gguf")
    words = ["quantize", "--dry-run", "--no-estimate", "--pure", flag, "attn_q"]
    given = ["--imatrix", str(tmp_path / "m.gguf"), flag, "ffn_dwn"]
    assert main([*words, *given, str(model), "Q8_0"]) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if flag in line]
    missing = f"WARNING: {flag} ffn_dwn: no entry of the importance matrix has that in its name"
    assert warned == ([missing] if flag == "--include-weights" else [])
    assert main([*words, str(model), "Q8_0"]) == 0
    assert f"{flag} changes nothing without an importance matrix" in capsys.readouterr().err


def test_rules_beside_pure_are_not_said_to_be_taken(model, capsys):
    words = ["quantize", "--dry-run", "--no-estimate", "--pure", "--custom-q", "attn=q8_0"]
    words += ["--tensor-type", "attn_q=q8_0", str(model), "Q4_0"]
    assert main(words) == 0
    assert "take all that it matches" in capsys.readouterr().err  # that is all of attn
    words[5] = "attn|ffn=q8_0"
    assert main(words) == 0
    err = capsys.readouterr().err
    assert "others that it matches, such as blk.0.ffn_" in err and "take all" not in err


def test_flags_that_contradict_each_other_are_named(model, capsys):
    words = ["quantize", "--dry-run", "--keep-split", "--split-max-size", "1M", str(model), "Q8_0"]
    assert main(words) == 1
    assert "(--keep-split) or of a size that is given (--split-max-s" in capsys.readouterr().err
    words = ["quantize", "--dry-run", "--target-bpw", "4", "--target-size", "1M", str(model)]
    assert main(words) == 1
    assert "(--target-bpw) or a size (--target-size): give one" in capsys.readouterr().err


def test_rows_are_read_once(model, tmp_path, monkeypatch):
    read: dict[str, int] = {}
    real = GGUFFile.read_rows

    def counting(self, tensor, start, stop):
        read[tensor.name] = read.get(tensor.name, 0) + stop - start
        return real(self, tensor, start, stop)

    monkeypatch.setattr(GGUFFile, "read_rows", counting)
    # Reads some rows before the run.
    monkeypatch.setattr("iqforge.quantize.run.provenance.source_fingerprint", lambda *_: "")
    iqforge.quantize_models(model, [(tmp_path / f"{type}.gguf", type) for type in TYPES], pure=True)
    with open_gguf(model) as source:
        assert read == {tensor.name: tensor.n_rows for tensor in source.tensors}


def test_plan_may_leave_tensors_out_and_name_one_twice(model, tmp_path):
    with open_gguf(model) as source:
        planned = [
            plan
            for plan in plan_uniform(source.tensors, ggml_type("Q8_0"))
            if "attn_q" not in plan.source.name
        ]
        output = source.tensor("output.weight")
        extra = PlannedTensor(
            output, TensorInfo("output_extra.weight", output.shape, ggml_type("Q4_0"))
        )
        whole = plan_uniform(source.tensors, ggml_type("Q4_0"))
        paths = [tmp_path / "part.gguf", tmp_path / "whole.gguf"]
        plans = [[*planned, extra], whole]
        with (
            GGUFWriter(paths[0], source.metadata, [plan.target for plan in plans[0]]) as first,
            GGUFWriter(paths[1], source.metadata, [plan.target for plan in whole]) as second,
        ):
            reports = stream(source, [RunOutput(plans[0], first), RunOutput(plans[1], second)])
    assert [[t.planned for t in report.tensors] for report in reports] == plans
    with open_gguf(paths[0]) as part, open_gguf(paths[1]) as other:
        assert [tensor.name for tensor in part.tensors] == [plan.target.name for plan in plans[0]]
        rows = part.read_rows(part.tensor("output_extra.weight"), 0, 40)
        assert np.array_equal(rows, other.read_rows(other.tensor("output.weight"), 0, 40))
        assert not np.array_equal(
            rows[:, :100], part.read_rows(part.tensor("output.weight"), 0, 40)[:, :100]
        )


def test_command(model, tmp_path, capsys):
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    assert (
        main(["quantize", "--verbose", "--pure", str(model), str(a), "q4_0", str(b), "q8_0", "2"])
        == 0
    )
    printed = capsys.readouterr().out
    assert (
        printed.count("a.gguf: [   1/   6]") == printed.count("b.gguf: [   1/   6]") == 1
        and printed.count("quant size") == 2
    )
    iqforge.quantize_model(model, tmp_path / "c.gguf", "Q8_0", pure=True)
    assert b.read_bytes() == (tmp_path / "c.gguf").read_bytes()


def test_words():
    assert parse_words(["in", "a", "Q4_0"]) == ("in", [("a", "Q4_0")], 0)
    assert parse_words(["in", "q4_0", "3"]) == ("in", [("ggml-model-Q4_0.gguf", "Q4_0")], 3)
    assert parse_words(["in", "a", "q4_0", "b", "iq3_k", "3"]) == (
        "in",
        [("a", "Q4_0"), ("b", "IQ3_K")],
        3,
    )
    for words, message in (
        (["in"], "expected IN"),
        (["in", "a", "Q4_0", "8", "9"], "unexpected argument '9'"),
        (["in", "Q4_0", "8", "9"], "unexpected argument '9'"),
        (["in", "a", "Q4_0", "b"], "invalid NTHREADS: 'b'"),
        (["in", "a", "Q4_0", "b", "Q4"], "Q4"),
        (["in", "Q4_0", "b.gguf"], "OUT comes before TYPE"),
        (["in", "b.gguf"], "TYPE is missing after 'b.gguf'"),
    ):
        with pytest.raises(iqforge.IqforgeError, match=message):
            parse_words(words)


def test_errors_leave_nothing(model, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "a.gguf")
    with pytest.raises(UsageError, match="twice"):
        iqforge.quantize_models(model, [(tmp_path / "a.gguf", "Q4_0"), (link, "Q8_0")], pure=True)
    with pytest.raises(OutputError, match="absent"):
        iqforge.quantize_models(
            model, [(tmp_path / "a.gguf", "Q4_0"), (tmp_path / "absent/b.gguf", "Q8_0")], pure=True
        )
    assert sorted(tmp_path.iterdir()) == [link]
