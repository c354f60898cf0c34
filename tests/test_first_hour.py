"""First steps of a new user: folders for files, slow models, odd locales, and the messages."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import DeviceError
from iqforge.formats.commands import progress
from iqforge.formats.commands.progress import Estimate, Meter, duration
from iqforge.imatrix.cold_experts import fill_cold_experts
from iqforge.imatrix.coverage import measure_coverage
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.quantize.report import bars
from iqforge.runtime.commands import watch
from iqforge.runtime.model import load_model
from iqforge.runtime.weights import kept

DEMO = Path(iqforge.__file__).parent / "demo" / "model"
ON_ONE_LINE = """
import sys
from iqforge.formats.commands.progress import on_one_line
sys.stdout.write(str(on_one_line()))
"""
TEXT = "The quick brown fox jumps over the lazy dog.\n" * 60


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    return iqforge.convert_model(DEMO, tmp_path_factory.mktemp("gguf") / "demo.gguf", "auto")


# ---- a checkpoint folder as a model


COMMANDS = {
    "perplexity": "-f {text} -c 64 --chunks 2",
    "generate": "-p Hello -n 4 --temp 0",
    "imatrix": "-f {text} -c 64 --chunks 2 -o {folder}/i.dat",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_checkpoint_folder_is_a_model(command, text, gguf, tmp_path, capsys):
    printed = []
    for model in (DEMO, gguf):
        words = COMMANDS[command].format(text=text, folder=tmp_path).split()
        assert main([command, "--device", "cpu", "-m", str(model), *words]) == 0
        files = [(tmp_path / "i.dat").read_bytes()] if command == "imatrix" else []
        printed.append((capsys.readouterr().out, files))
    assert printed[0] == printed[1]


def test_a_checkpoint_folder_is_measured(tmp_path, capsys, text):
    words = ["-m", str(DEMO), "--device", "cpu"]
    assert main(["bench", *words, "-p", "4", "-n", "2", "-r", "1", "-o", "json"]) == 0
    assert [test["n_gen"] for test in json.loads(capsys.readouterr().out)] == [0, 2]
    assert main(["sweep-bench", *words, "-c", "16", "-ub", "16", "-n", "1"]) == 0
    assert main(["profile", *words, "-p", "4", "-n", "1"]) == 0
    sensitivity = ["-f", str(text), "-c", "64", "--chunks", "1", "--layers", "5", "--type", "Q8_0"]
    assert main(["sensitivity", *words, *sensitivity, "-o", str(tmp_path / "s.json")]) == 0


def test_the_profiler_s_log_is_not_shown(capfd):
    words = ["--synthetic", "llama-tiny:Q8_0", "--device", "cpu", "-p", "2", "-n", "1"]
    assert main(["profile", *words]) == 0
    err = capfd.readouterr().err
    assert ".cpp:" not in err and "profiler_start" not in err


# ---- wrong inputs


def test_a_folder_as_a_text(tmp_path, capsys):
    for words in (["perplexity"], ["generate"], ["imatrix"], ["sensitivity"]):
        assert main([*words, "-m", str(DEMO), "--device", "cpu", "-f", str(tmp_path)]) == 1
        assert f"{tmp_path}: is a folder, expected a UTF-8 text file" in capsys.readouterr().err


def test_a_file_of_a_checkpoint_as_a_model(capsys):
    for name in ("model.safetensors", "config.json"):
        for words in (["convert"], ["generate", "-p", "x", "-m"], ["quantize", "--dry-run"]):
            assert main([*words, str(DEMO / name), *["Q8_0"] * (words[0] == "quantize")]) == 1
            assert f"{name}: is a file of a checkpoint: name its folder" in capsys.readouterr().err


def test_a_checkpoint_where_only_a_gguf_file_will_do(tmp_path, capsys):
    for command in ("inspect", "gguf-hash", "validate", "repack", "gguf-split", "merge-gate-up"):
        out = [str(tmp_path / "out")] * (command in ("repack", "gguf-split", "merge-gate-up"))
        assert main([command, str(DEMO), *out]) == 1
        err = capsys.readouterr().err
        assert "this is a folder with a checkpoint, which iqforge convert converts" in err


def test_what_is_no_adapter(tmp_path, capsys):
    for folder, message in (
        (tmp_path, "an adapter is a folder with adapter_config.json"),
        (DEMO, "it is a checkpoint, which iqforge convert converts"),
    ):
        assert main(["convert-lora", str(folder)]) == 1
        err = capsys.readouterr().err
        assert f"{folder}: has no adapter_config.json; {message}" in err


LONG_WORK = {
    "imatrix": "-m {demo} -f {text} -o {out}",
    "sensitivity": "-m {demo} -f {text} -o {out}",
    "perplexity": "-m {demo} -f {text} -c 64 --kl-divergence-base {out}",
    "quantize-stats": "{gguf} --type Q8_0 --html {out}",
    "profile": "-m {demo} -o {out}",
    "quantize": "{gguf} {out} Q8_0",
}


@pytest.mark.parametrize("command", LONG_WORK)
def test_an_output_that_cannot_be_written_is_named_before_the_work(
    command, text, gguf, tmp_path, capsys
):
    (folder := tmp_path / "folder.svg").mkdir()
    for out, message in (
        (tmp_path / "nowhere" / "x.svg", "cannot be written: No such file or directory"),
        (folder, "cannot be written: it is a folder"),
    ):
        words = LONG_WORK[command].format(demo=DEMO, text=text, gguf=gguf, out=out).split()
        assert main([command, *words]) == 1
        captured = capsys.readouterr()
        assert f"{out}: {message}" in captured.err and not captured.out.strip(), command


def test_files_that_are_no_importance_matrix_are_named(tmp_path, capsys):
    (empty := tmp_path / "empty.dat").write_bytes(b"")
    for path, message in ((tmp_path, "is a folder, expected"), (empty, "is empty, expected")):
        for words in (
            ["quantize", "--imatrix", str(path), "m.gguf", "Q8_0"],
            ["imatrix-coverage", str(path)],
            ["imatrix", "--show-statistics", "--in-file", str(path)],
            ["imatrix-compare", str(path), str(path)],
        ):
            assert main(words) == 1
            assert f"{path}: {message} an importance matrix" in capsys.readouterr().err, words


def run_in_c_locale(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "iqforge", *words],
        capture_output=True,
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""},
    )


def test_texts_and_names_in_the_c_locale(tmp_path):
    words = ["generate", "-m", str(DEMO), "--device", "cpu", "-n", "1", "--temp", "0", "-p"]
    done = run_in_c_locale(*words, "café")
    assert done.returncode == 0 and done.stdout.startswith(b"caf\\xe9"), done.stderr
    (tmp_path / "café.txt").write_text("x")
    done = run_in_c_locale("inspect", str(tmp_path / "café.txt"))
    assert done.returncode == 1 and b"caf\\xe9.txt" in done.stderr


# ---- what is printed


def test_a_repr_is_one_line(gguf):
    matrix = Imatrix({"w": Entry(np.ones((1, 4)), np.array([5]))}, 2, 512, path="m.gguf")
    assert repr(matrix) == "<Imatrix 1 entry from 2 chunks of 512 tokens: m.gguf>"
    assert Imatrix(chunk_count=1).contents == "0 entries from 1 chunk"
    with iqforge.open_source(gguf) as source, iqforge.open_source(DEMO) as checkpoint:
        weights = f"{sum(tensor.n_elements for tensor in source.tensors):,} weights"
        assert repr(source) == f"<GGUFFile llama, 47 tensors, {weights}: {gguf}>"
        assert repr(checkpoint) == f"<CheckpointSource llama, 47 tensors, {weights}: {DEMO}>"
    size = f"{gguf.stat().st_size:,} bytes"
    summary = iqforge.inspect_model(gguf)
    assert repr(summary) == f"<ModelSummary 47 tensors, {weights}, {size}: {gguf}>"


def test_the_table_of_a_benchmark_holds_long_labels(capsys):
    words = ["--synthetic", "llama-tiny:Q8_0", "--device", "cpu", "-p", "0", "-n", "0", "-r", "1"]
    assert main(["bench", *words, "-pg", "64,16", "-d", "128"]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert "pp64+tg16 @ d128" in table[2] and len({len(line) for line in table}) == 1


@pytest.mark.parametrize("method", ["prior", "none"])
def test_unseen_experts_are_unseen_in_the_file_too(tmp_path, method, capsys):
    """Experts that are filled in have a count of 1 although they saw nothing."""
    rng = np.random.default_rng(3)
    counts = np.array([200, 0, 1, 5], dtype=np.int64)

    def entry(n_cols: int) -> Entry:
        return Entry(rng.random((4, n_cols)) * counts[:, None], counts)

    entries = {
        f"blk.0.ffn_{kind}_exps.weight": entry(8 if kind == "down" else 4)
        for kind in ("gate", "up", "down")
    }
    collected = Imatrix(entries, 2, 512)
    written = fill_cold_experts(collected, method)
    for imatrix in (collected, written):
        [layer] = measure_coverage(imatrix).layers
        assert layer.tokens.tolist() == counts.tolist()
        assert "1 of them none" in " ".join(measure_coverage(imatrix).summary())


def test_durations():
    assert [duration(x) for x in (0, 5, 59, 90, 7200)] == ["1 s", "5 s", "59 s", "1.5 min", "2.0 h"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_estimate_comes_after_five_seconds_and_every_minute(capsys):
    clock = Clock()
    estimate = Estimate("hashing", clock=clock)
    for clock.now, done in ((1, 0.01), (5, 0.05), (30, 0.3), (66, 0.6), (70, 0.7)):
        estimate.say(done)
    assert capsys.readouterr().err.splitlines() == [
        "hashing: 5.0 % in 5 s, about 1.6 min left",
        "hashing: 60 % in 1.1 min, about 44 s left",
    ]


def test_a_warning_about_the_context_comes_before_the_prompt(gguf, caplog):
    pieces = iqforge.generate(gguf, "Hello", 5000, echo=True)
    assert next(iter(pieces)) and "was trained for a context of" in caplog.text
    with pytest.raises(DeviceError, match="choose a smaller one"):
        next(iter(iqforge.generate(gguf, "Hello", 10, context=10**12, echo=True)))


def test_lines_of_results_are_not_continued(monkeypatch):
    command, pipe = [sys.executable, "-c", ON_ONE_LINE], subprocess.PIPE
    together = subprocess.run(command, stdout=pipe, stderr=subprocess.STDOUT)
    apart = subprocess.run(command, stdout=pipe, stderr=pipe)
    assert (together.stdout, apart.stdout) == (b"True", b"False")
    clock = Clock()
    estimate = Estimate("generating", before="\n", clock=clock)
    clock.now = 5
    monkeypatch.setattr(sys, "stderr", out := io.StringIO())
    estimate.say(0.5)
    assert out.getvalue() == "\ngenerating: 50 % in 5 s, about 5 s left\n"


IN_A_LINE = """
import logging, sys
from iqforge import cli
from iqforge.errors import UsageError
from iqforge.formats.commands.progress import print_result

def run(words):
    with cli._log_to_stderr():
        print_result("[1]9.5,")
        logging.getLogger("iqforge.runtime").info("compiling")
        logging.getLogger("iqforge.runtime").info("again")
        print_result("[2]9.4,")
        raise UsageError("the text ends")

cli._run = run
sys.exit(cli.main(["generate"]))
"""


@pytest.mark.parametrize("shared", [True, False])
def test_messages_begin_a_line(shared):
    found = subprocess.run(
        [sys.executable, "-c", IN_A_LINE],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if shared else subprocess.PIPE,
        text=True,
    )
    end = "\n" if shared else ""
    said = f"{end}INFO: compiling\nINFO: again\n", f"{end}iqforge generate: error: the text ends\n"
    if shared:
        assert found.stdout == f"[1]9.5,{said[0]}[2]9.4,{said[1]}"
    else:
        assert (found.stdout, found.stderr) == ("[1]9.5,[2]9.4,", "".join(said))
    assert found.returncode == 1


def test_norms_need_no_compiler(gguf, monkeypatch):
    """A model that is opened for a GPU, or to be looked at, does not wait for one."""

    def refuse() -> None:
        raise AssertionError("the compiler is imported")

    monkeypatch.setattr(kept, "_compiled", refuse)
    with load_model(gguf, "cpu") as model:
        assert model.network.output_norm.weight.shape == (256,)


LONG_RUNS = {
    "convert": ["convert", "{demo}", "--outfile", "{folder}/c.gguf"],
    "quantize-stats": ["quantize-stats", "{gguf}", "--type", "Q8_0"],
    "quantize": ["quantize", "--pure", "{gguf}", "{folder}/q.gguf", "Q8_0"],
    "repack": ["repack", "{quantized}", "{folder}/r.gguf"],
}


@pytest.mark.parametrize("command", LONG_RUNS)
def test_long_work_says_how_far_it_is(command, gguf, tmp_path, monkeypatch, capsys):
    """Without a terminal, lines on stderr: here at once, not after five seconds."""
    quantized = tmp_path / "quantized.gguf"
    iqforge.quantize_model(gguf, quantized, "Q8_0")
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0.0)
    monkeypatch.setattr(bars, "AFTER_SECONDS", 0.0)
    names = {"demo": DEMO, "gguf": gguf, "folder": tmp_path, "quantized": quantized}
    assert main([word.format(**names) for word in LONG_RUNS[command]]) == 0
    what = {"convert": "converting", "quantize-stats": "measuring", "repack": "repacking"}
    assert re.search(
        rf"^{what.get(command, 'quantizing')}: [\d.]+ % in 1 s, about ",
        capsys.readouterr().err,
        re.M,
    )


def test_bytes_are_counted_without_a_terminal(monkeypatch, capsys):
    with Meter("splitting") as progress:
        progress.begin(1000)
        progress._estimate.next = 0.0
        progress(250)
    assert capsys.readouterr().err.startswith("splitting: 25 % in ")


def test_what_is_compiled_first_is_no_part_of_an_estimate(gguf, monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr(
        watch, "Estimate", lambda what, **options: Estimate(what, clock=clock, **options)
    )
    with load_model(gguf, "cpu") as model, watch.watched(model, "generating", [(4, 3)]):
        clock.now = 60
        model.forward([1, 2, 3, 4])
        assert not capsys.readouterr().err
        clock.now = 66
        model.forward([1, 2, 3, 4])
    assert re.match(r"generating: \d+ % in 6 s, about \d+ s left", capsys.readouterr().err)


def test_a_slow_model_says_how_long_it_takes(monkeypatch, capsys):
    """The clock advances a second per product, and the first line comes within the first pass."""
    clock = Clock()

    def tick() -> float:
        clock.now += 1
        return clock.now

    monkeypatch.setattr(
        watch, "Estimate", lambda what, **options: Estimate(what, clock=tick, **options)
    )
    words = ["--synthetic", "llama-tiny:Q8_0", "--device", "cpu", "-p", "8", "-n", "1"]
    for command, what in (
        (["bench", "-r", "2"], "llama-tiny:Q8_0: pp8: "),
        (["profile"], "profil"),
    ):
        assert main([*command, *words]) == 0
        lines = capsys.readouterr().err.splitlines()
        first = next(line for line in lines if "left" in line)
        assert first.startswith(what) and " % in " in first


def test_runs_of_passes():
    assert watch.passes(0, 512) == []
    assert watch.passes(512, 512) == [(512, 1)]
    assert watch.passes(10**14 + 3, 512) == [(512, 195312500000), (3, 1)]
