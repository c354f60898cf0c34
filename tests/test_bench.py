"""`iqforge bench`: the matrix of tests, what a context holds, the formats of outputs."""

from __future__ import annotations

import csv
import gc
import io
import json
import logging
import re
import sqlite3
from types import SimpleNamespace

import iqforge
import pytest
import torch
from iqforge.cli import main
from iqforge.errors import EvaluationError, NonFiniteError
from iqforge.formats.commands import progress
from iqforge.runtime.bench.bench import Runner, deviation, run_test
from iqforge.runtime.bench.bench import Test as BenchTest
from iqforge.runtime.bench.options import SweepOptions
from iqforge.runtime.bench.sweep import sweep
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.commands.flags import model_notes
from iqforge.runtime.model import Model
from iqforge.runtime.network.sampling import Sampling
from iqforge.runtime.split_model import network_of
from iqforge.runtime.weights.hyperparameters import Hyperparameters
from iqforge.runtime.weights.switches import Switches

from .recorder import Recorder

IK_FIELDS = """\
build_commit, build_number, cuda, vulkan, metal, sycl, rpc, gpu_blas, blas, cpu_info, gpu_info,
model_filename, model_type, model_size, model_n_params, n_batch, n_ubatch, n_threads, type_k,
type_v, n_gpu_layers, split_mode, main_gpu, no_kv_offload, flash_attn, mla_attn, attn_max_batch,
ser, reuse, tensor_split, use_mmap, embeddings, repack, mqkv, muge, defer_experts, fused_moe,
grouped_er, no_fused_up_gate, use_thp, no_ooae, rcache, sas, max_gpu, cuda_params,
override_tensor, n_prompt, n_gen, test_time, avg_ns, stddev_ns, avg_ts, stddev_ts, test""".replace(
    "\n", " "
).split(", ")


def said(err: str) -> list[str]:
    """Return lines of stderr, but those about code that is compiled once on a machine, and about
    the rest of a run that takes long.
    """
    slow = re.compile("compiling what runs on this proc|: [0-9.]+ % in .* left$")
    return [line for line in err.splitlines() if not slow.search(line)]


def bench(capsys, *words):
    assert main(["bench", "--device", "cpu", "--synthetic", "llama-tiny:IQ4_K", *words]) == 0
    return capsys.readouterr()


@pytest.mark.parametrize(
    "test, label, calls",
    [
        (BenchTest(n_prompt=20), "pp20", [(0, 8), (8, 8), (16, 4)]),
        (BenchTest(n_gen=3), "tg3", [(0, 1), (1, 1), (2, 1)]),
        (BenchTest(n_prompt=9, n_gen=2), "pp9+tg2", [(0, 8), (8, 1), (9, 1), (10, 1)]),
        (BenchTest(n_gen=2, before=9), "tg2@pp9", [(0, 8), (8, 1), (9, 1), (10, 1)]),
        (BenchTest(n_prompt=4, depth=8), "pp4 @ d8", [(0, 8), (8, 4)]),
    ],
)
def test_what_a_test_runs(test, label, calls):
    recorder = Recorder()
    result = run_test(recorder.model, test, n_batch=8, repetitions=2, warmup=False)
    # The prompt before this test is shared.
    again = [(n_past, n) for n_past, n in calls if n_past >= test.depth + test.before]
    assert test.label == label and recorder.calls == calls + again
    assert recorder.capacities == [sum(n for _, n in calls)]  # exactly what is needed
    assert len(result.samples_ns) == 2 and result.samples_ts[0] == pytest.approx(
        1e9 * test.n_tokens / result.samples_ns[0]
    )
    recorder.calls.clear()
    run_test(recorder.model, test, n_batch=8, repetitions=1)
    assert len(recorder.calls) > len(calls)  # the warm-up comes on top


def test_garbage_that_was_there_is_not_visited_in_samples(monkeypatch):
    """A full collection takes longer than a prompt on a GPU."""
    gc.unfreeze()  # what tests have frozen, to be collected faster
    recorder, frozen = Recorder(), []
    extend = recorder.model.extend

    def extended(*args, **options):
        frozen.append(gc.get_freeze_count() > 1000)
        return extend(*args, **options)

    monkeypatch.setattr(recorder.model, "extend", extended)
    recorder.model.ubatch = 8
    run_test(recorder.model, BenchTest(n_prompt=4), repetitions=2, warmup=False)
    list(sweep(recorder.model, 8, SweepOptions(tg=1, warmup=False)))
    assert frozen == [True] * 3 and not gc.get_freeze_count()
    gc.freeze()  # by a caller, whose objects stay frozen
    try:
        run_test(recorder.model, BenchTest(n_prompt=4), repetitions=1, warmup=False)
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_a_context_that_cannot_be_cut_back_is_restored():
    """A recurrent state is restored from a copy, so the context is filled once."""
    recorder, loaded = Recorder(), []

    class Running:
        nbytes, by_position = 0, False

        def clear(self):
            loaded.append("clear")

        def save(self, first, stop):
            return stop

        def load(self, first, saved):
            loaded.append(saved)

    inner = recorder.model.new_state

    def new_state(capacity, settings=None):
        state = inner(capacity, settings)
        state.layers.append(Running())  # of no layer of this model
        state.windows.append(0)
        return state

    recorder.model.new_state = new_state
    run_test(recorder.model, BenchTest(n_prompt=4, depth=8), n_batch=8, repetitions=2, warmup=False)
    assert recorder.calls == [(0, 8), (8, 4), (8, 4)] and loaded == ["clear", 8]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["llama-tiny:IQ4_K", "qwen3moe-tiny:Q8_0"])
def test_tokens_are_those_that_generate_draws(spec):
    """Repeating one token would use the same experts each time. The host does not wait for the
    device between tokens.
    """
    recorder = Recorder(spec)
    model, given, waited = recorder.model, [], []
    model._after = lambda token, state: (given.append(token), recorder.after(token, state))[1]
    runner = Runner(model, model.new_state(40), 8, torch.Generator().manual_seed(5))
    runner.wait = lambda: waited.append(len(given))
    runner.generate(40)
    drawn = list(model.follow(given[0], model.new_state(40), 39, Sampling(seed=5)))
    assert given[:40] == [given[0], *drawn] and len(set(drawn)) > 20 and not waited


def test_logits_that_are_not_finite_are_an_error():
    model = Model(SyntheticSource("llama-tiny:IQ4_K"), torch.device("cpu"))
    model.network.output_norm.weight.fill_(float("nan"))
    with model, pytest.raises(NonFiniteError, match="output.weight"):
        run_test(model, BenchTest(n_gen=3), repetitions=1)


def test_deviation_is_that_of_a_sample():
    assert (
        deviation([1.0, 2.0, 3.0, 4.0]) == pytest.approx((5 / 3) ** 0.5) and deviation([7.0]) == 0
    )


@pytest.mark.slow
def test_matrix_and_order(capsys):
    words = "-p 8,4 -n 2 -n 0 -pg 4,1 -gp 4,1 -d 0,8 -ctk f16,q8_0 -r 1 -o jsonl"
    out = bench(capsys, *words.split()).out
    rows = [json.loads(line) for line in out.splitlines()]
    tests = [
        "pp8",
        "pp8 @ d8",
        "pp4",
        "pp4 @ d8",
        "tg2",
        "tg2 @ d8",
        "pp4+tg1",
        "pp4+tg1 @ d8",
        "tg1@pp4",
        "tg1@pp4 @ d8",
    ]
    assert [(row["type_k"], row["test"]) for row in rows] == [
        (k, test) for k in ("f16", "q8_0") for test in tests
    ]
    sizes = [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows[:10:2]]
    assert sizes == [(8, 0, 0), (4, 0, 0), (0, 2, 0), (4, 1, 0), (4, 1, 0)]


def test_ranges(capsys):
    words = "-p 4-8+2,16 -n 1-4*2 -b 8,2-4*2 -ngl all -r 1 -o jsonl"
    rows = [json.loads(line) for line in bench(capsys, *words.split()).out.splitlines()]
    tests = ["pp4", "pp6", "pp8", "pp16", "tg1", "tg2", "tg4"]
    assert [(row["n_batch"], row["test"]) for row in rows] == [
        (n_batch, test) for n_batch in (8, 2, 4) for test in tests
    ]


def test_fields_are_those_of_the_reference(capsys, monkeypatch):
    words = ("-p", "8", "-n", "2", "-r", "2", "-mqkv", "1", "-fmoe", "0")

    def compiles(*arguments, **options):
        logging.getLogger("iqforge.runtime").info("compiling what runs on this processor, once")
        return run_test(*arguments, **options)

    # As on a slow machine that has compiled nothing: no line comes between results on stderr.
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0.0)
    monkeypatch.setattr("iqforge.runtime.bench.bench.run_test", compiles)
    err = bench(capsys, *words).err
    assert "compiling" in err and " % in " in err
    captured = bench(capsys, *words, "-o", "csv", "-oe", "json")
    rows = list(csv.reader(io.StringIO(captured.out)))
    assert (
        rows[0][: len(IK_FIELDS)] == IK_FIELDS and len(rows) == 3 and len(rows[1]) == len(rows[0])
    )
    assert captured.out.splitlines()[1].startswith('"iqforge-')
    notes, _, objects = captured.err.partition("[\n")
    assert "note: -mqkv" in notes and "note: -fmoe" in notes
    objects = json.loads("[" + objects)
    assert [o["test"] for o in objects] == ["pp8", "tg2"] and objects[0]["fused_moe"] is False
    for row, o in zip(rows[1:], objects):
        assert len(o["samples_ns"]) == len(o["samples_ts"]) == 2
        assert o["avg_ts"] == pytest.approx(sum(o["samples_ts"]) / 2) and o[
            "avg_ns"
        ] == pytest.approx(sum(o["samples_ns"]) / 2, abs=1)
        assert float(row[IK_FIELDS.index("avg_ts")]) == pytest.approx(o["avg_ts"], abs=1e-5)
    assert (
        objects[0]["tflop_per_s"] > 0
        and objects[0]["gbytes_per_s"] is None
        and objects[1]["gbytes_per_s"] > 0
    )
    database = sqlite3.connect(":memory:")
    database.executescript(bench(capsys, *words, "-o", "sql").out)
    assert database.execute("SELECT test, n_prompt, share_of_bandwidth FROM test").fetchall() == [
        ("pp8", 8, None),
        ("tg2", 0, None),
    ]


def test_table(capsys):
    lines = bench(capsys, "-p", "8", "-n", "2", "-r", "2", "-b", "4,8", "-t", "1").out.splitlines()
    header = [cell.strip() for cell in lines[0].split("|")[1:-1]]
    assert header == [
        "model",
        "size",
        "params",
        "backend",
        "threads",
        "n_batch",
        "test",
        "t/s",
        "GB/s",
        "TFLOP/s",
    ]
    assert set(lines[1]) == set("|-: ") and len(lines[1]) == len(lines[0])
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert (
        cells[:7] == ["llama tiny IQ4_K", "0.84 MiB", "1.44 M", "CPU", "1", "4", "pp8"]
        and " ± " in cells[7]
    )
    assert [line.split("|")[6].strip() for line in lines[2:6]] == ["4", "4", "8", "8"]
    assert lines[-2] == "" and lines[-1].startswith("build: iqforge-")


@pytest.mark.parametrize(
    "words, message",
    [
        (["-p", "x"], "-p takes numbers"),
        (["-p", "8-4"], "-p is '8-4', expected a range of 1 to 10000 numbers"),
        (["-n", "0-4*2"], "-n is '0-4*2', expected a range"),
        (["-d", "1-8*1"], "-d is '1-8*1', expected a range"),
        (["-ub", "1-999999999"], "-ub is '1-999999999', expected a range"),
        (["-p", "4-8-16"], "-p takes numbers"),
        (["-pg", "5"], "-pg takes two numbers"),
        (["-o", "xml"], "-o is 'xml'"),
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-ctk", "q9_0"], "q9_0"),
        (["-fa", "maybe"], "-fa is 'maybe', expected on, off or auto"),
        (["-sas", "2"], "-sas is '2', expected 0 or 1"),
        (["--precision", "bf16"], "--precision bf16"),
        (["-ot", "x"], "-ot 'x'"),
        (["-fa", "0", "-ctv", "q8_0"], "-fa 0"),
        (["-ser", "5"], "-ser"),
        (["-ser", ""], "-ser is empty"),
        (["-ot", ""], "-ot is empty"),
        (["-ub", "0"], "-ub"),
        (["-r", "0"], "-r is 0, expected 1"),
        (["--device", "cuda:77"], "cuda:77"),
        (["--delay", "nan"], "--delay is nan"),
        (["--delay", "inf"], "--delay is inf"),
        (["-mla", "7"], "-mla is 7"),
        (["-ub", "9" * 20], "-ub"),
        (["-b", "9" * 20], "-b"),
        (["-t", "-2"], "-t is -2, expected 1 or more, or 0 or -1"),
        (["--fit", "-ngl", "3"], "does not go together"),
        (["--fit", "-3"], "--fit is -3 MiB"),
        (["-ot", "ffn=CUDA0"], "--device is cpu"),
        (["-ot", "a=CPU,b=GPU7"], "--device is cpu"),
        (["--fit", "-ot", "a=CPU"], "does not go together"),
        (["-p", "9" * 14], "cpu has"),
        (["--device", "warp"], "cpu, cuda, cuda:N or auto"),
    ],
)
def test_wrong_words(words, message, capsys):
    assert main(["bench", "--device", "cpu", "--synthetic", "llama-tiny:IQ4_K", *words]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and "tg" not in captured.out
    # Only the model shows that.
    assert message == "cpu has" or (not captured.out and "changes nothing" not in captured.err)


def test_what_was_measured_before_an_error_stays_readable(capsys, monkeypatch):
    from iqforge.runtime.bench import bench as module

    run_test = module.run_test
    monkeypatch.setattr(
        module,
        "run_test",
        lambda model, test, *a, **k: (
            run_test(model, test, *a, **k) if test.n_prompt == 4 else fail()
        ),
    )

    def fail():
        raise EvaluationError("logits are not finite")

    assert (
        main(
            [
                "bench",
                "--device",
                "cpu",
                "--synthetic",
                "llama-tiny:IQ4_K",
                "-p",
                "4,8",
                "-n",
                "0",
                "-r",
                "1",
                "-o",
                "json",
            ]
        )
        == 1
    )
    captured = capsys.readouterr()
    assert [row["n_prompt"] for row in json.loads(captured.out)] == [
        4
    ] and "not finite" in captured.err


def test_names_are_checked_before_anything_is_measured(capsys, tmp_path):
    for words in (
        ["--synthetic", "llama-tiny:Q9_X"],
        ["-m", str(tmp_path / "none.gguf")],
        ["--synthetic", "llama-tiny"],
    ):
        assert (
            main(
                [
                    "bench",
                    "--device",
                    "cpu",
                    "--synthetic",
                    "llama-tiny:IQ4_K",
                    "-p",
                    "8",
                    "-n",
                    "0",
                    "-r",
                    "1",
                    *words,
                ]
            )
            == 1
        )
        assert not capsys.readouterr().out


def test_flags_without_effect_are_reported(capsys):
    quick = ["-p", "8", "-n", "0", "-r", "1", "-t", "99999999999"]
    words = [
        "-ngl",
        "3",
        "-ncmoe",
        "1",
        "-ot",
        "x=CPU",
        "-khad",
        "1",
        "-vhad",
        "1",
        "-ctk",
        "q8_0",
        "-amb",
        "5",
    ]
    err = bench(capsys, *quick, *words).err
    # Keys are quantized.
    assert {line.split()[1] for line in said(err)} == {
        "-ngl",
        "-ncmoe",
        "-ot",
        "-vhad",
        "-amb",
    }
    assert not said(bench(capsys, *quick, "-amb", "5", "-fa", "0,1").err)
    assert "--fit changes nothing" in bench(capsys, *quick, "--fit").err


@pytest.mark.parametrize("command", [["bench", "-r", "1"], ["profile"]])
def test_expert_switches_without_effect_are_reported_once(command, capsys):
    def notes(spec: str, *words: str) -> list[str]:
        assert (
            main(
                [
                    *command,
                    "--device",
                    "cpu",
                    "-t",
                    "1",
                    "--synthetic",
                    spec,
                    "-p",
                    "4",
                    "-n",
                    "0",
                    *words,
                ]
            )
            == 0
        )
        return said(capsys.readouterr().err)

    several = command[0] == "bench"
    none = [
        f"note: {flag} changes nothing here: the model has no experts" for flag in ("-ser", "-muge")
    ]
    assert (
        notes("llama-tiny:Q8_0", "-ser", "1,0.5;2,0.5" if several else "1,0.5", "-muge", "1")
        == none
    )
    many = "note: -ser changes nothing here: the model uses 2 experts, and {} are always kept"
    assert notes("qwen3moe-tiny:Q8_0", "-ser", "99,0.5", "-muge", "1") == [many.format(99)]
    assert (
        notes("qwen3moe-tiny:Q8_0", "-ser", "2,0.5") == [many.format(2)]
        and notes("qwen3moe-tiny:Q8_0", "-ser", "1,0.5") == []
    )


def test_experts_without_a_gate_have_nothing_to_merge():
    switches = Switches(merge_gate_up=True)
    for shape, expected in (
        ("nemotron-3-nano-30b-a3b", [("-muge", "the model's experts have no gate")]),
        ("qwen3moe-tiny", []),
    ):
        source = SyntheticSource(f"{shape}:Q8_0")
        model = SimpleNamespace(
            device=torch.device("cpu"),
            weights=SimpleNamespace(switches=switches),
            source=source,
            hyperparameters=Hyperparameters(source.metadata, shape),
            network=network_of(source, switches),
            cache=None,
        )
        assert model_notes(model) == expected


def test_no_model(capsys):
    assert main(["bench"]) == 1 and "--synthetic" in capsys.readouterr().err


def test_from_python():
    with iqforge.random_model("llama-tiny:IQ4_K") as model:
        pp, tg = iqforge.benchmark_model(model, prompts=[8], generations=[2], repetitions=2)
    assert (pp.test.label, tg.test.label) == ("pp8", "tg2") and len(tg.samples_ts) == 2
    assert pp.flop_per_second > 0 and pp.bytes_per_second is None and tg.bytes_per_second > 0


@pytest.mark.slow
def test_a_slower_path_is_always_said(capsys):
    flags = ("-p", "0", "-n", "1", "-r", "1")
    assert "layer by layer" not in bench(capsys, *flags, "-ctk", "q8_0", "-khad", "1").err
    assert "layer by layer" in bench(capsys, *flags, "--synthetic", "gemma4-tiny:Q8_0").err
