"""Tasks with several answers and perplexity over overlapping windows, against the reference's
output and by their formulas.
"""

from __future__ import annotations

import re
import struct

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import EvaluationError, IqforgeError, MalformedFileError, TruncatedFileError
from iqforge.runtime.evaluate.task_files import (
    draw_in_random_order,
    draw_some,
    read_hellaswag,
    read_multiple_choice,
    read_winogrande,
)

from .shared import shared

EVAL, TASKS = "golden/tools/eval", "golden/tools/tasks"
TINY = "golden/tools/gguf/tiny-llama-untied-f16.gguf"


@pytest.fixture(scope="module")
def mini_llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "mini-llama.gguf"
    return iqforge.convert_model(shared("models/mini-llama"), path, "bf16")


def outcomes(lines):
    """Return number, accuracy and whether each task was right, from the lines of a tool."""
    shown = [float(m[2]) for line in lines if (m := re.match(r"(\d+)\t([\d.]+)", line))]
    counts = [0, *(round(accuracy * n / 100) for n, accuracy in enumerate(shown, 1))]
    return np.diff(counts)


@pytest.mark.parametrize(
    ("kind", "file", "flag", "n"),
    [
        ("winogrande", "winogrande.csv", "-f", 160),
        ("hellaswag", "hellaswag.txt", "-f", 40),  # the first ones drawn are always the same
        pytest.param("multiple-choice", "multiple_choice.bin", "-bf", 160, marks=pytest.mark.full),
        pytest.param("hellaswag", "hellaswag.txt", "-f", 300, marks=pytest.mark.full),
    ],
)
def test_tasks_score_as_the_reference_scores_them(kind, file, flag, n, mini_llama, capsys):
    path = shared(f"{TASKS}/{file}")
    words = ["perplexity", "-m", str(mini_llama), flag, str(path), f"--{kind}", "--device", "cpu"]
    extra = ["--hellaswag-tasks", str(n)] if kind == "hellaswag" else []
    assert main([*words, *extra]) == 0
    ours = capsys.readouterr().out.splitlines()
    theirs = [
        line
        for line in shared(f"{TASKS}/{path.stem}.out").read_text().splitlines()
        if not line.startswith("multiple_choice_score")
    ]
    if kind == "hellaswag":
        theirs = theirs[: theirs.index("task\tacc_norm") + 1 + n]
    one, other = outcomes(ours), outcomes(theirs)
    assert len(one) == len(other) == n
    assert np.count_nonzero(one != other) <= 1  # the reference rounds activations
    if (one == other).all():
        # Scores differ in their last digits, everything else is the same text.
        masked = [re.sub(r"-\d+\.\d+", "S", line) for line in ours]
        assert [line for line in masked if line.strip()] == [
            re.sub(r"-\d+\.\d+", "S", line) for line in theirs if line.strip()
        ]


def test_winogrande_scores_are_those_of_the_reference(tmp_path):
    rows = tmp_path / "wg.csv"
    rows.write_text(shared(f"{EVAL}/wg.csv").read_text() + "\n\n")
    score = iqforge.measure_tasks(shared(TINY), rows, "winogrande")
    found = [item.scores for item in score.items]
    assert found[0] == pytest.approx((-6.093285, -6.095860), rel=1e-4)
    assert found[1] == pytest.approx((-6.130867, -6.154928), rel=1e-4)
    assert [item.is_right for item in score.items] == [False, True]
    # Without an empty line after it the reference loses the last row.
    assert len(read_winogrande(shared(f"{EVAL}/wg.csv"))) == 1


def test_tiny_tasks_have_the_outcomes_of_the_reference():
    hellaswag = iqforge.measure_tasks(shared(TINY), shared(f"{EVAL}/hs.txt"), "hellaswag")
    assert [item.is_right for item in hellaswag.items] == [False, False]
    choice = iqforge.measure_tasks(shared(TINY), shared(f"{EVAL}/mc.bin"), "multiple-choice")
    assert [item.accuracy for item in choice.items] == [1.0, 0.5]
    assert (choice.accuracy, choice.error) == (0.5, 0.5)
    assert choice.random_chance == pytest.approx((0.4, 0.489898), rel=1e-5)


def test_scores_do_not_depend_on_the_batch():
    one, other = (
        iqforge.measure_tasks(shared(TINY), shared(f"{EVAL}/mc.bin"), "multiple-choice", **batch)
        for batch in ({}, {"batch_tokens": 512, "n_ctx": 64})
    )
    for a, b in zip(one.items, other.items, strict=True):
        assert a.scores == pytest.approx(b.scores, rel=1e-6)


def test_strided_perplexity_is_that_of_the_reference(capsys):
    words = ["-m", str(shared(TINY)), "-f", str(shared(f"{EVAL}/text.txt")), "--device", "cpu"]
    stride = ["--ppl-stride", "64", "-c", "256", "-b", "256", "--chunks", "3"]
    assert main(["perplexity", *words, *stride]) == 0
    out = capsys.readouterr().out
    found = [float(value) for value in re.findall(r"\[\d\]([\d.]+),", out)]
    assert found == pytest.approx([436.6004, 398.0885, 383.4562], rel=1e-3)
    assert "Final estimate" not in out
    assert main(["perplexity", *words, *stride, "--ppl-output-type", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "64", "128"]
    assert main(["perplexity", *words, "-c", "4096", "--ppl-stride", "64"]) == 1
    assert "windows of" in capsys.readouterr().err


def test_several_texts_get_a_line_each(capsys, tmp_path):
    text = shared(f"{EVAL}/text.txt").read_text()
    (tmp_path / "one.txt").write_text(text)
    (tmp_path / "two.txt").write_text(text[::-1])
    one, two = str(tmp_path / "one.txt"), str(tmp_path / "two.txt")
    words = ["perplexity", "-m", str(shared(TINY)), "-c", "256", "--chunks", "2", "--device", "cpu"]
    assert main([*words, "-f", one, "-f", two]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [one, two]
    alone = iqforge.measure_perplexity(shared(TINY), one, n_ctx=256, chunks=2)
    assert f"PPL = {alone.perplexity:.4f} +/-" in lines[0]
    assert alone.perplexity == pytest.approx(397.6303, rel=1e-3)
    base = str(tmp_path / "base.kld")
    assert main([*words, "-f", one, "-f", two, "--kl-divergence-base", base]) == 1
    # The first one is printed, and the error is about the second.
    (tmp_path / "two.txt").write_text("too short")
    capsys.readouterr()
    assert main([*words, "-f", one, "-f", two]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{one}: PPL") and f"error: {two}: the text has" in printed.err


def test_draws_are_those_of_the_reference():
    # The first numbers of MT19937 with the seed 1 are 1791095845, 4282876139, 3093770124.
    assert draw_in_random_order(list(range(300)), 2) == [
        1791095845 * 300 >> 32,
        (4282876139 * 299 >> 32) + (4282876139 * 299 >> 32 >= 1791095845 * 300 >> 32),
    ]
    assert sorted(draw_in_random_order(list(range(50)), 0)) == list(range(50))
    assert draw_some(list(range(10)), 10) == list(range(10)) == draw_some(list(range(10)), 0)
    assert draw_some(list(range(10)), 2) == [4, 8]  # 0.417 of 10, 0.997 of 9 with 9 in place 4
    assert len(set(draw_some(list(range(100)), 60))) == 60


def test_wrong_files_are_named_errors(tmp_path):
    text = tmp_path / "tasks.txt"
    text.write_text("a context\n0\none\ntwo\nthree\n")
    with pytest.raises(EvaluationError, match="5 lines"):
        read_hellaswag(text)
    text.write_text("a context\n4\none\ntwo\nthree\nfour\n")
    with pytest.raises(MalformedFileError, match="line 2 is '4'"):
        read_hellaswag(text)
    text.write_text("nothing,of,this\n\n\n")
    with pytest.raises(EvaluationError, match="no Winogrande task"):
        read_winogrande(text)
    data = shared(f"{EVAL}/mc.bin").read_bytes()
    binary = tmp_path / "mc.bin"
    for length in (2, 11, 40, len(data) - 30):
        binary.write_bytes(data[:length])
        with pytest.raises((TruncatedFileError, MalformedFileError)):
            read_multiple_choice(binary)
    binary.write_bytes(struct.pack("<I", 2**31) + data[4:])
    with pytest.raises(MalformedFileError, match="2147483648 tasks"):
        read_multiple_choice(binary)
    with pytest.raises(IqforgeError, match="kind is 'cloze'"):
        iqforge.measure_tasks(shared(TINY), text, "cloze")
    with pytest.raises(EvaluationError, match="does not fit"):
        iqforge.measure_tasks(shared(TINY), shared(f"{EVAL}/hs.txt"), "hellaswag", n_ctx=8)


@pytest.mark.parametrize(
    "words",
    [
        ["--hellaswag", "--winogrande", "-f", "x"],
        ["--hellaswag", "--ppl-stride", "4", "-f", "x"],
        ["--hellaswag", "-c", "64"],
        ["--hellaswag", "-bf", "x"],
        ["-bf", "x", "-f", "x"],
        ["--hellaswag", "-f", "x", "--hellaswag-tasks", "-5"],
        ["--hellaswag", "-f", "x", "--winogrande-tasks", "5"],
        ["-f", "x", "--multiple-choice-tasks", "5"],
    ],
)
def test_flags_that_exclude_each_other_are_refused(words, capsys):
    assert main(["perplexity", "-m", "none.gguf", *words]) != 0
    message = capsys.readouterr().err
    assert "none.gguf" not in message and any(word in message for word in words)
