"""The types that tensors get from a preset and from users, before anything is read."""

from __future__ import annotations

import json

import pytest
from iqforge.errors import (
    UnknownTypeError,
    UsageError,
)
from iqforge.formats.ftypes import FILE_TYPES, file_type
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.quantize.plan.roles import is_candidate

from .shared import shared
from .uniform_plan import plan_uniform


def info(name, shape, kind="F16"):
    return TensorInfo(name, shape, ggml_type(kind))


GOLDEN_PLANS = [
    "deepseek2_27",
    "fallback",
    "falcon",
    "llama70b_gqa8",
    "llama7b",
    "llama_gqa2_tied",
    "misc",
    "mixtral8",
    "moe2",
    "phi3_qkv",
    "qwen3moe128",
    "rows",
]


@pytest.mark.parametrize("model", GOLDEN_PLANS)
def test_candidates_are_the_reference_s(model):
    golden = json.loads(shared(f"golden/tools/plan/{model}.json").read_text())
    plan = golden["plan"]["F16"]
    kept = set(plan.get("except", {}).get("kept", []))
    for index, (name, dims) in enumerate(golden["meta"]["tensors"]):
        tensor = info(name, tuple(reversed(dims)), "F32")
        assert is_candidate(tensor) == (index not in kept), name


def test_pure_plan_is_the_reference_s():
    meta = json.loads(shared("golden/tools/plan/llama7b.json").read_text())["meta"]
    case = next(
        c
        for c in json.loads(shared("golden/tools/plan/cli_cases.json").read_text())
        if c["args"] == ["--pure"]
    )
    expected = {i: t for t, indices in case["except"].items() for i in indices}
    planned = plan_uniform(
        [info(n, tuple(reversed(d)), "F32") for n, d in meta["tensors"]],
        file_type(case["ftype"]).base,
    )
    for index, plan in enumerate(planned):
        wanted = expected.get(index, case["default"])
        assert (wanted == "kept" and plan.kept) or plan.target.type.type_name == wanted


def test_tensors_that_are_never_quantized():
    for name, shape in [
        ("blk.0.attn_norm.weight", (256,)),
        ("blk.0.attn_q_norm.weight", (4, 256)),
        ("blk.0.ffn_gate_inp.weight", (8, 256)),
        ("blk.0.attn_q.bias", (2, 256)),
        ("blk.0.one.weight", (1, 256)),
        ("rope_freqs.weight", (32,)),
    ]:
        assert plan_uniform([info(name, shape, "F32")], ggml_type("Q8_0"))[0].kept, name
    assert not plan_uniform([info("blk.0.ffn_down_exps.weight", (8, 16, 256))], ggml_type("Q8_0"))[
        0
    ].kept


def test_rows_that_do_not_fit_get_the_stand_in():
    def target(name, shape, kind):
        plan = plan_uniform([info(name, shape)], ggml_type(kind))[0]
        assert plan.note
        return plan.target.type.name

    assert target("blk.0.ffn_up.weight", (64, 96), "IQ4_K") == "Q5_0"
    assert target("blk.0.ffn_up.weight", (64, 96), "Q6_K") == "Q8_0"
    assert target("blk.0.ffn_up.weight", (64, 96), "IQ2_K") == "IQ4_NL"
    assert target("blk.0.ffn_up.weight", (64, 90), "IQ2_K") == "F16"
    assert target("blk.0.ffn_up.weight", (64, 90), "Q8_0") == "F16"
    assert target("blk.0.ffn_up.weight", (66, 256), "IQ4_K_R4") == "IQ4_K"
    assert target("token_embd.weight", (64, 256), "IQ4_K_R4") == "IQ4_K"


def test_overrides_win_and_requantizing_needs_leave():
    tensors = [
        info("token_embd.weight", (64, 256)),
        info("output.weight", (64, 256)),
        info("blk.0.ffn_up.weight", (64, 256)),
    ]
    planned = plan_uniform(
        tensors, ggml_type("IQ2_K"), token_embedding_type="q8_0", output_tensor_type="Q6_K"
    )
    assert [p.target.type.name for p in planned] == ["Q8_0", "Q6_K", "IQ2_K"]
    assert plan_uniform(tensors, ggml_type("IQ2_K"), leave_output_tensor=True)[1].kept
    with pytest.raises(UsageError, match="allow-requantize"):
        plan_uniform([info("blk.0.ffn_up.weight", (64, 256), "Q8_0")], ggml_type("IQ2_K"))
    assert plan_uniform([info("blk.0.ffn_up.weight", (64, 256), "Q8_0")], ggml_type("Q8_0"))[0].kept
    assert not plan_uniform(
        [info("blk.0.ffn_up.weight", (64, 256), "Q8_0")], ggml_type("Q4_0"), allow_requantize=True
    )[0].kept


def test_preset_names():
    assert file_type("iq4_k").number == 140 and file_type("IQ2_S").base.name == "IQ2_XS"
    assert [file_type(number).name for number in (12, "15", 17, 29, 7)] == [
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "IQ2_M",
        "Q8_0",
    ]
    assert file_type("Q4_K").number == file_type("Q4_K_M").number == 15
    with pytest.raises(UnknownTypeError, match="IQ4_K"):
        file_type("IQ4K")
    assert len(FILE_TYPES) > 90
