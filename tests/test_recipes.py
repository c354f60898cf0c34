"""Recipe files, saved plans, COPY, and messages about rules."""

from __future__ import annotations

import json
import logging

import iqforge
import pytest
from iqforge.api.plan import plan_quantization
from iqforge.cli import main
from iqforge.errors import (
    IqforgeError,
    MalformedFileError,
    NotFoundError,
    UnknownTypeError,
    UsageError,
)
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.quantize.plan.recipe import Recipe
from iqforge.quantize.plan.recipe_file import read_recipe
from iqforge.quantize.plan.saved_plan import load_plan

from .planned_models import llama
from .tiny_checkpoint import make_tiny_llama

SCRIPT = r"""#!/usr/bin/env bash

# My own mix, "quoted" in a comment
custom="
## Attention [0-3]
blk\..*\.attn_q.*=q6_K   # all of them
blk\.(0|1)\.attn_v=q8_0,

blk\..*\.ffn_down\.weight=iq4_nl,blk\..*\.ffn_(gate|up)\.weight=q5_0
output\.weight=\
q6_0
"

custom=$(echo "$custom" | grep -v '^#' | sed -Ez 's:\n+:,:g;s:,$::;s:^,::')
./llama-quantize --custom-q "$custom" in.gguf out.gguf Q4_0 24
"""
RULES = [
    r"blk\..*\.attn_q.*=q6_K",
    r"blk\.(0|1)\.attn_v=q8_0",
    r"blk\..*\.ffn_down\.weight=iq4_nl",
    r"blk\..*\.ffn_(gate|up)\.weight=q5_0",
    r"output\.weight=q6_0",
]


def write(folder, text: str, name: str = "r.txt"):
    path = folder / name
    path.write_text(text)
    return path


def types_of(recipe: Recipe, model) -> dict[str, str]:
    return {
        plan.source.name.removesuffix(".weight"): plan.target.type.type_name
        for plan in recipe.plan(*model)
    }


def test_text_as_it_is_shared(tmp_path):
    pasted = read_recipe(write(tmp_path, SCRIPT))["custom_q"]
    assert [rule.text for rule in pasted] == RULES
    assert [rule.origin for rule in pasted] == [f"r.txt:{line}" for line in (6, 7, 9, 9, 10)]
    plain = SCRIPT.split('custom="')[1].split('"\n\ncustom')[0]
    for text in (
        plain,
        ",\n".join(RULES),
        ",\n".join(RULES) + ",",
        ",".join(RULES),
        "\n".join(RULES) + "\n",
        ",\\\n".join(RULES),
    ):
        assert [rule.text for rule in read_recipe(write(tmp_path, text))["custom_q"]] == RULES
    assert [
        rule.text for rule in read_recipe(write(tmp_path, " ".join(RULES)))["custom_q"]
    ] == RULES
    found = types_of(Recipe("Q4_0", custom_q=pasted), llama(4))
    assert [found[f"blk.{i}.attn_v"] for i in range(4)] == ["q8_0", "q8_0", "q4_0", "q4_0"]
    assert (found["blk.3.attn_q"], found["blk.3.ffn_up"], found["output"]) == (
        "q6_K",
        "q5_0",
        "q6_0",
    )
    # Commas and equals signs in expressions.
    assert [
        rule.text
        for rule in read_recipe(write(tmp_path, r"blk\.\d{1,2}\.attn=q8_0, (?=x)y=q6_K"))[
            "custom_q"
        ]
    ] == [
        r"blk\.\d{1,2}\.attn=q8_0",
        "(?=x)y=q6_K",
    ]


@pytest.mark.parametrize(
    "text, error, said",
    [
        ("a=q8_0\nattn_q\n", UsageError, "r.txt:2: 'attn_q' is not REGEX=TYPE"),
        ("# x\n\na(=q8_0", UsageError, "r.txt:3: .*regular expression"),
        ("a=q8_0\nb=q9_0", UnknownTypeError, "r.txt:2: in 'b=q9_0'.*unknown ggml type"),
        ('custom="\na=q8_0\n', UsageError, "r.txt:1: the quote"),
    ],
)
def test_text_that_is_none(tmp_path, text, error, said):
    with pytest.raises(error, match=said):
        read_recipe(write(tmp_path, text))
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MalformedFileError, match="UTF-8"):
        read_recipe(tmp_path / "b.txt")
    with pytest.raises(NotFoundError, match="recipe file not found"):
        read_recipe(tmp_path / "none.txt")


YAML = r"""
preset: q4_k_m
rules: mainline
custom_q:
  - blk\.0\.attn_q=q8_0   # the first block
  - 'attn_k': q6_K
  - attn_output=q5_0, ffn_gate=q5_1
tensor_type:
  blk\.1\.attn_k: q8_0
tensors:
  blk.3.ffn_up.weight: iq4_nl
roles: {attn-v: q8_0, ffn_down_type: q5_0}
token_embedding_type: q8_0
output-tensor-type: q6_K
pure: false
allow_requantize: true
"""


def test_yaml(tmp_path):
    fields = read_recipe(write(tmp_path, YAML, "r.yaml"))
    assert [rule.text for rule in fields.pop("custom_q")] == [
        r"blk\.0\.attn_q=q8_0",
        "attn_k=q6_K",
        "attn_output=q5_0",
        "ffn_gate=q5_1",
    ]
    patterns = fields["tensor_patterns"]
    assert [str(rule) for rule in fields.pop("tensor_patterns")] == [
        r"r.yaml:9 blk\.1\.attn_k=q8_0"
    ]
    assert fields == {
        "type": "q4_k_m",
        "rules": "mainline",
        "tensor_types": {"blk.3.ffn_up.weight": "iq4_nl"},
        "role_types": {"attn_v": "q8_0", "ffn_down": "q5_0"},
        "token_embedding_type": "q8_0",
        "output_tensor_type": "q6_K",
        "pure": False,
        "allow_requantize": True,
    }
    found = types_of(Recipe(**fields, tensor_patterns=patterns), llama(4))
    assert (found["blk.1.attn_k"], found["blk.3.ffn_up"], found["blk.2.ffn_down"]) == (
        "q8_0",
        "iq4_nl",
        "q5_0",
    )
    block = "preset: 15\ncustom_q: |\n  # comment\n  a=q8_0,\n  b=q6_K\n"
    fields = read_recipe(write(tmp_path, block, "r.yml"))
    assert fields["type"] == "15" and [str(rule) for rule in fields["custom_q"]] == [
        "r.yml:4 a=q8_0",
        "r.yml:5 b=q6_K",
    ]
    assert read_recipe(write(tmp_path, "", "e.yaml")) == {}


@pytest.mark.parametrize(
    "text, error, said",
    [
        (
            "preset: Q4_0\npreset: Q5_0",
            UsageError,
            "r.yaml:2: duplicate key 'preset', first at r.yaml:1",
        ),
        ("custom_q:\n  a: q8_0\n  a: q6_K", UsageError, "r.yaml:3: duplicate key 'a'"),
        (
            "output_tensor_type: a\noutput-tensor-type: b",
            UsageError,
            "r.yaml:2: duplicate key 'output-tensor-type'",
        ),
        (
            "preset: Q4_0\ncustom-p: x",
            UsageError,
            "r.yaml:2: unknown key 'custom-p'; did you mean 'custom_q'",
        ),
        (
            "roles:\n  attn_vv: q8_0",
            UsageError,
            "r.yaml:2: unknown role 'attn_vv'; did you mean 'attn_v'",
        ),
        ("- a\n- b", UsageError, "r.yaml:1: a recipe must be a mapping"),
        ("pure: yes", UsageError, "r.yaml:1: pure must be true or false, not 'yes'"),
        ("preset: [a]", UsageError, "r.yaml:1: preset must be a single word"),
        ("preset: Q4_0\n  x: [", MalformedFileError, "line 2: "),
        ("custom_q: {a: q99}", UnknownTypeError, "r.yaml:1: in 'a=q99'"),
        ("custom_q: [[a=q8_0, b]]", UsageError, "'b' is not REGEX=TYPE"),
        ("preset: !!python/object/apply:os.system [x]", UsageError, "preset must be a single word"),
        ("a: *b", MalformedFileError, "undefined alias"),
        ("preset: \x01", MalformedFileError, "not valid YAML"),
        ("custom_q: &a [*a]", MalformedFileError, "nested"),
        ("custom_q: " + "[" * 3000 + "]" * 3000, MalformedFileError, "nested too deeply"),
    ],
)
def test_yaml_that_is_none(tmp_path, text, error, said):
    with pytest.raises(error, match=said):
        read_recipe(write(tmp_path, text, "r.yaml"))


def test_rules_that_compete_or_count_for_nothing(caplog):
    tensors, metadata = llama(4)
    rules = [
        "blk.0.attn_v=q8_0,attn_v=q6_K,attn=q5_0,attn_v=q4_1,nothing=q8_0",
        "ffn_up=q4_0",
        "blk.2.ffn_up=q4_0",
    ]
    with caplog.at_level(logging.WARNING):
        Recipe("Q4_0", custom_q=rules).plan(tensors, metadata)
    q = "--custom-q "
    first = "blk.0.attn_v.weight"
    assert [record.getMessage() for record in caplog.records] == [
        f"{q}blk.0.attn_v=q8_0 and {q}attn_v=q6_K both want {first}: the first one counts",
        f"{q}blk.0.attn_v=q8_0 and {q}attn=q5_0 both want {first}: the first one counts",
        (
            f"{q}attn_v=q6_K and {q}attn=q5_0 both want blk.1.attn_v.weight and 2 more tensor(s):"
            " the first one counts"
        ),
        (
            f"{q}attn_v=q4_1 applies to no tensor: earlier rules such as"
            f" {q}blk.0.attn_v=q8_0 take all that it matches"
        ),
        f"{q}nothing=q8_0 applies to no tensor: no name matches",
    ]
    with pytest.raises(
        UsageError, match="attn_v=q4_1 applies to no tensor.*; --custom-q nothing=q8_0 applies"
    ):
        Recipe("Q4_0", custom_q=rules, strict=True).plan(tensors, metadata)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        Recipe("Q4_0", custom_q="attn=q8_0", strict=True).plan(tensors, metadata)
    assert not caplog.records


def test_rules_for_kept_tensors():
    from iqforge.formats.source import TensorInfo
    from iqforge.formats.types import TYPES

    tensors, metadata = llama(1)
    tensors.append(TensorInfo("output_norm.weight", (256,), TYPES["F32"]))
    # As shared recipes have it: true, and no mistake.
    Recipe("Q4_0", custom_q="output_norm=f32", strict=True).plan(tensors, metadata)
    with pytest.raises(
        UsageError,
        match=(
            "output_norm=q8_0 applies to no tensor: those it matches, such as"
            " output_norm.weight, are kept"
        ),
    ):
        Recipe("Q4_0", custom_q="output_norm=q8_0", strict=True).plan(tensors, metadata)


# ---- files


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
