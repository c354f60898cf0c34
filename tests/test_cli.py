"""The command line itself: streams that are closed or full, odd encodings, words behind flags,
outputs that are inputs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys

import iqforge
import pytest
from iqforge.cli import COMMANDS, main
from iqforge.errors import OutputError

from .tiny_checkpoint import make_tiny_llama


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("hf"), shards=2)


@pytest.fixture(scope="module")
def shards(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return iqforge.split_model(
        iqforge.convert_model(checkpoint, folder / "m.gguf"), folder / "s", max_tensors=6
    )


def shell(command: str, **environment) -> subprocess.CompletedProcess:
    iqforge_ = f"{sys.executable} -m iqforge"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command.replace("iqforge", iqforge_)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        errors="replace",
    )


@pytest.mark.parametrize(
    "words", ["--help", "--version", "types", *(f"{name} --help" for name in COMMANDS)]
)
def test_help_of_everything(words, capsys):
    try:
        assert main(words.split()) == 0
    except SystemExit as stop:
        assert stop.code == 0
    assert capsys.readouterr().out


def test_no_command_and_wrong_command(capsys):
    assert main([]) == 2
    with pytest.raises(SystemExit) as stop:
        main(["frobnicate"])
    assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        main(["quantize", "a.gguf", "--unknown", "b.gguf", "Q8_0"])
    assert stop.value.code == 2 and "--unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    "redirect, status", [(">&-", 0), ("2>&-", 0), (">/dev/full", 1), ("| head -c 0", None)]
)
@pytest.mark.parametrize(
    "command",
    ["iqforge --version", "iqforge types", "iqforge quantize --pure --dry-run {model} x.gguf Q8_0"],
)
def test_streams_that_are_closed_or_full(shards, redirect, status, command):
    done = shell(f"{command.format(model=shards[0])} {redirect}")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if status is not None:
        assert done.returncode == status, done.stderr
    if redirect == ">/dev/full":
        assert "error: No space left" in done.stderr


def test_characters_that_the_terminal_lacks(shards, tmp_path):
    folder = tmp_path / "größe"
    folder.mkdir()
    done = shell(
        f"iqforge quantize --pure '{shards[0]}' '{folder}/q.gguf' Q8_0", PYTHONIOENCODING="ascii"
    )
    assert done.returncode == 0 and "gr\\xf6\\xdfe" in done.stdout, done.stderr


def test_names_that_are_not_utf_8(shards, tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/im\xff.dat")
    text = "one two three four five six seven eight nine ten\n" * 100
    iqforge.collect_imatrix(shards[0], text, odd, n_ctx=64, chunks=2)
    report = iqforge.quantize_model(
        shards[0], os.fsdecode(os.fsencode(tmp_path) + b"/q\xff.gguf"), "IQ4_NL", odd, pure=True
    )
    assert report.tensors


def test_words_behind_flags(shards, tmp_path):
    out = tmp_path / "q.gguf"
    assert (
        main(
            [
                "quantize",
                str(shards[0]),
                "--pure",
                str(out),
                "--output-tensor-type",
                "q8_0",
                "Q4_0",
                "2",
            ]
        )
        == 0
    )
    assert out.exists()


def test_thread_counts_are_bounded(shards, tmp_path):
    assert (
        main(["quantize", "--pure", str(shards[0]), str(tmp_path / "q.gguf"), "Q8_0", "1000000"])
        == 0
    )
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 100)
    assert (
        main(
            [
                "perplexity",
                "-m",
                str(shards[0]),
                "-f",
                str(text),
                "-c",
                "64",
                "--chunks",
                "1",
                "-t",
                "1000000",
            ]
        )
        == 0
    )


# ---- an output that is one of the inputs


def digests(*files):
    return [hashlib.sha256(open(f, "rb").read()).hexdigest() for f in files]


@pytest.mark.parametrize(
    "victim",
    [
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
    ],
)
def test_checkpoint_files_are_never_overwritten(checkpoint, tmp_path, victim):
    copy = tmp_path / "hf"
    shutil.copytree(checkpoint, copy)
    before = digests(copy / victim)
    for write in (
        lambda: iqforge.quantize_model(copy, copy / victim, "Q8_0", pure=True),
        lambda: iqforge.convert_model(copy, copy / victim),
    ):
        with pytest.raises(OutputError, match="same file"):
            write()
    assert digests(copy / victim) == before


def test_no_other_input_is_overwritten(shards, tmp_path):
    text, imatrix = tmp_path / "text.txt", tmp_path / "i.dat"
    text.write_text("one two three four five six seven eight nine ten\n" * 100)
    iqforge.collect_imatrix(shards[0], text, imatrix, n_ctx=64, chunks=1)
    link = tmp_path / "link"
    link.symlink_to(shards[1])
    before = digests(*shards, text, imatrix)
    for out in (shards[0], shards[1], link, text):
        for write in (
            lambda: iqforge.collect_imatrix(shards[0], text, out, n_ctx=64, chunks=1),
            lambda: iqforge.measure_perplexity(
                shards[0], text, n_ctx=64, chunks=1, kl_divergence_base=out
            ),
        ):
            with pytest.raises(OutputError, match="same file"):
                write()
        for argv in (["imatrix", "-o", str(out)], ["perplexity", "--kl-divergence-base", str(out)]):
            assert (
                main([*argv, "-m", str(shards[0]), "-f", str(text), "-c", "64", "--chunks", "1"])
                == 1
            )
    for out in (imatrix, shards[1]):
        with pytest.raises(OutputError, match="same file"):
            iqforge.quantize_model(shards[0], out, "Q4_0", imatrix, pure=True)
    assert digests(*shards, text, imatrix) == before
