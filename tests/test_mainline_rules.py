"""The mixes of llama.cpp that differ from ik_llama.cpp's: every line of its rules, on models made
for it.
"""

from __future__ import annotations

import pytest
from iqforge.errors import ImatrixError, UsageError
from iqforge.formats.ftypes import FILE_TYPES
from iqforge.formats.source import TensorInfo
from iqforge.quantize.plan.mainline import MAINLINE
from iqforge.quantize.plan.recipe import Recipe

from .planned_models import INNER, model

FLOATS = {"F32", "F16", "BF16"}


def types_of(
    preset: str, made: tuple[list[TensorInfo], dict], imatrix: bool = False, **options
) -> dict[str, str]:
    planned = Recipe(preset, rules="mainline", **options).plan(made[0], made[1], imatrix=imatrix)
    assert [plan.source for plan in planned] == made[0]
    return {plan.source.name.removesuffix(".weight"): plan.target.type.name for plan in planned}


def layers(found: dict[str, str], part: str, kind: str) -> list[int]:
    return [i for i in range(200) if found.get(f"blk.{i}.{part}") == kind]


LOW = "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M"


def table(text: str) -> dict[str, str]:
    """Return types by preset from `PRESET PRESET type, PRESET type`."""
    return {
        name: kind
        for entry in text.split(",")
        for *names, kind in [entry.split()]
        for name in names
    }


ALL = [name for name in FILE_TYPES if name in MAINLINE.presets and name not in FLOATS]


@pytest.mark.parametrize("preset", ALL)
def test_output_and_embeddings(preset):
    base = FILE_TYPES[preset].base.name
    low = table(f"{LOW} IQ3_XXS Q5_K, Q8_0 MXFP4_MOE Q8_0")
    embedding = table(
        "IQ2_XXS IQ2_XS IQ1_S IQ1_M Q2_K, IQ2_S IQ2_M IQ3_XXS IQ3_S, TQ1_0 TQ2_0 Q2_0 Q4_K,"
        " MXFP4_MOE Q8_0"
    )
    found = types_of(preset, model(1))
    assert found["output"] == low.get(preset, "Q6_K") and found["token_embd"] == embedding.get(
        preset, base
    )
    assert types_of(preset, model(1, tied=True))["token_embd"] == low.get(preset, "Q6_K")
    per_layer = types_of(preset, model(1, tied=True, extra=("per_layer_token_embd",)))[
        "per_layer_token_embd"
    ]
    assert per_layer == types_of(preset, model(1, tied=True))["token_embd"]
    assert types_of(preset, model(1, arch="falcon"))["output"] == "Q8_0"
    # A row that the base type cannot hold: Q8_0. One that it can and Q6_K cannot: its fallback is
    # Q8_0 too.
    assert types_of(preset, model(1, n_cols=96))["output"] == "Q8_0"
    if preset != "MXFP4_MOE":
        forced = types_of(preset, model(1), token_embedding_type="q5_0", output_tensor_type="q5_1")
        assert (forced["token_embd"], forced["output"]) == ("Q5_0", "Q5_1")


@pytest.mark.parametrize("preset", LOW.split())
def test_lowest(preset):
    base, good = FILE_TYPES[preset].base.name, preset in ("IQ2_S", "IQ2_M")
    for made, value in (
        (model(), "IQ3_S" if good else "Q2_K"),
        (model(kv_heads=4), "IQ3_S" if good else "Q2_K"),
        (model(kv_heads=2), "Q4_K"),
        (model(experts=4), "Q4_K"),
        (model(experts=8), "Q4_K"),
    ):
        found, eight = types_of(preset, made), made[1]["llama.expert_count"].data == 8
        assert layers(found, "attn_v", value) == list(range(16))
        assert (
            found["blk.3.attn_k"] == ("Q4_K" if eight else base) and found["blk.3.attn_q"] == base
        )
        output = (
            "Q5_K"
            if eight
            else "IQ2_XXS"
            if preset in ("IQ1_S", "IQ1_M")
            else "IQ3_S"
            if good
            else base
        )
        assert found["blk.3.attn_output"] == output
    found = types_of(preset, model())
    assert (
        layers(found, "ffn_down", "IQ3_S" if good else "Q2_K") == [0, 1]
        and found["blk.5.ffn_up"] == base
    )


@pytest.mark.parametrize(
    "preset", [name for name in ALL if name not in LOW.split() and name != "MXFP4_MOE"]
)
def test_values_keys_and_outputs(preset):
    base, one = FILE_TYPES[preset].base.name, model()
    value = table("Q2_K Q3_K, IQ3_XXS IQ3_S, IQ3_M Q4_K, Q3_K_L Q5_K").get(preset, base)
    grouped = table("Q2_K Q2_K_S IQ3_XXS IQ3_XS IQ3_S IQ3_M Q4_K, Q3_K_L IQ4_NL IQ4_XS Q5_K").get(
        preset, base
    )
    counted = {
        "Q3_K": ([0, 1], "Q5_K"),
        "Q3_K_M": ([0, 1], "Q5_K"),
        "Q4_K_S": ([0, 1, 2, 3], "Q5_K"),
    }
    more = ([0, 1, 4, 7, 10, 13, 14, 15], "Q6_K")
    first, kind = counted.get(
        preset, more if preset in ("Q4_K", "Q4_K_M", "Q5_K", "Q5_K_M") else ([], "")
    )
    rest = "Q4_K" if preset in ("Q3_K", "Q3_K_M") else None
    for kv_heads, usual in ((8, value), (4, value), (2, grouped)):
        found = types_of(preset, model(kv_heads=kv_heads))
        assert layers(found, "attn_v", kind) == first if kind else True
        assert {found[f"blk.{i}.attn_v"] for i in range(16) if i not in first} == {rest or usual}
    helped = types_of(preset, one, imatrix=True)["blk.9.attn_v"]  # a layer that no preset counts
    assert 9 not in first and helped == ("IQ3_XXS" if preset == "IQ3_XXS" else rest or value)
    found = types_of(preset, one)
    assert (
        found["blk.3.attn_k"]
        == found["blk.3.attn_q"]
        == table("IQ3_XS IQ3_XXS, IQ3_XXS IQ2_S").get(preset, base)
    )
    output = table("Q2_K Q3_K, IQ3_XXS IQ3_S, Q3_K Q3_K_M IQ3_M Q4_K, Q3_K_L Q5_K")
    assert found["blk.3.attn_output"] == output.get(preset, base)
    falcon = types_of(preset, model(arch="falcon"))
    assert falcon["blk.3.attn_output"] == ("Q4_K" if preset == "Q3_K_L" else base)
    eight = types_of(preset, model(experts=8))
    assert {eight[f"blk.{i}.{part}"] for i in range(16) for part in ("attn_v", "attn_k")} == {
        "Q8_0"
    }
    listed = [
        "Q2_K",
        "IQ3_XS",
        "IQ3_XXS",
        "Q3_K",
        "Q3_K_S",
        "Q3_K_M",
        "IQ4_NL",
        "Q4_K",
        "Q4_K_S",
        "Q4_K_M",
        "IQ3_S",
        "IQ3_M",
        "IQ4_XS",
    ]
    assert eight["blk.3.attn_output"] == ("Q5_K" if preset in listed else base)
    # No separate case, unlike ik_llama.cpp from four experts on.
    sixteen = types_of(preset, model(experts=16))
    assert all(
        sixteen[f"blk.3.{part}"] == found[f"blk.3.{part}"]
        for part in ("attn_v", "attn_k", "attn_output")
    )


@pytest.mark.parametrize(
    "preset", [name for name in ALL if name not in LOW.split() and name != "MXFP4_MOE"]
)
def test_feed_forward(preset):
    base = FILE_TYPES[preset].base.name
    more, every = [0, 1, 4, 7, 10, 13, 14, 15], list(range(16))
    same = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}.get(preset, preset)
    bare = {
        "Q2_K": [("Q3_K", every)],
        "Q2_K_S": [("Q4_K", [0, 1])],
        "IQ3_XXS": [("Q4_K", [0, 1]), ("Q3_K", every[2:])],
        "Q3_K_M": [("Q5_K", [0]), ("Q4_K", every[1:])],
        "IQ3_M": [("Q4_K", [0, 1])],
        "Q3_K_L": [("Q5_K", every)],
        "Q4_K_M": [("Q6_K", more)],
        "Q5_K_M": [("Q6_K", more)],
        "Q4_K_S": [("Q5_K", [0, 1])],
        "IQ4_NL": [("Q5_K", [0, 1])],
        "IQ4_XS": [("Q5_K", [0, 1])],
    }
    helped = {
        **bare,
        "IQ3_XXS": [],
        "IQ4_NL": [],
        "IQ4_XS": [],
        "Q4_0": [("Q4_1", [0, 1])],
        "Q5_0": [("Q5_1", [0, 1])],
    }
    falcon = {
        **bare,
        "Q3_K_M": [("Q5_K", [0]), ("Q4_K", more[1:])],
        "Q3_K_L": [("Q4_K", every)],
        "Q4_K_S": [],
        "Q4_K_M": [("Q6_K", [0]), ("Q5_K", more[1:])],
    }
    eight = {**bare, "IQ3_M": [("Q4_K", more)]}
    for made, imatrix, wanted in (
        (model(), False, bare),
        (model(), True, helped),
        (model(arch="falcon"), False, falcon),
        (model(experts=8), False, eight),
        (model(experts=4), False, bare),
    ):
        found = types_of(preset, made, imatrix)
        end = "_exps" if any("_exps" in name for name in found) else ""
        expected = dict.fromkeys(every, base) | {
            i: kind for kind, indices in wanted.get(same, []) for i in indices
        }
        assert {i: found[f"blk.{i}.ffn_down{end}"] for i in every} == expected
        middle = list(range(2, 14)) if preset == "IQ3_XS" else []
        for part in ("up", "gate"):
            assert {i: found[f"blk.{i}.ffn_{part}{end}"] for i in every} == dict.fromkeys(
                every, base
            ) | dict.fromkeys(middle, "IQ3_XXS")


def test_values_under_other_names_count_together():
    found = types_of("Q4_K_S", model(3, inner=("attn_kv_b", "attn_qkv", "attn_k_b", "attn_q_a")))
    assert [found[f"blk.{i}.{part}"] for i in range(3) for part in ("attn_kv_b", "attn_qkv")] == [
        "Q5_K"
    ] * 4 + ["Q4_K"] * 2
    assert found["blk.1.attn_k_b"] == found["blk.1.attn_q_a"] == "Q4_K"
    assert types_of("Q3_K_L", model(2, inner=("attn_qkv",)))["blk.1.attn_qkv"] == "Q5_K"
    # ik_llama.cpp: as attn_k.
    assert (
        types_of("IQ3_XXS", model(2, inner=("attn_k_b", "attn_q_b")))["blk.1.attn_k_b"] == "IQ3_XXS"
    )


def test_seventy_billion():
    found = {
        name: types_of(name, model(80, 8, 1))
        for name in ("Q2_K_S", "Q3_K_S", "Q4_K_M", "IQ3_M", "Q4_0", "IQ3_XS", "Q6_K")
    }
    kinds = {name: {types[f"blk.{i}.attn_v"] for i in range(80)} for name, types in found.items()}
    assert kinds == {
        "Q2_K_S": {"Q5_K"},
        "Q3_K_S": {"Q5_K"},
        "Q4_K_M": {"Q5_K", "Q6_K"},
        "IQ3_M": {"Q5_K"},
        "Q4_0": {"Q4_0"},
        "IQ3_XS": {"Q5_K"},
        "Q6_K": {"Q6_K"},
    }
    assert types_of("Q2_K", model(80, 8, 4))["blk.9.attn_v"] == "Q5_K"
    assert types_of("Q2_K_S", model(80, 8, 4))["blk.9.attn_v"] == "Q2_K"


def test_experts_only():
    found = types_of("MXFP4_MOE", model(2, experts=4, extra=("blk.1.ffn_up_shexp",)))
    assert {kind for name, kind in found.items() if "_exps" in name} == {"MXFP4"}
    assert {kind for name, kind in found.items() if "_exps" not in name} == {"Q8_0"}


@pytest.mark.parametrize(
    "base, n_cols, instead",
    [
        ("IQ1_S", 96, "IQ4_NL"),
        ("IQ3_XXS", 96, "IQ4_NL"),
        ("IQ4_XS", 96, "IQ4_NL"),
        ("Q2_K", 96, "Q4_0"),
        ("Q3_K_S", 96, "Q4_0"),
        ("TQ2_0", 96, "Q4_0"),
        ("Q2_0", 96, "Q4_0"),
        ("Q4_K_S", 96, "Q5_0"),
        ("Q5_K_S", 96, "Q5_1"),
        ("Q6_K", 96, "Q8_0"),
        ("Q4_0", 90, "F16"),
        ("Q4_K_S", 90, "F16"),
    ],
)
def test_short_rows(base, n_cols, instead):
    assert types_of(base, model(1, n_cols=n_cols))["blk.0.ffn_up"] == instead


def test_what_is_kept():
    recurrent, vision = (
        ("blk.0.time_mix_w1", "blk.0.time_mix_lerp_fused"),
        (
            "v.patch_embd",
            "a.rvq.codebook.0",
        ),
    )
    names = (
        "blk.0.indexer.k_proj",
        "blk.0.shortconv.conv",
        "per_layer_model_proj",
        "blk.0.altup_router",
        "blk.0.ffn_gate_inp",
        *recurrent,
        *vision,
    )
    found = types_of("Q4_0", model(1, extra=(*names, "blk.0.ssm_x", "blk.0.indexer.attn_q_b")))
    assert {found[name] for name in names} == {"F32"} and found["blk.0.ssm_x"] == found[
        "blk.0.indexer.attn_q_b"
    ] == "Q4_0"
    ik = Recipe("Q4_0").plan(*model(1, extra=("blk.0.ssm_x", "blk.0.altup_router")))
    assert {
        p.source.name: p.kept for p in ik if "ssm_x" in p.source.name or "altup" in p.source.name
    } == {"blk.0.ssm_x.weight": True, "blk.0.altup_router.weight": False}
    found = types_of(
        "Q4_0",
        model(
            1,
            arch="glm5-next",
            extra=("blk.0.hc_attn", "blk.0.attn_q_a", "blk.0.nextn.eh_proj", "blk.0.attn_k_b"),
        ),
    )
    assert [
        found[f"blk.0.{name}"] for name in ("hc_attn", "attn_q_a", "nextn.eh_proj", "attn_k_b")
    ] == ["F32", "Q8_0", "Q8_0", "F32"]


def test_patterns_come_first_and_hide_tensors_from_rules_that_count():
    tensors = model(16)
    found = types_of(
        "Q4_K_S",
        tensors,
        tensor_patterns=["blk.[01].ATTN_V=Q8_0", "output=q5_0"],
        output_tensor_type="q5_1",
    )
    assert layers(found, "attn_v", "Q8_0") == [0, 1] and layers(found, "attn_v", "Q5_K") == [
        2,
        3,
        4,
        5,
    ]
    assert found["output"] == "Q5_1" and found["blk.3.attn_output"] == "Q5_0"
    pure = types_of(
        "Q4_K_S", tensors, pure=True, tensor_patterns="attn_v=q6_K", custom_q="attn_k=q8_0"
    )
    assert (pure["blk.3.attn_v"], pure["blk.3.attn_k"], pure["output"]) == ("Q6_K", "Q4_K", "Q4_K")
    made = model(1, extra=("per_layer_token_embd",))
    assert types_of("Q4_0", made, token_embedding_type="q8_0")["per_layer_token_embd"] == "Q8_0"
    named = types_of("Q4_0", made, token_embedding_type="q8_0", tensor_patterns="per_layer=q5_0")
    assert (named["token_embd"], named["per_layer_token_embd"]) == ("Q8_0", "Q5_0")
    ik = Recipe("Q4_0", token_embedding_type="q8_0").plan(*made)
    assert {p.source.name: p.target.type.name for p in ik}["per_layer_token_embd.weight"] == "Q4_0"


def test_who_has_which_preset():
    with pytest.raises(UsageError, match="no preset IQ4_K"):
        Recipe("IQ4_K", rules="mainline").plan(*model(1))
    with pytest.raises(UsageError, match="rules is 'main', expected one of ik, mainline"):
        Recipe("Q4_0", rules="main")
    assert Recipe("TQ1_0").rule_set is MAINLINE  # which only llama.cpp has
    assert Recipe("Q4_K_M").rule_set is not MAINLINE


def test_importances_that_are_demanded():
    recipe, made = Recipe("IQ3_XXS", rules="mainline"), model(1)
    planned = recipe.plan(*made)
    with pytest.raises(ImatrixError, match="needs importances"):
        recipe.check_importance(planned, None)
    ik = Recipe("IQ3_XXS")
    ik.check_importance([p for p in ik.plan(*made) if p.target.type.name == "IQ3_XXS"], None)
    with pytest.raises(ImatrixError, match="needs importances"):
        Recipe("IQ1_S", rules="mainline").check_importance(
            Recipe("IQ1_S", rules="mainline").plan(*made), None
        )
    low = model(1, extra=("per_layer_token_embd",))
    recipe = Recipe("IQ2_XXS", rules="mainline", tensor_patterns="per_layer=iq2_xxs")
    recipe.check_importance(recipe.plan(*low), lambda tensor: tensor.name.startswith("blk."))


# What llama.cpp's own snapshot lists for Qwen3-0.6B (tests/snapshots/qwen3-0.6b.schema), without
# importances: by preset the base type, and tensors of other types, those of layers as PART TYPE,
# with the layers after a colon if not all of them.
SNAPSHOT = """
Q4_0 q4_0: output q6_K | Q4_1 q4_1: output q6_K | Q8_0 q8_0: | Q5_0 q5_0: output q6_K | Q5_1 q5_1: output q6_K | Q6_K q6_K:
Q2_K q2_K: output q6_K, attn_output q3_K, attn_v q3_K, ffn_down q3_K | Q3_K_S q3_K: output q6_K
Q3_K_M q3_K: output q6_K, attn_output q4_K, attn_v q4_K, attn_v q5_K:0-1, ffn_down q4_K, ffn_down q5_K:0
Q3_K_L q3_K: output q6_K, attn_output q5_K, attn_v q5_K, ffn_down q5_K
Q4_K_S q4_K: output q6_K, attn_v q5_K:0-3, ffn_down q5_K:0-2 | Q5_K_S q5_K: output q6_K
Q4_K_M q4_K: output q6_K, attn_v q6_K:0-2 5 8 11 14 17 20 23-27, ffn_down q6_K:0-2 5 8 11 14 17 20 23-27
Q5_K_M q5_K: output q6_K, attn_v q6_K:0-2 5 8 11 14 17 20 23-27, ffn_down q6_K:0-2 5 8 11 14 17 20 23-27
IQ2_XXS iq2_xxs: output q5_K, token_embd q2_K, attn_v q2_K, ffn_down q2_K:0-2
IQ2_XS iq2_xs: output q5_K, token_embd q2_K, attn_v q2_K, ffn_down q2_K:0-2 | Q2_K_S q2_K: output q6_K, ffn_down q4_K:0-2
IQ3_XS iq3_s: output q6_K, attn_k iq3_xxs, attn_q iq3_xxs, ffn_gate iq3_xxs:3-23, ffn_up iq3_xxs:3-23
"""  # noqa: E501 (one line per group of presets)


@pytest.mark.parametrize(
    "entry", [entry.strip() for line in SNAPSHOT.strip().splitlines() for entry in line.split("|")]
)
def test_types_of_a_snapshot_of_the_project(entry):
    head, _, rest = entry.partition(": ")
    preset, base = head.rstrip(":").split()
    expected = dict.fromkeys(
        ("output", "token_embd", *(f"blk.{i}.{part}" for i in range(28) for part in INNER)), base
    )
    for item in filter(None, rest.split(", ")):
        name, kind = item.partition(":")[0].split()
        layers = [
            range(int(a), int(b or a) + 1)
            for a, _, b in (word.partition("-") for word in item.partition(":")[2].split())
        ]
        for i in [i for part in layers for i in part] or range(28):
            expected[name if name in expected else f"blk.{i}.{name}"] = kind
    planned = Recipe(preset, rules="mainline").plan(*model(28, 16, 8, arch="qwen3"))
    assert {
        plan.source.name.removesuffix(".weight"): plan.target.type.type_name for plan in planned
    } == expected
