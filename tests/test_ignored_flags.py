"""`--device`, and flags of the reference without effect here: they are accepted with one line, and
wrong values are refused.
"""

from __future__ import annotations

import argparse

import pytest
import torch
from iqforge import cli
from iqforge.cli import main
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import UsageError
from iqforge.runtime.commands import ignored_flags
from iqforge.runtime.commands.flags import add_load_flags
from iqforge.runtime.commands.ignored_flags import BY_FLAG, IGNORED
from iqforge.runtime.commands.speed import flags as bench_options
from iqforge.runtime.model import load_model
from iqforge.runtime.options import SPLIT_FIELDS, LoadOptions
from iqforge.runtime.weights.devices import usable_device

from .tiny_checkpoint import make_tiny_llama
from .tiny_model import write_gguf

VALUES = {  # good ones, bad ones
    "-gap": ("f16 f32", "bf16 F32"),
    "-tb": ("4 0 -1", "-2 many 99999999999"),
    "--numa": ("distribute isolate numactl", "on 1"),
    "-cuda": ("fusion=1 graphs=0,fa-offset=3 mmq-id-size=32", "fusion fusion=x speed=1 fusion=1,"),
    "--prio": ("-1 0 3", "4 high"),
    "--poll": ("0 50 100", "101 -1"),
    "-C": ("ff 0xFF", "0xg -"),
    "-Cr": ("0-7 3- -5", "7 - a-b"),
    "--cpu-strict": ("0 1", "2 yes"),
    "-tgb": ("8,16", "8 8,16,2 a,b"),
    "-s": ("-1 0 4294967295", "-2 abc 4294967296"),
    "-c": ("0 4096", "-1 all"),
    "-b": ("1 2048", "0 -1 x"),
    "-dt": ("0.1 -1 .5", "x 0,1"),
    "-lv": ("0 -1 4", "-2 high"),
    "-ptc": ("-1 0 100", "-2 all"),
    "-lm": ("auto mmap+mlock dio", "fast mmap,dio"),
    "-np": ("1", "2 -1 0 one"),
    "-op": ("-1,0 26,1,27,0", "26 26,2 a,b"),
    "--context-shift": ("off 0", "on 1 auto"),
    "--keep": ("0 -1 64", "-2 all"),
    "-fitc": ("4096 0", "-1 x"),
    "-ctxcp": ("32 0", "-1 x"),
    "-cram": ("8192 -1 0", "-2 x"),
    "--spec-type": ("none", "ngram-simple none,none"),
    "--log-colors": ("on off auto", "1 red"),
    "-co": ("on off auto", "1 red"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(folder / "hf")
    with CheckpointSource(open_checkpoint(folder / "hf")) as source:
        return write_gguf(folder / "tiny.gguf", source)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_load_flags(parser)
    return parser.parse_args(words)


def test_every_flag_with_values_is_tried():
    assert {ignored.flag for ignored in IGNORED if ignored.expected} == VALUES.keys()


@pytest.mark.parametrize("ignored", IGNORED, ids=lambda ignored: ignored.flag)
def test_good_values_are_noted_and_bad_ones_are_named_errors(ignored):
    if not ignored.expected:
        for spelling in ignored.spellings:
            [found] = ignored_flags.given(parsed(spelling))
            assert (found.flag, found.why) == (spelling, ignored.why)
        return
    good, bad = (words.split() for words in VALUES[ignored.flag])
    for spelling in ignored.spellings:
        for value in good:
            [found] = ignored_flags.given(parsed(f"{spelling}={value}"))
            assert (found.flag, found.why) == (spelling, ignored.why)
    for value in [*bad, ""]:
        with pytest.raises(UsageError, match=f"^{ignored.spellings[-1]} is '.*', expe"):
            list(ignored_flags.given(parsed(f"{ignored.spellings[-1]}={value}")))


def test_flags_whose_value_may_be_left_out():
    assert {one.flag for one in ignored_flags.given(parsed("-co", "--log-colors"))} == {
        "-co",
        "--log-colors",
    }
    with pytest.raises(
        UsageError, match="^--context-shift is 'on', expected off: a context is nev"
    ):
        list(ignored_flags.given(parsed("--context-shift")))


def test_bench_takes_and_refuses_the_same():
    def given(*words: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        parser.set_defaults(**{name: LoadOptions.default_of(name) for name in SPLIT_FIELDS})
        bench_options.add_options(parser)
        return parser.parse_args(words)

    for flag, (good, bad) in VALUES.items():
        if flag == "-b":  # one of bench's own
            continue
        for value in good.split():
            notes = bench_options.notes(given(f"{flag}={value}"), True)
            assert (
                [
                    line
                    for line in notes
                    if line.startswith(f"note: {flag} changes nothing here: {BY_FLAG[flag].why}")
                ]
                == notes
                != []
            )
        with pytest.raises(UsageError, match=f"^{flag} "):
            bench_options.notes(given(f"{flag}={bad.split()[0]}"), True)


@pytest.mark.parametrize(
    "command, known",
    [
        ("perplexity", "-c -b"),
        ("imatrix", "-c -b"),
        ("generate", "-s -c"),
        ("chat", "-s -c"),
        ("embedding", ""),
        ("bench", "-b --no-warmup"),
        ("sweep-bench", "-b -c --no-warmup"),
        ("profile", "-b"),
    ],
)
def test_flags_that_only_some_commands_have_are_without_effect_in_the_others(command, known):
    parser, _ = cli._parser(command)
    for flag, value in {"-s": "5", "-c": "64", "-b": "32", "--no-warmup": None}.items():
        words = [flag] if value is None else [flag, value]
        args = parser.read(["-m", "x", *words])
        ignored = [one.flag for one in ignored_flags.given(args)]
        assert ignored == ([] if flag in known.split() else [flag])


@pytest.mark.parametrize("flags", ["-cnv -e", "--conversation --escape"])
def test_chat_takes_what_is_always_so(flags):
    assert not list(ignored_flags.given(cli._parser("chat")[0].read(["-m", "x", *flags.split()])))


def test_bench_says_so(monkeypatch, model, capsys):
    Devices.install(monkeypatch, 0)
    assert (
        main(
            [
                "bench",
                "-m",
                str(model),
                "-p",
                "4",
                "-n",
                "0",
                "-r",
                "1",
                "-sm",
                "row",
                "-tgb",
                "2,2",
            ]
        )
        == 0
    )
    _, err = capsys.readouterr()
    assert (
        "device: cpu (there is no GPU)" in err
        and "note: -tgb changes nothing here" in err
        and "note: -sm changes nothing here: everything is on the CPU" in err
    )


class Devices:
    """Two GPUs, as torch presents them."""

    @staticmethod
    def install(monkeypatch, count: int = 2) -> None:
        empty = torch.empty
        for name, value in (
            ("is_available", lambda: count > 0),
            ("device_count", lambda: count),
            ("current_device", lambda: 1),
            ("get_device_name", lambda index: f"GPU {index}"),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size))


@pytest.mark.parametrize(
    "words, field, value",
    [
        ("-dev CUDA1", "device", "cuda:1"),
        ("--device none", "device", "cpu"),
        ("--device auto", "device", "auto"),
        ("-ngl all", "gpu_layers", None),
        ("-ngl 3 -ngl all", "gpu_layers", None),
        ("-ngl 3 -ngl auto", "gpu_layers", None),
        ("--fit on", "fit", 1024),
        ("-fit off", "fit", None),
        ("-fit", "fit", 1024),
        ("-fitt 512", "fit", 512),
        ("--fit-target 512", "fit", 512),
        ("--fit-margin 512", "fit", 512),
    ],
)
def test_words_of_llama_cpp(words, field, value):
    for command in ("perplexity", "generate", "compare"):
        needed = ["-m", "x"] if command != "compare" else ["a", "b", "-f", "t"]
        args = cli._parser(command)[0].read([*needed, *words.split()])
        assert getattr(LoadOptions.from_flags(args), field) == value


def test_devices(monkeypatch):
    Devices.install(monkeypatch)
    names = {
        "auto": "cuda:0",
        "cuda": "cuda:1",
        "cuda:0": "cuda:0",
        "cuda:1": "cuda:1",
        "cpu": "cpu",
    }
    assert {name: str(usable_device(name)) for name in names} == names
    assert usable_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    with pytest.raises(
        UsageError, match=r"no device 'cuda:2': here are cpu, cuda:0 \(GPU 0\), cuda:1 \(GPU 1\)"
    ):
        usable_device("cuda:2")
    with pytest.raises(
        UsageError,
        match="'cuda:0,1' cannot be used: models run on one GPU; use cpu, cuda, cuda:N or auto",
    ):
        usable_device("cuda:0,1")
    for wrong in ("gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "cpu:0", "", "cuda:99999"):
        with pytest.raises(UsageError, match="cannot be used; use cpu, cuda, cuda:N or auto"):
            usable_device(wrong)


def test_without_a_gpu(monkeypatch, model):
    Devices.install(monkeypatch, 0)
    assert str(usable_device("auto")) == "cpu"
    with pytest.raises(UsageError, match="no device 'cuda': here is only cpu"):
        usable_device("cuda")
    with load_model(model, "auto") as opened:
        assert opened.device == torch.device("cpu")
    with pytest.raises(UsageError, match="no device 'cuda:3': here is only cpu"):
        load_model(model, "cuda:3")
