"""Options that flags and keywords share, and calls by path with options for loading a model."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import iqforge
import pytest
import torch
from iqforge import cli
from iqforge.cli import COMMANDS, main
from iqforge.commandline.parser import Parser
from iqforge.convert.architectures.layout_options import LayoutOptions
from iqforge.convert.options import ConvertOptions, LoraOptions
from iqforge.errors import UsageError
from iqforge.formats.flags import Constant
from iqforge.formats.options import Options, from_keywords, option
from iqforge.formats.tools.options import GateUpOptions, MergeShardsOptions, SplitOptions
from iqforge.imatrix.options import (
    CollectOptions,
    ConvertFileOptions,
    CoverageOptions,
    MergeOptions,
    SensitivityOptions,
)
from iqforge.proof.auto_options import AutoOptions
from iqforge.quantize.options import (
    QuantizeOptions,
    RepackOptions,
    Shards,
    StatsOptions,
    TargetOptions,
    ValidateOptions,
    WarmUpOptions,
)
from iqforge.quantize.plan.changes import Changes
from iqforge.quantize.plan.recipe import Recipe
from iqforge.runtime.bench.options import BenchOptions, SweepOptions
from iqforge.runtime.chat.options import ChatOptions
from iqforge.runtime.commands.speed.flags import OPTIONS
from iqforge.runtime.options import LoadOptions
from iqforge.runtime.sampling.options import SamplerOptions
from iqforge.runtime.text_options import ChunkOptions, GenerateOptions, PerplexityOptions

DEMO = Path(iqforge.__file__).parent / "demo" / "model"
TEXT = "The quick brown fox jumps over the lazy dog.\n" * 60


@dataclass(frozen=True)
class Shapes(Options):
    numbers: tuple[int, ...] = option((), "--numbers", kind=int, many=True, commas=True)
    rules: str | tuple[str, ...] = option((), "--rule", kind=object, many=True, one_text=True)
    side: str | None = option(
        None,
        constants=(Constant(("--left", "-l"), "left", ""), Constant(("--right",), "right", "")),
    )
    by_name: Mapping[str, str] = option(
        {}, keyed={"a": ("--a-is", "what a is"), "b": ("--b-is", "")}
    )


@dataclass(frozen=True)
class Sizes(Options):
    width: int = option(4, "-w", "--width", least=1, metavar="N", help="how wide")
    rate: float = option(0.5, "--rate", help="how fast")
    names: tuple[str, ...] = option((), "--name", kind=str, many=True)
    quiet: bool = option(False, "--quiet", aliases=("--silent",))
    bold: bool = option(True, "--no-bold", off=True)
    mode: str | None = option(None, "--mode", choices=("a", "b"))
    words: tuple[str, ...] = option((), "--words", kind=str, many=True, several=True)


def parsed(*words: str) -> Sizes:
    parser = Parser("iqforge sizes")
    Sizes.add_flags(parser)
    return Sizes.from_flags(parser.parse_args(words))


def test_flags_of_a_dataclass():
    assert parsed() == Sizes()
    assert parsed("--silent") == Sizes(quiet=True)
    assert parsed("--words", "a", "b", "--words", "c").words == ("a", "b", "c")
    words = ["-w", "7", "--rate", "2", "--name", "x", "--name", "y", "--quiet", "--no-bold"]
    assert parsed(*words, "--mode", "b") == Sizes(7, 2.0, ("x", "y"), True, False, "b")
    with pytest.raises(UsageError, match="^-w is 0, expected 1 or more$"):
        parsed("-w", "0")
    parser = argparse.ArgumentParser()
    Sizes.add_flags(parser, only=("width",), width=9)
    shown = argparse.ArgumentParser()
    Sizes.add_flags(shown)
    assert "--silent" not in shown.format_help() and "--quiet" in shown.format_help()
    assert "how wide (default: 9)" in parser.format_help() and "--rate" not in parser.format_help()
    assert Sizes.from_flags(parser.parse_args([])) == Sizes(9)


def test_flags_of_lists_constants_and_dicts():
    parser = Parser("iqforge shapes")
    Shapes.add_flags(parser)

    def read(*words: str) -> Shapes:
        return Shapes.from_flags(parser.parse_args(words))

    assert read() == Shapes() and Shapes().by_name == {}
    assert read("--numbers", "3,1", "--numbers", "2").numbers == (3, 1, 2)
    for wrong in ("x", "1,,2", ","):
        with pytest.raises(UsageError, match=f"--numbers {wrong}: expected numbers separated by"):
            read("--numbers", wrong)
    assert read("--rule", "a=1,2").rules == ("a=1,2",) and Shapes(rules="a=1").rules == "a=1"
    with pytest.raises(UsageError, match="rules is 5, expected a list"):
        from_keywords("shapes", {"rules": 5}, (Shapes, None))
    assert [read(word).side for word in ("-l", "--right")] == ["left", "right"]
    assert read("--b-is", "x", "--a-is", "y").by_name == {"a": "y", "b": "x"}
    assert "what a is" in parser.format_help()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"width": 0}, "width is 0, expected 1 or more"),
        ({"width": "x"}, "width is 'x', expected a whole number, 1 or more"),
        ({"width": True}, "width is True"),
        ({"rate": "fast"}, "rate is 'fast', expected a number"),
        ({"names": "abc"}, "names is 'abc', expected a list"),
        ({"quiet": 3}, "quiet is 3, expected true or false"),
        ({"mode": "c"}, "mode is 'c', expected one of a, b"),
        ({"widht": 3}, "a box has no option 'widht'; did you mean 'width'?"),
        ({"frobnicate": 3}, "a box has no option 'frobnicate'"),
    ],
)
def test_keywords_of_a_dataclass(wrong, message):
    with pytest.raises(UsageError) as raised:
        from_keywords("a box", wrong, (Sizes, None))
    assert message in str(raised.value)


def test_quantizing_takes_options_and_keywords():
    options = QuantizeOptions(dry_run=True, gate_up="merge")
    plain = iqforge.quantize_model(DEMO, None, "Q8_0", dry_run=True)
    given = iqforge.quantize_model(DEMO, None, "Q8_0", options=options, gate_up=None)
    assert [t.planned for t in given.tensors] == [t.planned for t in plain.tensors]
    with pytest.raises(UsageError, match="expected QuantizeOptions"):
        iqforge.quantize_model(DEMO, None, "Q8_0", options=LoadOptions())
    for wrong, message in (
        ({"threads": "2"}, "threads is '2', expected a whole number"),
        ({"rules": "main"}, "rules is 'main', expected one of ik, mainline"),
        ({"bpw": "4"}, "bpw is '4', expected a number"),
    ):
        with pytest.raises(UsageError, match=message):
            if "bpw" in wrong:
                iqforge.recipe_for_target(DEMO, **wrong)
            else:
                iqforge.quantize_model(DEMO, None, "Q8_0", dry_run=True, **wrong)
    with pytest.raises(UsageError, match="include_weights is 'ffn', expected a list"):
        Changes(include_weights="ffn")


def test_conversion_takes_options_and_keywords(tmp_path):
    given = {"options": ConvertOptions(name="a", threads=1), "layout": LayoutOptions(mtp="drop")}
    made = [
        iqforge.convert_model(DEMO, tmp_path / "1.gguf", name="b", mtp="keep", vocab_only=True),
        iqforge.convert_model(DEMO, tmp_path / "2.gguf", **given, name="b", vocab_only=True),
    ]
    assert made[0].read_bytes() == made[1].read_bytes()
    for wrong, message in (
        ({"mtp": "some"}, "mtp is 'some', expected one of keep, drop, only"),
        ({"split_max_tensors": "3"}, "split_max_tensors is '3', expected a whole number"),
        ({"layout": ConvertOptions()}, "expected LayoutOptions"),
        ({"nam": "b"}, "convert_model has no option 'nam'; did you mean 'name'?"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            iqforge.convert_model(DEMO, tmp_path / "3.gguf", **wrong)
    with iqforge.open_source(DEMO) as source, pytest.raises(UsageError, match="'metadata'"):
        iqforge.plan_conversion(source, None, "f32", metdata="x.json")


def test_keywords_win_over_options():
    [made] = from_keywords("a box", {"width": 9}, (Sizes, Sizes(3, 0.25)))
    assert made == Sizes(9, 0.25)
    with pytest.raises(UsageError, match="expected Sizes"):
        from_keywords("a box", {}, (Sizes, LoadOptions()))


@pytest.mark.parametrize(
    "command, classes",
    [
        ("perplexity", [LoadOptions, PerplexityOptions]),
        ("generate", [LoadOptions, GenerateOptions]),
        ("chat", [LoadOptions, ChatOptions]),
        ("imatrix", [LoadOptions, CollectOptions, MergeOptions]),
        ("sensitivity", [LoadOptions, SensitivityOptions]),
        ("bench", [BenchOptions]),
        ("sweep-bench", [SweepOptions]),
        ("convert", [ConvertOptions, LayoutOptions]),
        ("quantize", [Recipe, Changes, QuantizeOptions, Shards, TargetOptions]),
        ("repack", [RepackOptions]),
        ("quantize-stats", [StatsOptions]),
        ("validate", [ValidateOptions]),
        ("convert-lora", [LoraOptions]),
        ("warmup", [WarmUpOptions]),
        ("imatrix-convert", [ConvertFileOptions]),
        ("imatrix-coverage", [CoverageOptions]),
        ("gguf-split", [SplitOptions, MergeShardsOptions]),
        ("merge-gate-up", [GateUpOptions]),
    ],
)
def test_every_flag_of_an_options_class_is_one_of_its_command(command, classes):
    parser, _ = cli._parser(command)
    flags = {name: a for a in parser._actions for name in a.option_strings}
    for cls in classes:
        for one in fields(cls):
            for name in one.metadata["flag"].spellings if "flag" in one.metadata else ():
                assert flags[name].dest == one.name


def test_settings_of_bench_are_declared_once():
    """Flags, help, kinds and defaults of lists are those of the commands that take one value."""
    parser, _ = cli._parser("bench")
    flags = {name: a for a in parser._actions for name in a.option_strings}
    for name in LoadOptions.field_names():
        for flag in (declared := LoadOptions.flag_of(name)).names:
            if flag in flags and name not in ("device", "fit"):
                assert declared.help in str(flags[flag].help).replace("%%", "%")
    found = {option.field: option for option in OPTIONS}
    assert found["n_ubatch"].default == 512 and "(default: 512)" in found["n_ubatch"].help
    assert found["n_batch"].default == BenchOptions().n_batch
    assert found["flash_attn"].kind is bool and found["flash_attn"].default is True
    assert [found[name].default for name in ("precision", "n_gpu_layers", "type_k", "ser")] == [
        "",
        99,
        "f16",
        "",
    ]


def test_devices_are_chosen_by_default():
    for command in ("perplexity", "generate", "imatrix", "sensitivity", "bench", "profile"):
        parser, _ = cli._parser(command)
        [action] = [a for a in parser._actions if "--device" in a.option_strings]
        assert action.default == "auto" and "(default: auto)" in str(action.help)


@pytest.mark.parametrize("command", ["perplexity", "generate", "imatrix", "bench"])
def test_placement_comes_last_in_help(command, capsys):
    main(["help", command])
    out = capsys.readouterr().out
    headings = re.findall(r"^(\S.*):$", out, re.MULTILINE)
    headings = [heading for heading in headings if heading not in ("example", "examples")]
    assert headings[-1] == "where and how the model runs"
    assert out.index("  -m MODEL") < out.index(headings[-1]) < out.index("  --device D")


# ---- calls of the Python interface


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: iqforge.collect_imatrix(DEMO, TEXT, chunk=3),
            "collect_imatrix has no option 'chunk'; did you mean 'chunks'?",
        ),
        (
            lambda: iqforge.measure_perplexity(DEMO, TEXT, nctx=64),
            "measure_perplexity has no option 'nctx'; did you mean 'n_ctx'?",
        ),
        (
            lambda: list(iqforge.generate(DEMO, "a", temprature=0)),
            "generate has no option 'temprature'; did you mean 'temperature'?",
        ),
        (lambda: iqforge.benchmark_model(DEMO, prompt=[4]), "did you mean 'prompts'?"),
        (lambda: iqforge.measure_sensitivity(DEMO, TEXT, layer=2), "did you mean 'layers'?"),
        (lambda: iqforge.load_model(DEMO, gpu_layer=3), "did you mean 'gpu_layers'?"),
        (lambda: iqforge.random_model("llama-tiny:Q8_0", precison="f32"), "'precision'?"),
        (lambda: iqforge.merge_imatrices([], chunksize=3), "did you mean 'chunk_size'?"),
        (lambda: iqforge.quantize_model(DEMO, None, "Q8_0", pur=True), "did you mean 'pure'?"),
        (lambda: iqforge.quantize_model(DEMO, None, "Q8_0", thread=1), "did you mean 'threads'?"),
        (lambda: iqforge.quantize_stats(DEMO, ["Q8_0"], row=5), "did you mean 'rows'?"),
        (lambda: iqforge.convert_model(DEMO, "x.gguf", vocab=True), "'vocab_only'?"),
        (lambda: iqforge.validate_model(DEMO, agianst=DEMO), "did you mean 'against'?"),
        (lambda: iqforge.repack_model(DEMO, None, undoo=True), "did you mean 'undo'?"),
        (lambda: iqforge.split_model(DEMO, "x", max_tensor=3), "did you mean 'max_tensors'?"),
        (lambda: iqforge.merge_model(DEMO, "x", delete=True), "no option 'delete'"),
        (lambda: iqforge.merge_gate_up(DEMO, "x", undoo=True), "did you mean 'undo'?"),
        (lambda: iqforge.convert_lora(DEMO, bas="x"), "did you mean 'base'?"),
        (lambda: iqforge.plan_lora(DEMO, nam="x"), "did you mean 'name'?"),
        (lambda: iqforge.repack_model(DEMO, None, threads="2"), "threads is '2', expected a whole"),
        (lambda: iqforge.quantize_stats(DEMO, include="ffn"), "include is 'ffn', expected a list"),
        (lambda: iqforge.validate_model(DEMO, options=StatsOptions()), "expected ValidateOptions"),
    ],
)
def test_a_misspelt_keyword_is_named(call, message):
    with pytest.raises(UsageError) as raised:
        call()
    assert message in str(raised.value)


def test_calls_by_path_take_how_the_model_is_loaded():
    for call in (
        lambda **load: iqforge.measure_perplexity(DEMO, TEXT, n_ctx=64, **load),
        lambda **load: iqforge.collect_imatrix(DEMO, TEXT, n_ctx=64, **load),
        lambda **load: iqforge.benchmark_model(DEMO, **load),
        lambda **load: list(iqforge.generate(DEMO, "a", 2, **load)),
        lambda **load: iqforge.profile_model(DEMO, **load),
        lambda **load: list(iqforge.sweep_model(DEMO, **load)),
        lambda **load: iqforge.measure_sensitivity(DEMO, TEXT, n_ctx=64, **load),
    ):
        for load in ({"device": "cuda:77"}, {"load": LoadOptions(device="cuda:77")}):
            with pytest.raises(UsageError, match="no device 'cuda:77'"):
                call(**load)


def test_options_of_loading_are_for_paths():
    with iqforge.load_model(DEMO, cache_size=64, ubatch=32) as model:
        assert model.ubatch == 32
        one = iqforge.measure_perplexity(model, TEXT, n_ctx=64, chunks=2)
        for load in ({"device": "cpu"}, {"load": LoadOptions()}):
            with pytest.raises(UsageError, match="already loaded"):
                iqforge.measure_perplexity(model, TEXT, n_ctx=64, **load)
    for other in (
        {"n_ctx": 64, "chunks": 2, "cache_type_k": None, "device": "auto", "precision": "f32"},
        {"options": PerplexityOptions(n_ctx=64, chunks=2), "load": LoadOptions(ubatch=32)},
    ):
        found = iqforge.measure_perplexity(DEMO, TEXT, **other)
        assert found.perplexity == one.perplexity


# ---- commands


def command_files() -> list[Path]:
    root = Path(iqforge.__file__).parent
    found = {
        root.joinpath(*c.module.strip(".").split(".")).with_suffix(".py") for c in COMMANDS.values()
    }
    return sorted(found)


@pytest.mark.parametrize("path", command_files(), ids=lambda path: path.stem)
def test_every_command_goes_through_the_api(path):
    """Commands use `api`, and open no model or file without it."""
    source = path.read_text()
    assert re.search(r"\bapi\.\w+\(|\(\s*api,|self\.api|Chain\(api|, api\)|, api,", source)
    tree = ast.parse(source)
    for_types = {
        inner
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in node.body
    }
    imported = {
        alias.name
        for node in {*ast.walk(tree)} - for_types
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    work = {
        *("open_gguf", "open_checkpoint", "Model", "load_model", "load_imatrix", "run_test"),
        *("measure_perplexity", "measure_divergence", "generate_tokens", "profile_model"),
        *("plan_split", "write_split", "merge_model", "AdapterSource", "plan_adapter"),
        *("measure", "measure_on_cpu"),
    }
    assert not imported & work


def test_sensitivity_refuses_eight_bits():
    with pytest.raises(UsageError, match="precision is int8, which has errors"):
        iqforge.measure_sensitivity(DEMO, TEXT, precision="int8", device="cpu")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"gpu_layers": -2}, r"^gpu_layers \(-ngl\) is -2"),
        ({"expert_reduction": ""}, r"^expert_reduction \(-ser\) is empty$"),
        ({"cache_type_k": ""}, r"^cache_type_k \(-ctk\) is empty$"),
        ({"cache_type_v": ""}, r"^cache_type_v \(-ctv\) is empty$"),
        ({"tensor_split": ""}, r"^tensor_split \(-ts\) is empty$"),
        ({"cache_type_v": "q8_0", "flash_attn": "off"}, r"flash_attn \(-fa\) is off$"),
    ],
)
def test_errors_name_the_keyword_and_the_flag(options, message):
    with pytest.raises(UsageError, match=message):
        iqforge.load_model(DEMO, **options)


@pytest.mark.parametrize(
    "options, words, message",
    [
        (ChunkOptions, ["--chunks", "-2"], "--chunks is -2, expected -1 or more"),
        (GenerateOptions, ["-n", "-3"], "-n is -3, expected -2 or more"),
        (AutoOptions, ["--chunks", "-2"], "--chunks is -2, expected -1 or more"),
        (AutoOptions, ["--test-chunks", "-2"], "--test-chunks is -2, expected -1 or more"),
        (LoadOptions, ["-t", "-2"], "-t is -2, expected -1 or more"),
        (SamplerOptions, ["--min-p", "1.5"], "--min-p is 1.5, expected 0 to 1"),
        (SamplerOptions, ["--min-p", "nan"], "--min-p is nan, expected 0 to 1"),
        (SamplerOptions, ["--temp", "inf"], "--temp is inf, expected a finite number"),
        (
            SamplerOptions,
            ["--dynatemp-exp", "nan"],
            "--dynatemp-exp is nan, expected a finite number",
        ),
        (SamplerOptions, ["--top-p", "0"], "--top-p is 0.0, expected more than 0 and at most 1"),
        (
            SamplerOptions,
            ["--repeat-penalty", "0"],
            "--repeat-penalty is 0.0, expected more than 0",
        ),
    ],
)
def test_numbers_without_a_meaning_are_refused(options, words, message):
    parser = argparse.ArgumentParser()
    options.add_flags(parser)
    with pytest.raises(UsageError, match=f"^{message}$"):
        options.from_flags(parser.parse_args(words))


@pytest.mark.parametrize("asked", [0, -1])
def test_all_threads_are_what_torch_has(asked):
    before = torch.get_num_threads()
    LoadOptions(threads=asked).set_threads()
    assert torch.get_num_threads() == before


def test_help_has_the_default_of_its_command(capsys):
    for command, default in (("perplexity", "-1"), ("sensitivity", "16")):
        assert cli.main(["help", command]) == 0
        help = " ".join(capsys.readouterr().out.split())
        assert f"evaluate at most N chunks of each text; -1, 0: all (default: {default})" in help


@pytest.mark.parametrize(
    "words, field, value",
    [
        (["--no-dsa"], "sparse_attention", False),
        (["--dsa", "off"], "sparse_attention", False),
        (["--dsa"], "sparse_attention", True),
        (["-fa", "off"], "flash_attention", False),
        (["-fa"], "flash_attention", True),
        (["-fa", "true"], "flash_attention", True),
        (["-no-fa"], "flash_attention", False),
        (["--no-flash-attn"], "flash_attention", False),
        ([], "flash_attention", True),
    ],
)
def test_switches_that_are_on_or_off(words, field, value):
    parser = argparse.ArgumentParser()
    LoadOptions.add_flags(parser)
    options = LoadOptions.from_flags(parser.parse_args(words))
    settings = options.settings(torch.device("cpu"))
    assert getattr(settings["switches"], field) is value
