"""Every command that loads a model has every flag of loading one, and uses its value."""

from __future__ import annotations

import argparse

import pytest
import torch
from iqforge import cli
from iqforge.commandline.table import COMMANDS
from iqforge.runtime.commands.ignored_flags import IGNORED
from iqforge.runtime.commands.speed import flags as bench_flags
from iqforge.runtime.commands.speed.settings import load_options
from iqforge.runtime.options import SPLIT_FIELDS, LoadOptions

QUANTIZERS = {"convert", "quantize", "quantize-stats", "quantize-bench"}  # --device is where to
LISTS = ("bench", "sweep-bench", "profile")
GIVEN = {  # field: (words, value)
    "precision": ("--precision bf16", "bf16"),
    "gpu_layers": ("-ngl 3", 3),
    "override_tensor": ("-ot a=CPU", ("a=CPU",)),
    "n_cpu_moe": ("--n-cpu-moe 2", 2),
    "ubatch": ("-ub 64", 64),
    "cache_size": ("--cache-size 7", 7),
    "cache_type_k": ("-ctk q8_0", "q8_0"),
    "cache_type_v": ("-ctv q8_0", "q8_0"),
    "k_cache_hadamard": ("-khad", True),
    "v_cache_hadamard": ("-vhad", True),
    "swa_full": ("--swa-full", True),
    "flash_attn": ("--no-fa", False),
    "attention_max_batch": ("-amb 3", 3),
    "expert_reduction": ("-ser 4,1", "4,1"),
    "merge_gate_up": ("-muge", True),
    "mla": ("-mla 1", 1),
    "sparse_attention": ("-dsa off", False),
}


def flags_of(command: str) -> dict[str, argparse.Action]:
    parser, _ = cli._parser(command)
    return {flag: action for action in parser._actions for flag in action.option_strings}


def loading() -> list[str]:
    return [name for name in COMMANDS if name not in QUANTIZERS and "--device" in flags_of(name)]


def test_the_commands_that_load_a_model():
    assert {"generate", "chat", "perplexity", "embedding", "imatrix", "auto", *LISTS} < {*loading()}


@pytest.mark.parametrize("command", loading())
def test_every_flag_of_loading_is_known(command):
    known = flags_of(command)
    for name in LoadOptions.field_names():
        missing = [flag for flag in LoadOptions.flag_of(name).spellings if flag not in known]
        assert not missing, f"{command} has no {missing}"
    missing = [flag for ignored in IGNORED for flag in ignored.spellings if flag not in known]
    assert not missing, f"{command} has no {missing}"


def test_every_field_is_tried():
    assert {*GIVEN, *SPLIT_FIELDS, "threads", "cpu_moe"} == {*LoadOptions.field_names()}


@pytest.mark.parametrize("command", LISTS)
@pytest.mark.parametrize("field", GIVEN)
def test_commands_with_lists_load_as_they_are_told(command, field):
    words, value = GIVEN[field]
    args = cli._parser(command)[0].read(["-m", "x", *words.split()])
    [setting] = bench_flags.settings_matrix(args)
    setting["precision"] = setting["precision"] or "f32"
    given = getattr(load_options(setting, torch.device("cpu")), field)
    assert {"on": True, "off": False}.get(given, given) == value
    assert given != LoadOptions.default_of(field)
    one = cli._parser("generate")[0].read(["-m", "x", *words.split()])
    other = getattr(LoadOptions.from_flags(one), field)
    assert {"on": True, "off": False}.get(other, other) == value


def test_all_experts_on_the_cpu():
    args = cli._parser("bench")[0].read(["-m", "x", "--cpu-moe"])
    assert next(bench_flags.settings_matrix(args))["n_cpu_moe"] >= 999
