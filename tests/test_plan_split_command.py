"""`iqforge plan-split` and its predictions."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import iqforge
import pytest
import torch
from iqforge.cli import main
from iqforge.errors import UsageError
from iqforge.runtime import start_ranks
from iqforge.runtime.bench.shapes import SHAPES
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.options import LoadOptions
from iqforge.runtime.parallel.expert_mode import busiest_share
from iqforge.runtime.parallel.ranks import Ranks
from iqforge.runtime.parallel.simulate import H200
from iqforge.runtime.split_model import make_plan, network_of
from iqforge.runtime.split_report import faster_with_fewer, split_report
from iqforge.runtime.weights.switches import Switches

from .shared import shared


def report(spec: str, n: int, **options):
    return split_report(SyntheticSource(spec), (1,) * n, **options)


def test_a_table_of_roles_and_ranks(capsys):
    assert main(["plan-split", "--synthetic", "llama-8b:IQ4_K", "-ts", "2,1,1"]) == 0
    out = capsys.readouterr().out
    assert "llama over 3 ranks (50.0 %, 25.0 %, 25.0 %)" in out
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert rows["attn_norm"].split()[1] == "copy"
    assert rows["attn_q"].split()[:4] == ["attn_q", "rows", "4096", "1024"]
    assert rows["ffn_down"].split()[1] == "columns"
    assert "A token takes 64 sums" in out and "tg" not in rows


def test_speeds_come_with_the_costs_behind_them(capsys):
    assert main(["plan-split", "--simulate", "qwen3moe-tiny:IQ4_K", "-ts", "1,1", "-c", "512"]) == 0
    out = capsys.readouterr().out
    assert "cost on H200s (3.6 TB/s, for experts 2.1," in out
    assert "weights and cache of 512 tokens fit 139.0 GiB:" in out


@pytest.mark.parametrize(
    "shape, layers",
    [
        ("granite-4.0-h-7b", ("state-space layers",)),
        ("falcon-h1-7b", ("state-space layers",)),
        ("kimi-linear-48b-a3b", ("Kimi delta attention",)),
        ("ling-3.0-8b", ("Kimi delta attention",)),
        ("lfm2-1.2b", ("short convolutions",)),
        ("llama-8b", ()),
    ],
)
def test_layers_that_are_predicted_as_delta_nets_are_named(capsys, shape, layers):
    assert main(["plan-split", "--simulate", f"{shape}:IQ4_K,layers=6", "-ts", "1,1"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "delta nets" in line]
    assert said == [f"Not measured, and predicted as delta nets: {name}." for name in layers]


def test_a_model_may_use_all_of_its_experts(capsys, monkeypatch):
    shape = SHAPES["qwen3moe-tiny"]
    monkeypatch.setitem(SHAPES, "every-expert", replace(shape, n_used=shape.n_experts))
    assert main(["plan-split", "--simulate", "every-expert:IQ4_K", "-ts", "2,1"]) == 0
    assert "One GPU generates fastest." in capsys.readouterr().out


def test_json_has_the_plan_and_the_prediction(capsys):
    words = ["plan-split", "--simulate", "deepseek-v3:IQ2_K", "-ts", "1,1,1,1,1,1,1,1", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["architecture"] == "deepseek2" and len(found["layers"]) == 61
    assert len(found["weights"]) == 8 and found["prediction"]["n_sums"] == 122
    alone = found["fewer"][0]["prediction"]
    assert found["prediction"]["step_rate"] > alone["step_rate"] > 0
    assert sum(sum(role["n_bytes"]) for role in found["roles"]) == sum(found["weights"])


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "gpt_oss_mxfp4"])
def test_files_are_planned(capsys, name):
    path = shared(f"golden/convert/{name}/expected-f32.gguf")
    assert main(["plan-split", "-m", str(path), "-ts", "1,1"]) == 0
    by_flag = capsys.readouterr().out
    assert main(["plan-split", str(path), "-ts", "1,1"]) == 0
    assert "2 ranks" in by_flag and capsys.readouterr().out == by_flag


@pytest.mark.parametrize(
    "words, message",
    [
        ("-ts 1,1", "exactly one of MODEL and --synthetic"),
        ("--synthetic llama-8b:IQ4_K -ts 1,x", "-ts is '1,x'"),
        ("--synthetic llama-8b:IQ4_K -ts 1", "-ts has 1 share"),
        ("--synthetic llama-8b:IQ4_K -ts 0,0", "not all of them 0"),
        ("--synthetic llama-8b:IQ4_K -ts 1,1 -c -1", "-c is -1"),
        ("--synthetic llama-8b:IQ4_K -ts 1,1,1 --hosts 2", "cannot be on 2 hosts"),
        ("--synthetic llama-9b:IQ4_K -ts 1,1", "there is no shape 'llama-9b'"),
        ("--synthetic llama-8b:IQ4_K --simulate llama-8b:IQ4_K -ts 1,1", "both name a model"),
    ],
)
def test_what_is_not_possible_is_refused(capsys, words, message):
    assert main(["plan-split", *words.split()]) != 0
    assert message in capsys.readouterr().err


def test_a_context_of_0_is_what_the_model_was_trained_for(capsys):
    words = ["plan-split", "--synthetic", "llama-8b:IQ4_K", "-ts", "1,1", "-c"]
    assert main([*words, "0"]) == 0
    out = capsys.readouterr().out
    assert "cache of 131072" in out
    assert main([*words, "131072"]) == 0 and capsys.readouterr().out == out


def test_gpus_that_cannot_hold_a_model_have_no_speed(capsys):
    assert main(["plan-split", "--simulate", "deepseek-v3:IQ4_K", "-ts", "1,1"]) == 0
    out = capsys.readouterr().out
    assert out.count("does not fit") == 4 and "fastest" not in out
    assert main(["plan-split", "--simulate", "deepseek-v3:IQ4_K", "-ts", "1,1,1,1"]) == 0
    assert capsys.readouterr().out.count("does not fit") == 4  # one and two GPUs


def test_a_step_adds_up_a_dense_layer_and_experts_together():
    found = report("gemma4:IQ4_K", 2).prediction
    assert found.n_sums == 30 * 3
    first, _ = H200.step_sum
    assert found.sums_of_step == pytest.approx((30 * 2 + 1) * first)


def test_what_changes_nothing_in_a_plan_is_said(capsys):
    model = ["plan-split", "--synthetic", "llama-8b:IQ4_K", "-ts"]
    assert main([*model, "1,0,3"]) == 0
    said = capsys.readouterr()
    assert "over 2 ranks (25.0 %, 75.0 %)" in said.out and "1 of 3 shares of -ts are 0" in said.err
    assert main([*model, "1,1", "--hosts", "2", "-d", "9"]) == 0
    assert "note: --hosts, -d change nothing here" in capsys.readouterr().err
    assert main([*model, "0,1"]) != 0
    assert "-ts is '0,1': one GPU alone has a share" in capsys.readouterr().err
    assert main([*model, "1,0", "--hosts", "2"]) == 0  # torchrun starts both
    assert "over 2 ranks (100.0 %, 0.0 %)" in capsys.readouterr().out


def test_ranks_hold_the_model_and_the_copies():
    found = report("qwen3-30b-a3b:IQ4_KS", 4)
    # Columns that are cut have their row header on every rank; here experts are whole.
    headers = sum(
        3 * 4 * t.n_rows
        for t in SyntheticSource("qwen3-30b-a3b:IQ4_KS").tensors
        if t.name.endswith("attn_output.weight")
    )
    assert sum(found.weights) == found.whole + 3 * found.copied + headers


def test_the_cache_is_split_by_heads_and_copied_for_latent_attention():
    alone = 8192 * 32 * 8 * 2 * 128 * 2
    assert sum(report("llama-8b:IQ4_K", 4).cache) == alone
    one, *others = report("deepseek-v2-lite:IQ4_K", 2).cache
    assert one == others[0] == 8192 * 27 * 576 * 2


def test_bytes_that_move_are_those_of_a_ring():
    p = report("llama-70b:IQ4_K", 4, n_prompt=512).prediction
    sums, width = 2 * 80, 8192
    assert p.n_sums == sums
    assert p.prompt_moved == pytest.approx(sums * 1.5 * 512 * width * 2 + 4 * 128256 * 0.75)


# pp2048 and tg64 on H200s, one and two 2026-11-28, four 2026-11-27: GPUs, tokens before, tokens/s.
MEASURED = [
    ("llama-8b:IQ4_K", 1, 0, 41142, 663),
    ("llama-70b:IQ4_K", 1, 0, 4370, 93.2),
    ("qwen3-30b-a3b:IQ4_K", 1, 0, 60336, 809),
    ("glm-4.5-air:IQ4_K", 1, 0, 19417, 317),
    ("deepseek-v2-lite:IQ4_K", 1, 0, 75369, 899),
    ("qwen3.5-35b-a3b:IQ4_K", 1, 0, 37769, 705),
    ("qwen3-235b-a22b:IQ4_K", 1, 0, 9715, 172.7),  # 2026-11-27
    ("gpt-oss-20b:MXFP4", 1, 0, 73335, 940),
    ("gemma3-27b:IQ4_K", 1, 0, 10359, 193.9),  # 2026-11-23
    ("llama-70b:IQ4_K", 1, 32768, 2103, 74.3),
    ("qwen3.5-35b-a3b:IQ4_K", 1, 32768, 23866, 614),
    ("deepseek-v2-lite:IQ4_K", 1, 32768, 20010, 678),
    ("llama-8b:IQ4_K", 1, 32768, None, 380.9),
    ("qwen3-30b-a3b:IQ4_K", 1, 32768, None, 447.6),
    ("llama-8b:IQ4_K", 2, 0, 70646, 789),
    ("llama-70b:IQ4_K", 2, 0, 7616, 145.0),
    ("qwen3-30b-a3b:IQ4_K", 2, 0, 81003, 727),
    ("glm-4.5-air:IQ4_K", 2, 0, 31439, 407),
    ("glm-4.5-air:IQ4_K,layers=16", 2, 0, 92722, 1061),
    ("qwen3-235b-a22b:IQ4_K,layers=24", 2, 0, 64762, 773),
    ("deepseek-v2-lite:IQ4_K", 2, 0, 107133, 972),
    ("qwen3.5-35b-a3b:IQ4_K", 2, 0, 52322, 758),
    ("gpt-oss-20b:MXFP4", 2, 0, 105442, 1062),
    ("llama-70b:IQ4_K", 2, 32768, 3966, 121.2),
    ("deepseek-v2-lite:IQ4_K", 2, 32768, 35222, 707),
    ("qwen3.5-35b-a3b:IQ4_K", 2, 32768, 37476, 682),
    ("llama-8b:IQ4_K", 4, 0, 101744, 952),
    ("llama-70b:IQ4_K", 4, 0, 14055, 198.8),
    ("glm-4.5-air:IQ4_K", 4, 0, 44746, 504),
    ("deepseek-v2-lite:IQ4_K", 4, 0, 139115, 1010),
    ("gpt-oss-20b:MXFP4", 4, 0, 134303, 1286),
    ("deepseek-v3:IQ4_K", 4, 0, 11756, 217),
    ("llama-70b:IQ4_K", 4, 32768, 7324, 166.5),
    ("glm-4.5-air:IQ4_K", 4, 32768, 11120, 338.4),
    ("deepseek-v2-lite:IQ4_K", 4, 32768, 54591, 730.4),
    # Steps of whole experts have become faster since four GPUs were measured.
    ("qwen3-30b-a3b:IQ4_K", 4, 0, 91467, None),
    ("qwen3-235b-a22b:IQ4_K", 4, 0, 22333, None),
    ("qwen3.5-35b-a3b:IQ4_K", 4, 0, 69151, None),
    ("qwen3.5-35b-a3b:IQ4_K", 4, 32768, 54757, None),
]


QUICK = {"llama-8b:IQ4_K", "deepseek-v2-lite:IQ4_K", "gpt-oss-20b:MXFP4"}


@pytest.mark.parametrize(
    "spec, gpus, n_past, prompt, step",
    [
        pytest.param(*row, marks=[] if row[0] in QUICK else [pytest.mark.slow, pytest.mark.full])
        for row in MEASURED
    ],
)
def test_predictions_are_near_what_is_measured(spec, gpus, n_past, prompt, step):
    found = report(spec, max(gpus, 2), n_past=n_past)
    predicted = found.alone if gpus == 1 else found.prediction
    assert prompt is None or predicted.prompt_rate == pytest.approx(prompt, rel=0.15)
    assert step is None or predicted.step_rate == pytest.approx(step, rel=0.12)


def test_small_active_models_gain_nothing_in_steps():
    small, large = report("qwen3-30b-a3b:IQ4_K", 4), report("llama-70b:IQ4_K", 4)
    assert small.prediction.step > small.alone.step
    assert large.prediction.step < 0.5 * large.alone.step
    far = report("llama-70b:IQ4_K", 4, n_hosts=2)
    assert far.prediction.step > large.prediction.step
    deep = report("llama-70b:IQ4_K", 4, n_past=32768)
    assert deep.prediction.step > large.prediction.step
    assert deep.prediction.prompt > 1.5 * large.prediction.prompt  # attention to what is before


def test_fewer_gpus_are_named_where_they_generate_faster():
    def said(spec: str, room: float, gpus: int):
        source = SyntheticSource(spec)
        plan = make_plan(source, (1,) * gpus)
        return faster_with_fewer(source, network_of(source), plan, room)

    assert "one GPU is predicted to generate faster than 4" in said("qwen3-30b-a3b:IQ4_K", 1e11, 4)
    assert said("qwen3-30b-a3b:IQ4_K", 10e9, 2) is None  # it does not fit one
    assert said("llama-70b:IQ4_K", 100e9, 4) is None
    found = said("deepseek-v2-lite:IQ4_K", 100e9, 8)
    assert "4 GPUs are predicted to generate faster than 8" in found and "prompts slower" in found
    assert said("deepseek-v2-lite:IQ4_K", 1e9, 8) is None  # four have too little memory


def test_a_report_has_fewer_gpus_too():
    found = report("deepseek-v2-lite:IQ4_K", 8)
    assert [few.n_gpus for few in found.fewer] == [1, 2, 4] and found.fastest == 4
    four = report("deepseek-v2-lite:IQ4_K", 4)
    assert found.fewer[2].prediction == four.prediction
    assert found.fewer[2].weights == max(four.weights)
    assert found.fewer[2].cache == max(four.cache)
    assert found.as_dict()["fewer"][2]["prediction"]["step_rate"] == four.prediction.step_rate


@pytest.mark.parametrize("how", ["columns", "whole"])
def test_ranks_split_experts_as_they_are_told(monkeypatch, how):
    group = SimpleNamespace(rank=1, ranks=Ranks(1, 2, 1, 2, launched=True))
    monkeypatch.setattr(start_ranks, "joined", lambda options, device: group)
    options = LoadOptions(split_mode="graph", tensor_split="1,1", split_experts=how, device="cpu")
    source = SyntheticSource("qwen3-30b-a3b:IQ4_K")
    share = start_ranks.joined_part(options, torch.device("cpu"), source, Switches())
    assert share.rank == 1 and share.layer(0).expert_mode == how


def test_the_busiest_rank_of_a_token():
    assert busiest_share((4, 4), 1) == 1
    # Two of four experts on two ranks: both on one rank in 2 of 6 choices.
    assert busiest_share((2, 2), 2) == pytest.approx((2 * 1 + 4 * 0.5) / 6)
    assert busiest_share((128, 0), 8) == 1


def test_python_has_it_too():
    found = iqforge.plan_split("llama-8b:IQ4_K", (1, 1), synthetic=True, n_prompt=512)
    assert found.prediction.n_prompt == 512
    with pytest.raises(UsageError, match="-ts"):
        iqforge.plan_split("llama-8b:IQ4_K", (1,), synthetic=True)
