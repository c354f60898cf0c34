"""The command line: streams that are closed or full, odd encodings, words after flags, outputs that
are inputs.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import iqforge
import pytest
from iqforge import cli
from iqforge.cli import COMMANDS, main
from iqforge.commandline.unsupported import UNSUPPORTED
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


@pytest.mark.parametrize("words", ["--help", "help", "types", *(f"help {c}" for c in COMMANDS)])
def test_help_of_everything(words, capsys):
    assert main(words.split()) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_short_usage_and_ends_with_an_example(name, capsys):
    main(["help", name])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: iqforge {name} ") and out.index("\n\n") < 200
    example = COMMANDS[name].example
    assert out.endswith(f"\n\nexample:\n  {example}\n") and example.startswith(f"iqforge {name}")
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0 and capsys.readouterr().out == out


def test_overview(capsys):
    assert main(["help"]) == 0
    out = capsys.readouterr().out
    assert "Start with `iqforge demo`" in out
    headings = [line for line in out.splitlines() if line and line[0].isupper() and line[-1] == ":"]
    assert headings == ["Make:", "Measure:", "Run:", "Inspect:", "Advanced:", "More:"]
    assert out.count("$ iqforge ") == 5
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert main([]) == 2 and capsys.readouterr().out == out


def test_help_of_words_that_are_no_commands(capsys):
    for name in ("version", "help"):
        assert main(["help", name]) == 0
        assert capsys.readouterr().out == f"usage: iqforge {name}\n"


def test_version(capsys):
    for words in ("version", "--version"):
        assert main([words]) == 0
        assert capsys.readouterr().out == f"iqforge {iqforge.__version__}\n"


MISTAKES = {
    "quantze a b": "unknown command 'quantze'; did you mean 'quantize'?",
    "frobnicate": "unknown command 'frobnicate'.",
    "help quantze": "did you mean 'quantize'?",
    "convert_hf_to_gguf.py ./model": "did you mean 'convert'?",
    "llama-cli -m x": "unknown command 'llama-cli'; did you mean 'generate'?",
    "llama-batched-bench -m x": "unknown command 'llama-batched-bench' (steps of several sequences",
    "server -m x": "unknown command 'server' (there is no server; see `chat`).",
    "gguf-dump x": "did you mean 'inspect'?",
    "llama-quantize a b": "did you mean 'quantize'?",
    "version now": "unexpected argument 'now'",
    "help quantize repack": "unexpected argument 'repack'",
    "quantize --imatrx f": "unknown flag '--imatrx'; did you mean '--imatrix'?",
    "quantize a.gguf Q8_0 -j 4": "unknown flag '-j'",
    "generate": "the following arguments are required: -m/--model",
    "--versoin": "unknown flag '--versoin'; did you mean '--version'?",
    "generate -m x --tmp 0": "unknown flag '--tmp'; did you mean '--temp'?",
    "quantize-stats -m x": "unknown flag '-m': MODEL is given without a flag",
    "generate -m x --ctx 9": "unknown flag '--ctx'; did you mean '--ctx-size'?",
    "quantize --leave-out a b": "unknown flag '--leave-out'; did you mean '--leave-output-tensor'?",
    "perplexity -m x --frobnicate=3": "unknown flag '--frobnicate'. See `iqforge perplex",
    "quantize a.gguf --unknown b.gguf Q8_0": "unknown flag '--unknown'",
    "inspect a.gguf b.gguf": "unexpected argument 'b.gguf'",
    "perplexity -m x -c many": "argument -c/--ctx-size: 'many' is not an integer",
    "generate -m x -i": "'-i' (a dialogue without a chat template) is not supported",
    "perplexity -m x -cnv": "unknown flag '-cnv'",
    "perplexity -m x --chunk 3": "unknown flag '--chunk'; did you mean '--chunks'?",
    "bench -m x -pp 3": "unknown flag '-pp'",
    "convert x --split-gate-up --merge-gate-up": "--merge-gate-up/--fuse-gate-up-exps: not allowed"
    " with argument --split-gate-up",
    "quantize x y Q8_0 --merge-gate-up --split-gate-up": "--split-gate-up: not allowed with"
    " argument --merge-gate-up",
}


@pytest.mark.parametrize("n", ["0", "3", "-1"])
@pytest.mark.parametrize(
    "words",
    [
        "perplexity -m x -f TEXT",
        "imatrix -m x -f TEXT -o out",
        "hessian -m x -f TEXT -o out",
        "sensitivity -m x -f TEXT -o out",
        "compare x y -f TEXT",
        "auto x --target-bpw 4",
    ],
)
def test_chunks_of_fewer_than_4_tokens_are_refused_before_a_model_is_opened(
    words, n, tmp_path, capsys
):
    """The reference's perplexity and imatrix refuse 0, too, which elsewhere is the model's own."""
    text = tmp_path / "text.txt"
    text.write_text("some words")
    words = words.replace("TEXT", str(text)).split()
    assert main([*words, "--device", "cpu", "-c", n]) == 1
    assert f"-c is {n}, expected 4 or more" in capsys.readouterr().err


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_get_one_line(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    captured = capsys.readouterr()
    assert stop.value.code == 2 and not captured.out
    assert captured.err.count("\n") == 1 and MISTAKES[words] in captured.err


def test_flags_are_not_abbreviated():
    """`-cnv` was read as `-c nv`, `-r stop` as `-rtr`, and `-c512` is not `-c 512` either."""
    for words in ("perplexity -m x -c512", "imatrix -m x -rt", "perplexity -m x --ctx 5"):
        with pytest.raises(SystemExit):
            main(words.split())


@pytest.mark.parametrize(
    "words, scaled, models",
    [
        ("--lora-scaled a.gguf 0.5 base one", ["a.gguf:0.5"], ["one"]),
        ("--lora-scaled a 2 --lora-scaled b:-1 base one", ["a:2", "b:-1"], ["one"]),
        ("base one 3 --lora-scaled a -1e-1", ["a:-1e-1"], ["one", "3"]),
        ("--lora-scaled a:2 3 one", ["a:2"], ["one"]),  # the base is called 3
        ("--lora-scaled a:1,b:2 3 one", ["a:1,b:2"], ["one"]),
    ],
)
def test_scales_of_adapters_are_one_word_or_two(words, scaled, models):
    parser, _ = cli._parser("compare")
    args = parser.read([*words.split(), "-f", "text"])
    assert args.lora_scaled == scaled and args.models == models


def test_unsupported_flags_are_those_that_no_command_has():
    for name in COMMANDS:
        parser, _ = cli._parser(name)
        known = {flag for action in parser._actions for flag in action.option_strings}
        if name in ("generate", "perplexity", "imatrix"):
            assert not known & UNSUPPORTED.keys()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_colours_on_terminals(monkeypatch, no_colour):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("NO_COLOR", no_colour)
    monkeypatch.setenv("TERM", "xterm")
    main(["help"])
    main(["help", "perplexity"])
    main(["inspect", "missing.gguf"])
    with pytest.raises(SystemExit):
        main(["quantze"])
    for stream in (out, err):
        assert ("\033[" in stream.getvalue()) == (not no_colour)


def test_no_colours_elsewhere(capsys):
    main(["help"])
    main(["help", "perplexity"])
    main(["inspect", "missing.gguf"])
    assert "\033[" not in "".join(capsys.readouterr())


def test_completion(capsys, tmp_path):
    assert main(["help", "completion"]) == 0
    assert "iqforge completion bash >" in capsys.readouterr().out
    for shell_name in ("bash", "zsh", "tcsh"):
        assert main(["completion", shell_name]) == 0
        out = capsys.readouterr().out
        assert "quantize" in out and "ctx-size" in out
    assert main(["completion", "fish"]) == 1
    main(["completion", "bash"])
    script = tmp_path / "complete"
    script.write_text(capsys.readouterr().out)
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"source {script}; COMP_WORDS=(iqforge quanti); COMP_CWORD=1;"
            " $(complete -p iqforge | sed 's/.*-F //; s/ .*//') iqforge quanti iqforge;"
            " echo ${COMPREPLY[@]}",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == {n for n in COMMANDS if n.startswith("quanti")}, done


@pytest.mark.parametrize(
    "redirect, status", [(">&-", 0), ("2>&-", 0), (">/dev/full", 1), ("| head -c 0", None)]
)
@pytest.mark.parametrize(
    "command",
    [
        "iqforge --version",
        "iqforge types",
        pytest.param(
            "iqforge quantize --pure --dry-run {model} x.gguf Q8_0", marks=pytest.mark.full
        ),
    ],
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


def test_words_after_flags(shards, tmp_path):
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


@pytest.mark.parametrize("command", COMMANDS)
def test_every_argument_has_a_help_text(command):
    """A default alone does not say what an argument means."""
    for action in cli._parser(command)[0]._actions:
        if action.help != argparse.SUPPRESS:
            text = re.sub(r"\(default[^)]*\)", "", action.help or "")
            called = action.option_strings or action.metavar or action.dest
            assert re.search(r"[A-Za-z]{3}|SHA-\d", text), f"iqforge {command}: {called}"


@pytest.mark.parametrize("command", COMMANDS)
def test_pieces_of_a_text_are_chunks(command, capsys):
    assert main(["help", command]) == 0
    shown = re.sub(r"sliding\s+window", "", capsys.readouterr().out)  # of attention
    assert not re.search("window", shown, re.IGNORECASE)


def test_no_other_input_is_overwritten(shards, tmp_path):
    text, imatrix = tmp_path / "text.txt", tmp_path / "i.dat"
    text.write_text("one two three four five six seven eight nine ten\n" * 100)
    iqforge.collect_imatrix(shards[0], text, imatrix, n_ctx=64, chunks=1)
    link = tmp_path / "link"
    link.symlink_to(shards[1])
    before = digests(*shards, text, imatrix)
    for out in (shards[0], shards[1], link, text):
        for write in (
            lambda out=out: iqforge.collect_imatrix(shards[0], text, out, n_ctx=64, chunks=1),
            lambda out=out: iqforge.measure_perplexity(
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


@pytest.mark.parametrize(
    "words, message",
    [
        ("perplexity -m MODEL -f EMPTY", "'': no such text file"),
        ("generate -m EMPTY -p x", "'': no such file or folder"),
        ("chat -m MODEL --messages EMPTY", "'': no such"),
        ("chat -m MODEL --tools EMPTY", "'': no such"),
        ("imatrix -m MODEL -p x -o EMPTY", "the name of the output is empty"),
        ("profile -m MODEL -o EMPTY", "the name of the output is empty"),
        ("compare MODEL MODEL -f here.txt --json EMPTY", "the name of the output is empty"),
        ("compare MODEL MODEL -f here.txt --html EMPTY", "the name of the output is empty"),
        ("compare MODEL MODEL -f here.txt --work EMPTY", "--work is empty, expected a folder"),
    ],
)
def test_empty_names_of_files_are_errors_that_show(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("here.txt").write_text("one two three four five six seven eight nine ten\n" * 20)
    model = str(Path(iqforge.__file__).parent / "demo" / "model")
    named = {"MODEL": model, "EMPTY": ""}
    assert main([*(named.get(word, word) for word in words.split()), "--device", "cpu"]) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_messages_end_with_the_command():
    """Loggers remember what they may say."""
    log = logging.getLogger("iqforge.runtime.simd.operations")
    before = log.isEnabledFor(logging.INFO)
    with cli._log_to_stderr():
        assert log.isEnabledFor(logging.INFO)
    assert log.isEnabledFor(logging.INFO) == before
