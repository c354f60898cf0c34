"""Recipes and saved plans as users run them: on the command line, edited, for the wrong model; and
COPY.
"""

from __future__ import annotations

import json

import iqforge
import pytest
from iqforge.api.plan import plan_quantization
from iqforge.cli import main
from iqforge.errors import (
    IqforgeError,
)
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.quantize.plan.saved_plan import load_plan

from .recipe_text import write
from .tiny_checkpoint import make_tiny_llama


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return iqforge.convert_model(
        make_tiny_llama(folder / "hf"), folder / "tiny.gguf", outtype="bf16"
    )


def kinds(path) -> dict[str, str]:
    with open_gguf(path) as model:
        return {tensor.name: tensor.type.name for tensor in model.tensors}


def test_recipe_on_the_command_line(bf16, tmp_path, capsys):
    recipe, out = (
        write(tmp_path, "preset: q8_0\ncustom_q: {attn_q: q4_0, attn_k: q5_0}\n", "r.yaml"),
        tmp_path / "q.gguf",
    )
    assert (
        main(
            ["quantize", "--recipe", str(recipe), "--custom-q", "attn_k=q4_1", str(bf16), str(out)]
        )
        == 0
    )
    found = kinds(out)
    assert (
        found["blk.0.attn_q.weight"],
        found["blk.0.attn_k.weight"],
        found["blk.0.ffn_up.weight"],
    ) == ("Q4_0", "Q4_1", "Q8_0")
    captured = capsys.readouterr()
    assert (
        "--custom-q attn_k=q4_1 and r.yaml:2 attn_k=q5_0 both want blk.0.attn_k.weight"
        not in captured.err
    )
    assert (
        "r.yaml:2 attn_k=q5_0 applies to no tensor: earlier rules such as"
        " --custom-q attn_k=q4_1 take all that it matches" in captured.err
    )
    with open_gguf(out) as model:
        said = json.loads(model.metadata["quantize.recipe"].data)
    assert said == {"custom_q": ["attn_k=q4_1", "attn_q=q4_0", "attn_k=q5_0"], "type": "Q8_0"}
    words = ["quantize", "--dry-run", "--recipe", str(recipe), str(bf16)]
    assert (
        main([*words, "q4_0"])
        == main([*words, str(out), "q4_0", "2"])
        == main([*words, str(out), "2"])
        == main(words)
        == 0
    )
    assert (
        main(
            [
                "quantize",
                "--dry-run",
                "--strict",
                "--recipe",
                str(write(tmp_path, "nothing=q8_0")),
                str(bf16),
                "q4_0",
            ]
        )
        == 1
    )
    assert "r.txt:1 nothing=q8_0 applies to no tensor" in capsys.readouterr().err
    assert (
        main(["quantize", "--dry-run", str(bf16)]) == 1 and "expected IN" in capsys.readouterr().err
    )
    listed = write(tmp_path, "attn_q=q4_0 ATTN_K=q4_1\nffn_up=q5_0", "types.txt")
    command = [
        "quantize",
        "--pure",
        "--tensor-type-file",
        str(listed),
        "--tensor-type",
        "blk.0.attn_q=q5_1",
        str(bf16),
        str(out),
        "q8_0",
    ]
    assert main(command) == 0
    found = [
        kinds(out)[f"blk.{name}.weight"]
        for name in ("0.attn_q", "1.attn_q", "1.attn_k", "1.ffn_up", "1.attn_v")
    ]
    assert found == ["Q5_1", "Q4_0", "Q4_1", "Q5_0", "Q8_0"]


def test_a_plan_is_saved_edited_and_carried_out(bf16, tmp_path, capsys):
    plan, first, second = tmp_path / "plan.json", tmp_path / "a.gguf", tmp_path / "b.gguf"
    assert (
        main(
            [
                "quantize",
                "--no-provenance",
                "--custom-q",
                "ffn_up=q5_0",
                "--save-plan",
                str(plan),
                str(bf16),
                str(first),
                "q4_0",
            ]
        )
        == 0
    )
    document = json.loads(plan.read_text())
    by_name = {entry["name"]: entry for entry in document["tensors"]}
    assert (
        by_name["blk.0.ffn_up.weight"]["why"] == "--custom-q ffn_up=q5_0"
        and by_name["output_norm.weight"]["why"] == "never quantized"
    )
    assert main(["quantize", "--no-provenance", "--plan", str(plan), str(bf16), str(second)]) == 0
    assert first.read_bytes() == second.read_bytes()
    again = tmp_path / "again.json"
    assert (
        main(["quantize", "--dry-run", "--plan", str(plan), "--save-plan", str(again), str(bf16)])
        == 0
    )
    assert (
        again.read_text() == plan.read_text()
        and "nothing was written but the plan" in capsys.readouterr().out
    )
    by_name["blk.0.attn_q.weight"]["type"] = "iq4_nl"
    plan.write_text(json.dumps(document))
    assert (
        main(
            [
                "quantize",
                "--plan",
                str(plan),
                "--save-plan",
                str(again),
                str(bf16),
                str(second),
                "q4_0",
            ]
        )
        == 0
    )
    changed = {name for name, kind in kinds(second).items() if kind != kinds(first)[name]}
    assert changed == {"blk.0.attn_q.weight"} and kinds(second)["blk.0.attn_q.weight"] == "IQ4_NL"
    assert [
        entry["why"]
        for entry in json.loads(again.read_text())["tensors"]
        if entry["name"] in changed
    ] == ["edited, was Q4_0"]
    assert [
        p.target.type.name for p in plan_quantization(open_gguf(bf16), load_plan(plan))
    ] == list(kinds(second).values())


def test_a_plan_is_for_one_model(bf16, tmp_path, capsys):
    plan, document = tmp_path / "plan.json", None

    def refused(said: str, *flags: str) -> None:
        if document:
            plan.write_text(json.dumps(document))
        assert main(["quantize", "--dry-run", "--plan", str(plan), *flags, str(bf16)]) == 1
        error = capsys.readouterr().err
        assert said in error and "Traceback" not in error, error

    assert main(["quantize", "--dry-run", "--save-plan", str(plan), str(bf16), "q4_0"]) == 0
    good = plan.read_text()
    refused(
        "--plan gives the type of every tensor, so it takes no custom_q", "--custom-q", "a=q8_0"
    )
    document = json.loads(good)
    document["tensors"][3]["dims"][0] += 256
    refused(f"the plan is for another model: {document['tensors'][3]['name']} has shape ")
    document = json.loads(good)
    document["tensors"][3]["source"] = "F32"
    refused("in the plan F32")
    document = json.loads(good)
    gone = document["tensors"].pop()
    refused(f"it has {gone['name']}, which is not in the plan")
    document["tensors"] += [gone, gone | {"name": "more.weight"}]
    refused("it has no more.weight")
    document["tensors"][-1] = gone
    refused("duplicate tensor")
    document = json.loads(good)
    document["tensors"][3]["type"] = "q99"
    refused("unknown ggml type 'q99'")
    for broken in (
        "{",
        "[]",
        f'{{"format": {"9" * 5000}}}',
        "[" * 100_000,
        '{"format": "iqforge plan 1", "preset": 3}',
        '{"format": "iqforge plan 1", "rules": "ik", "preset": "Q4_0"}',
    ):
        plan.write_text(broken)
        document = None
        refused("plan.json")
    assert (
        main(["quantize", "--dry-run", "--plan", str(write(tmp_path, good)), str(bf16), "q8_0"])
        == 1
    )
    assert "the plan is one for Q4_0" in capsys.readouterr().err
    with pytest.raises(IqforgeError, match="plan file not found"):
        load_plan(tmp_path / "none.json")


def test_types_beside_copy(bf16, tmp_path, capsys):
    given = [
        "--custom-q",
        "attn=q8_0",
        "--attn-v-type",
        "q8_0",
        "--output-tensor-type",
        "q4_0",
        "--dry-run",
        "--no-estimate",
    ]
    assert main(["quantize", *given, str(bf16), "COPY"]) == 0
    said = (
        "COPY keeps all types: --custom-q, --output-tensor-type, --attn-v-type apply to no tensor"
    )
    assert said in capsys.readouterr().err
    assert (
        main(["quantize", "--strict", *given, str(bf16), "COPY"]) == 1
        and said in capsys.readouterr().err
    )
    iqforge.quantize_model(
        bf16,
        tmp_path / "c.gguf",
        "COPY",
        strict=True,
        leave_output_tensor=True,
        save_plan=tmp_path / "plan.json",
    )
    assert load_plan(tmp_path / "plan.json").copies


def test_copy(bf16, tmp_path, capsys):
    quantized, copy = tmp_path / "q.gguf", tmp_path / "ggml-model-COPY.gguf"
    iqforge.quantize_model(bf16, quantized, "Q4_0", provenance=False)
    assert main(["quantize", "--no-provenance", str(quantized), "copy"]) == 0
    assert copy.read_bytes() == quantized.read_bytes()
    assert main(["quantize", "--no-provenance", str(bf16), str(copy), "COPY"]) == 0
    with open_gguf(bf16) as source, open_gguf(copy) as result:
        assert (
            source.tensors == result.tensors
            and result.metadata["general.file_type"] == source.metadata["general.file_type"]
        )
        bare = {key: value for key, value in source.metadata.items() if key != "general.file_type"}
        with GGUFWriter(tmp_path / "bare.gguf", bare, source.tensors) as sink:
            for tensor in source.tensors:
                sink.write(tensor, source.read_bytes(tensor, 0, tensor.n_bytes))
    iqforge.quantize_model(tmp_path / "bare.gguf", copy, "COPY")
    with open_gguf(copy) as result:
        # After the type of most of its matrices.
        assert result.metadata["general.file_type"].data == 32
    assert (
        main(["quantize", str(bf16.parent / "hf"), str(copy), "COPY"]) == 1
        and "iqforge convert makes one" in capsys.readouterr().err
    )
