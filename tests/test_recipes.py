"""Recipes as texts, and messages about rules."""

from __future__ import annotations

import logging

import pytest
from iqforge.errors import (
    MalformedFileError,
    NotFoundError,
    UnknownTypeError,
    UsageError,
)
from iqforge.quantize.plan.recipe import Recipe
from iqforge.quantize.plan.recipe_file import read_recipe

from .planned_models import llama
from .recipe_text import write

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
    assert read_recipe(write(tmp_path, "type: IQ4_K", "t.yaml")) == {"type": "IQ4_K"}


@pytest.mark.parametrize(
    "text, error, said",
    [
        (
            "preset: Q4_0\npreset: Q5_0",
            UsageError,
            "r.yaml:2: duplicate key 'preset', first at r.yaml:1",
        ),
        ("custom_q:\n  a: q8_0\n  a: q6_K", UsageError, "r.yaml:3: duplicate key 'a'"),
        ("preset: Q4_0\ntype: Q5_0", UsageError, "r.yaml:2: 'type' is another word for 'preset'"),
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
