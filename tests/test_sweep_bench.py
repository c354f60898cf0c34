"""`iqforge sweep-bench`: the speed of prompts and of generation at growing depths."""

from __future__ import annotations

import json

import iqforge
import pytest
from iqforge import cli
from iqforge.cli import main
from iqforge.formats.values import u32
from iqforge.runtime.bench.options import SweepOptions
from iqforge.runtime.bench.sweep import positions, sweep
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.commands import ignored_flags
from iqforge.runtime.commands.speed.flags import settings_matrix

from .recorder import Recorder
from .tiny_model import write_gguf


def test_sweep():
    recorder = Recorder()
    recorder.model.ubatch = 8
    rows = list(sweep(recorder.model, 24, SweepOptions(tg=2, warmup=False)))
    assert recorder.calls == [
        (0, 1),
        (1, 1),
        (0, 8),
        (8, 1),
        (9, 1),
        (8, 8),
        (16, 1),
        (17, 1),
        (16, 8),
    ] and recorder.capacities == [26]
    assert [(row.pp, row.tg, row.n_kv) for row in rows] == [(8, 2, 0), (8, 2, 8), (8, 2, 16)]
    assert rows[0].speed_pp == pytest.approx(8 / rows[0].t_pp) and rows[
        0
    ].speed_tg == pytest.approx(2 / rows[0].t_tg)
    recorder.calls.clear()
    assert [
        row.n_kv for row in sweep(recorder.model, 24, SweepOptions(stride=2, first_repetitions=2))
    ] == [
        0,
        0,
        16,
    ]
    # With the warm-up.
    assert (
        recorder.calls[-4:] == [(8, 8), (16, 1), (17, 1), (16, 8)]
        and recorder.calls.count((0, 8)) == 3
    )


def test_the_context_of_a_sweep_is_counted_whole():
    recorder = Recorder()
    recorder.model.ubatch = 16
    list(sweep(recorder.model, 40, SweepOptions(warmup=False)))
    assert recorder.capacities == [positions(40, 16)] == [48 + 4] and positions(40, 16, 9) == 57


def test_sweep_command(capsys):
    words = [
        "sweep-bench",
        "--device",
        "cpu",
        "--synthetic",
        "llama-tiny:Q8_0",
        "-c",
        "32",
        "-ub",
        "16",
        "-t",
        "1",
    ]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(
        "main: n_kv_max = 32, n_batch = 2048, n_ubatch = 16, flash_attn = 1, n_gpu_layers = 0,"
        " n_threads = 1"
    )
    assert lines[3:5] == [
        "|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |",
        "|-------|--------|--------|----------|----------|----------|----------|",
    ]
    assert [line.split("|")[1:4] for line in lines[5:]] == [
        ["    16 ", "      4 ", "      0 "],
        ["    16 ", "      4 ", "     16 "],
    ]
    assert main([*words, "--output-format", "jsonl", "--sweep-memory", "-n", "1"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (
        [o["n_kv"] for o in objects] == [0, 16]
        and objects[0]["rss_hwm_mib"] > 1
        and objects[0]["tg"] == 1
    )
    assert main([*words, "-ub", "8"]) == 1 and "lists" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, expected",
    [
        ("", {}),
        ("-fa -muge -khad -rtr", {"muge": True, "k_cache_hadamard": True, "repack": True}),
        ("-fa auto -muge 0 -rtr 0 -sas 1 -sas", {}),
        ("-no-fa", {"flash_attn": False}),
        ("--no-flash-attn -khad 1", {"flash_attn": False, "k_cache_hadamard": True}),
        ("-cmoe", {"n_cpu_moe": 999}),
    ],
)
@pytest.mark.parametrize("command", ["bench", "sweep-bench", "profile"])
def test_switches_need_no_value(command, words, expected):
    """As llama-sweep-bench and the commands that take no lists have them."""
    args = cli._parser(command)[0].read(["-m", "x", *words.split()])
    [setting] = settings_matrix(args)
    [usual] = settings_matrix(cli._parser(command)[0].read(["-m", "x"]))
    assert setting == usual | expected
    list(ignored_flags.given(args))


def test_a_context_of_0_is_what_the_model_was_trained_for(tmp_path, capsys):
    path = tmp_path / "48.gguf"
    write_gguf(path, SyntheticSource("llama-tiny:Q8_0"), metadata={"llama.context_length": u32(48)})
    words = ["sweep-bench", "--device", "cpu", "-m", str(path), "-c", "0", "-ub", "16", "-n", "1"]
    assert main([*words, "--output-format", "jsonl", "--no-warmup"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["n_kv"], row["n_kv_max"]) for row in rows] == [(0, 48), (16, 48), (32, 48)]
    with iqforge.load_model(path, device="cpu", ubatch=16) as model:
        found = iqforge.sweep_model(model, 0, tg=1, warmup=False)
        assert [row.n_kv for row in found] == [0, 16, 32]
    assert main([*words, "-c", "-1"]) == 1
    assert "-c is -1, expected 0 or more" in capsys.readouterr().err
