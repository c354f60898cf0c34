"""Mixes of presets and types given by users, against the plans of ik_llama.cpp's llama-quantize."""

from __future__ import annotations

import json
import logging

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import ImatrixError, ShapeError, UnknownTypeError, UsageError
from iqforge.formats.ftypes import FILE_TYPES, file_type
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import TYPES, ggml_type
from iqforge.formats.values import u32
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.imatrix.files.load import save_imatrix
from iqforge.quantize.commands.flags import configure
from iqforge.quantize.plan.overrides import Overrides
from iqforge.quantize.plan.plan import plan_preset, rules_of
from iqforge.quantize.plan.recipe import Recipe

from .planned_models import expected, llama, model_of
from .shared import shared
from .tiny_checkpoint import make_tiny_llama

GOLDEN_MODELS = [
    "deepseek2_27",
    "fallback",
    "falcon",
    "llama70b_gqa8",
    "llama7b",
    "llama8b_gqa4",
    "llama_gqa2_tied",
    "misc",
    "mixtral8",
    "moe2",
    "moe4",
    "phi3_qkv",
    "qwen3moe128",
    "rows",
]


def check(tensors: list[TensorInfo], metadata: dict, preset: str, wanted: dict, **options) -> None:
    planned = plan_preset(tensors, file_type(preset), metadata, **options)
    names = expected(tensors, wanted)
    found = ["kept" if plan.kept else plan.target.type.type_name for plan in planned]
    assert [(t.name, f, w) for t, f, w in zip(tensors, found, names, strict=True) if f != w] == []
    sizes = sum(
        t.n_bytes if name == "kept" else ggml_type(name).tensor_bytes(t.shape)
        for t, name in zip(tensors, names)
    )
    assert sum(plan.target.n_bytes for plan in planned) == sizes


@pytest.mark.parametrize("model", GOLDEN_MODELS)
def test_every_plan_of_the_reference(model):
    golden = json.loads(shared(f"golden/tools/plan/{model}.json").read_text())
    tensors, metadata = model_of(golden["meta"])
    plans, checked = golden["plan"], 0
    for key, wanted in plans.items():
        preset, _, imatrix = key.partition("+")
        wanted = plans[preset] if wanted == "same" else wanted
        if "error" in wanted:
            with pytest.raises(ShapeError, match="has no fallback"):
                plan_preset(tensors, file_type(preset), metadata, imatrix=bool(imatrix))
        else:
            check(tensors, metadata, preset, wanted, imatrix=bool(imatrix))
        checked += 1
    assert checked == 166


def test_every_case_of_flags_of_the_reference():
    cases = json.loads(shared("golden/tools/plan/cli_cases.json").read_text())
    for case in cases:
        tensors, metadata = model_of(
            json.loads(shared(f"golden/tools/plan/{case['model']}.json").read_text())["meta"]
        )
        args = parsed([*case["args"], "in.gguf", case["ftype"]])
        if "no_such_type" in case["args"]:  # the reference ignores the flag; we do not
            with pytest.raises(UnknownTypeError, match="no_such_type"):
                overrides_of(args)
            args.output_tensor_type = None
        if "Q8_0" in case["args"]:  # which the reference does not know in capitals, and ignores
            assert overrides_of(args).types["output_tensor"] is TYPES["Q8_0"]
            args.output_tensor_type = None
        options = {
            "overrides": overrides_of(args),
            "pure": args.pure,
            "leave_output_tensor": args.leave_output_tensor,
        }
        if case["rc"]:
            with pytest.raises(ShapeError, match="32 is not a multiple of 64"):
                plan_preset(tensors, file_type(case["ftype"]), metadata, **options)
        else:
            check(tensors, metadata, case["ftype"], case, **options)
    assert len(cases) == 24


def parsed(words: list[str]):
    import argparse

    parser = argparse.ArgumentParser()
    configure(parser)
    return parser.parse_args(words)


def overrides_of(args) -> Overrides:
    return Overrides.of(
        args.custom_q or (),
        args.role_types,
        args.token_embedding_type,
        args.output_tensor_type,
    )


# ---- without reference data


def types_of(preset: str, model: tuple[list[TensorInfo], dict], **options) -> dict[str, str]:
    planned = plan_preset(model[0], file_type(preset), model[1], **options)
    return {plan.source.name.removesuffix(".weight"): plan.target.type.name for plan in planned}


def test_medium_mix():
    found = types_of("Q4_K_M", llama())
    more = [i for i in range(16) if i < 2 or i >= 14 or (i - 2) % 3 == 2]
    for part in ("attn_v", "ffn_down"):
        assert [i for i in range(16) if found[f"blk.{i}.{part}"] == "Q6_K"] == more
    assert (
        found["output"] == "Q6_K"
        and found["token_embd"] == found["blk.3.attn_q"] == found["blk.3.ffn_down"] == "Q4_K"
    )
    assert types_of("Q4_K", llama()) == found  # short for it
    assert types_of("Q4_K_M", llama(), pure=True)["blk.0.attn_v"] == "Q4_K"


def test_heads_vocabulary_experts_and_importances_count():
    # Four query heads share a key head: one step up.
    assert types_of("Q4_K_M", llama(kv_heads=2))["blk.3.attn_v"] == "Q5_K"
    assert (
        types_of("Q5_K_S", llama(32, vocabulary=128000))["blk.9.attn_v"]
        == "Q6_K"
        != types_of("Q5_K_S", llama(32))["blk.9.attn_v"]
    )
    moe = types_of("Q3_K_S", llama(8, experts=4))
    assert (
        moe["blk.0.attn_v"] == moe["blk.7.attn_k"] == "Q8_0" and moe["blk.1.attn_output"] == "Q5_K"
    )
    assert moe["blk.1.ffn_up_exps"] == "Q3_K"
    assert [
        types_of("IQ4_XS", llama(), imatrix=given)["blk.0.ffn_down"] for given in (False, True)
    ] == ["Q5_K", "IQ4_XS"]
    # Class 70B, whose rule comes before all others of attn_v.
    assert types_of("Q2_K", llama(80, kv_heads=1))["blk.9.attn_v"] == "Q2_K"
    assert types_of("Q3_K_M", llama(arch="falcon"))["output"] == "Q8_0"
    assert types_of("IQ3_M", llama(tied=True))["token_embd"] == "IQ5_K"
    mixture = types_of("MXFP4_MOE", llama(2, experts=4))
    assert (
        mixture["blk.0.ffn_up_exps"] == "MXFP4"
        and mixture["blk.0.attn_q"] == mixture["token_embd"] == "Q8_0"
    )
    assert (
        types_of("TQ1_0", llama())["token_embd"] == "Q4_K"
        and types_of("TQ1_0", llama(n_cols=64))["blk.0.ffn_up"] == "Q4_0"
    )


@pytest.mark.parametrize("preset", FILE_TYPES)
def test_every_preset_has_a_plan(preset):
    """Every condition and type of its rules is used, on models of all kinds, with rows of all
    multiples of 64.
    """
    for model in (
        llama(),
        llama(80, 16, 2),
        llama(8, 8, 2, experts=8),
        llama(4, n_cols=320, tied=True),
        llama(32, arch="falcon"),
    ):
        for imatrix in (False, True):
            found = types_of(preset, model, imatrix=imatrix)
            assert all(
                tensor.n_cols % TYPES[found[tensor.name.removesuffix(".weight")]].block_size == 0
                for tensor in model[0]
            )
    if (base := file_type(preset).base).name not in (
        "F32",
        "F16",
        "BF16",
        "BF16_R16",
    ) and preset != "MXFP4_MOE":
        assert (
            rules_of(file_type(preset)).chain_of(preset)
            and base.name in types_of(preset, llama()).values()
        )


def test_layers_come_from_names_where_there_are_experts():
    tensors, metadata = llama(8, experts=4)
    shuffled = [tensors[0], *reversed(tensors[1:])]
    assert types_of("Q4_K_S", (shuffled, metadata))["blk.0.ffn_down_exps"] == "Q5_K"
    lost = [TensorInfo("mtp.ffn_down_exps.weight", (4, 16, 256), TYPES["F16"]), *tensors]
    with pytest.raises(UsageError, match="mtp.*need a layer number"):
        types_of("Q4_K_S", (lost, metadata))
    metadata["llama.block_count"] = u32(7)
    with pytest.raises(UsageError, match="blk.7.*is of layer 7, but .* 7 layers"):
        types_of("Q4_K_S", (tensors, metadata))


def test_who_wins(caplog):
    roles = {"attn_v": "q6_0", "ffn_up": "iq4_nl", "attn_qkv": "q8_0"}
    overrides = Overrides.of(["attn_v=q5_0,attn=q5_1", "token_embd=q4_0"], roles, "q8_0")
    with caplog.at_level(logging.WARNING):
        found = types_of("Q4_K_M", llama(2), overrides=overrides)
    assert [found[f"blk.1.{name}"] for name in ("attn_q", "attn_v", "ffn_up")] == [
        "Q5_1",
        "Q5_0",
        "IQ4_NL",
    ]
    assert found["token_embd"] == "Q8_0" and found["output"] == "Q6_K"
    assert [record.getMessage() for record in caplog.records] == [
        "--attn-qkv-type applies to no tensor",
        (
            "--custom-q attn_v=q5_0 and --custom-q attn=q5_1 both want blk.0.attn_v.weight and 1"
            " more tensor(s): the first one counts"
        ),
        (
            "--custom-q token_embd=q4_0 applies to no tensor: those it matches, such as"
            " token_embd.weight, are kept or get their type from elsewhere"
        ),
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        types_of(
            "Q4_K_M",
            llama(2),
            overrides=Overrides.of("ffn_dwon=q8_0", {"ffn_up": "q8_0"}),
            pure=True,
        )
    said = {record.getMessage() for record in caplog.records}
    assert said == {
        "--custom-q ffn_dwon=q8_0 applies to no tensor: no name matches",
        "--ffn-up-type applies to no tensor",
    }


@pytest.mark.parametrize(
    "text, error, said",
    [
        ("attn_q", UsageError, "REGEX=TYPE"),
        ("=q8_0", UsageError, "REGEX=TYPE"),
        ("a(=q8_0", UsageError, "regular expression"),
        ("attn_q=q9", UnknownTypeError, "q9"),
    ],
)
def test_custom_rules_that_are_none(text, error, said):
    with pytest.raises(error, match=said):
        Overrides.of(text)
    with pytest.raises(UsageError, match="unknown roles"):
        Overrides.of(roles={"attn": "q8_0"})


def test_types_of_single_tensors_win_over_everything():
    tensors, metadata = llama(4)
    given = {"blk.1.attn_v.weight": "IQ2_K", "output.weight": "q4_0", "token_embd.weight": "F16"}
    recipe = Recipe("Q4_K_M", custom_q="attn_v=q8_0", output_tensor_type="q8_0", tensor_types=given)
    planned = {plan.source.name: plan for plan in recipe.plan(tensors, metadata)}
    assert [planned[name].target.type.name for name in given] == [
        "IQ2_K",
        "Q4_0",
        "F16",
    ] and planned["token_embd.weight"].kept
    assert planned["blk.0.attn_v.weight"].target.type.name == "Q8_0"
    why = {
        name: planned[f"{name}.weight"].why
        for name in ("blk.1.attn_v", "blk.0.attn_v", "blk.0.attn_k", "blk.2.ffn_down")
    }
    assert list(why.values()) == [
        "given by name",
        "--custom-q attn_v=q8_0",
        "mix of Q4_K_M",
        "mix of Q4_K_M",
    ]
    others = {
        name: plan.target.type
        for name, plan in planned.items()
        if name not in given and "attn_v" not in name
    }
    assert others == {
        name: plan.target.type
        for plan in Recipe("Q4_K_M").plan(tensors, metadata)
        if (name := plan.source.name) in others
    }
    with pytest.raises(UsageError, match="blk.9.attn_v.weight.*did you mean blk..*attn_v"):
        Recipe("Q4_K_M", tensor_types={"blk.9.attn_v.weight": "q8_0"}).plan(tensors, metadata)
    with pytest.raises(ShapeError, match="output.weight.*cannot be IQ4_K: row length 320"):
        Recipe("Q4_K_M", tensor_types={"output.weight": "iq4_k"}).plan(*llama(1, n_cols=320))
    norm = TensorInfo("output_norm.weight", (256,), TYPES["F32"])
    plan = Recipe("Q4_K_M", tensor_types={"output_norm.weight": "F16"}).plan([norm], metadata)[0]
    assert plan.target.type.name == "F16"  # even what is never quantized


# ---- runs


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return iqforge.convert_model(
        make_tiny_llama(folder / "hf"), folder / "tiny.gguf", outtype="bf16"
    )


def imatrix_of(path, without: str = "") -> Imatrix:
    with open_gguf(path) as source:
        return Imatrix(
            {
                t.name: Entry(
                    np.ones((t.n_matrices, t.n_cols)), np.ones(t.n_matrices, dtype=np.int64)
                )
                for t in source.tensors
                if t.name.startswith("blk.") and len(t.shape) > 1 and t.name != without
            },
            1,
            512,
        )


def test_types_that_are_refused_without_importances(bf16, capsys):
    for preset in ("IQ2_XXS", "Q2_K_S", "IQ1_M_R4"):
        with pytest.raises(UsageError, match=f"{preset} is useless"):
            iqforge.quantize_model(bf16, None, preset, dry_run=True)
        assert iqforge.quantize_model(
            bf16, None, preset, dry_run=True, ignore_imatrix_rules=True
        ).target_bytes
        assert iqforge.quantize_model(
            bf16, None, preset, imatrix_of(bf16), dry_run=True
        ).target_bytes
        assert (
            main(["quantize", "--dry-run", str(bf16), preset]) == 1
            and "--imatrix" in capsys.readouterr().err
        )
        with pytest.raises(
            ImatrixError, match="gguf, tensor .blk.1.attn_q.weight.*needs importances"
        ):
            iqforge.quantize_model(
                bf16, None, preset, imatrix_of(bf16, without="blk.1.attn_q.weight"), dry_run=True
            )
    with pytest.raises(ImatrixError, match="IQ2_KT needs importances"):
        iqforge.quantize_model(bf16, None, "IQ2_KT", dry_run=True)
    # The type, in a preset that needs none.
    with pytest.raises(ImatrixError, match="IQ2_S needs importances"):
        iqforge.quantize_model(bf16, None, "Q4_K_M", custom_q="attn_q=iq2_s", dry_run=True)
    assert iqforge.quantize_model(bf16, None, "Q2_K", dry_run=True).target_bytes


def test_a_conversion_is_refused_and_planned_alike(bf16, tmp_path, capsys):
    save_imatrix(imatrix_of(bf16), tmp_path / "m.dat")
    words = [
        "convert",
        str(bf16.parent / "hf"),
        "--outfile",
        str(tmp_path / "m.gguf"),
        "--outtype",
        "iq2_xxs",
        "--dry-run",
    ]
    assert main(words) == 1 and "IQ2_XXS is useless" in capsys.readouterr().err
    assert main([*words, "--imatrix", str(tmp_path / "m.dat")]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    report = iqforge.quantize_model(bf16, None, "IQ2_XXS", tmp_path / "m.dat", dry_run=True)
    assert all(
        f" -> {t.planned.target.type.name} " in lines[t.planned.source.name] for t in report.tensors
    )
    assert len({t.planned.target.type for t in report.tensors}) > 3


def test_the_file_is_as_the_dry_run_predicted(bf16, tmp_path, capsys):
    out = tmp_path / "q.gguf"
    flags = [
        "--custom-q",
        r"blk\.1\.ffn_up=q5_0",
        "--attn-q-type",
        "q4_1",
        "--custom-q",
        "attn_k=q4_0",
    ]
    command = ["quantize", *flags, str(bf16), str(out), "Q4_0"]
    assert main([command[0], "--dry-run", "--verbose", *command[1:]]) == 0 and not out.exists()
    said = capsys.readouterr().out
    assert main(command) == 0
    with open_gguf(out) as result:
        kinds = {t.name: t.type.name for t in result.tensors}
        assert f"{sum(t.n_bytes for t in result.tensors) / 2**20:8.2f} MiB (" in said
        assert result.metadata["general.file_type"].data == 2
    assert (
        kinds["blk.1.ffn_up.weight"],
        kinds["blk.0.ffn_up.weight"],
        kinds["blk.0.attn_q.weight"],
    ) == ("Q5_0", "Q4_0", "Q4_1")
    assert kinds["output.weight"] == "Q6_K" and kinds["blk.1.attn_k.weight"] == "Q4_0"
    for name, kind in kinds.items():
        line = next(line for line in said.splitlines() if f" {name} " in line)
        assert f"converting to {ggml_type(kind).type_name} " in line or (
            "converting" not in line and kind in ("F32", "BF16")
        )


def test_keys_types_and_bytes_of_a_file_of_the_reference(tmp_path):
    theirs, source = (
        shared(f"golden/tools/gguf/tiny-llama-untied{end}.gguf")
        for end in (".Q4_K_M.imatrix", "-f16")
    )
    imatrix = shared("golden/tools/imatrix/tiny-llama-untied.c256x4.dat")
    iqforge.quantize_model(source, tmp_path / "q.gguf", "Q4_K_M", imatrix, provenance=False)
    with open_gguf(theirs) as wanted, open_gguf(tmp_path / "q.gguf") as found:
        assert found.tensors == wanted.tensors
        apart = {
            key
            for key in wanted.metadata.keys() | found.metadata.keys()
            if wanted.metadata.get(key) != found.metadata.get(key)
        }
        # Paths, as they were there.
        assert apart <= {
            "quantize.imatrix.file",
            "quantize.imatrix.dataset",
        }
