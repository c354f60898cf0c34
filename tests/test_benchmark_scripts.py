"""The scripts in benchmarks/ can be run from a clone, with the package installed."""

from __future__ import annotations

import json
import re
import runpy
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def run_script(script, words, monkeypatch):
    """Run `python benchmarks/NAME.py WORDS` in this process, and return what it exits with."""
    if "from cuda import core" in script.read_text():
        pytest.importorskip("cuda.core")
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    try:
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(script), run_name="__main__")
    finally:  # a script may import another one under a short name
        for name in {path.stem for path in SCRIPTS} - before:
            sys.modules.pop(name, None)
    return stopped.value.code


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help(script, monkeypatch, capsys):
    """A script imports what it needs, and its help names the command."""
    assert run_script(script, ["--help"], monkeypatch) == 0
    assert f"python benchmarks/{script.name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        *("attention", "copy_rate", "cuda_runtime", "expert_slots", "latent_prompts", "matvec"),
        *("prompt_rows", "reads", "step_times llama-8b:IQ4_K,layers=2", "step_types"),
    ],
)
def test_scripts_for_gpus_say_that_there_is_none(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    name, *words = command.split()
    assert run_script(FOLDER / f"{name}.py", words, monkeypatch) == "no CUDA device found"


def test_attention_of_prompts_is_measured_on_hopper_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    script = FOLDER / "prompt_attention.py"
    assert run_script(script, [], monkeypatch) == "no Hopper GPU found"


def test_a_table_of_models_on_several_gpus(tmp_path, monkeypatch, capsys):
    lines = tmp_path / "found.jsonl"
    shared = {"model": "llama-8b:IQ4_K", "prompt": 68831.8, "step": 819.74}
    ways = [(2, "layer", 0), (1, "none", 0), (2, "graph", 32768)]
    found = [shared | {"gpus": n, "mode": mode, "depth": depth} for n, mode, depth in ways]
    lines.write_text("".join(json.dumps(one) + "\n" for one in found))
    script = FOLDER / "tensor_parallel.py"
    monkeypatch.setattr(sys, "argv", [str(script), "table", str(lines)])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(script), run_name="__main__")
    assert not stopped.value.code
    head, _, short, deep = capsys.readouterr().out.splitlines()
    assert head == "| model | one GPU | 2 GPUs | 2 GPUs, layer |"
    assert short == "| llama-8b:IQ4_K | 68,832 / 819.7 | - | 68,832 / 819.7 |"
    assert deep == "| llama-8b:IQ4_K at depth 32,768 | - | 68,832 / 819.7 | - |"


def test_a_table_of_better_bits(tmp_path, monkeypatch, capsys):
    before = {"kld": {"a": 0.1, "b": 0.2}, "top": {"a": 0.8, "b": 0.7}, "tasks": {"a": "0011"}}
    after = {"kld": {"a": 0.05, "b": 0.1}, "top": {"a": 0.9, "b": 0.9}, "tasks": {"a": "1111"}}
    lines = [{"type": "base", "guide": "", "tasks": {}}]
    lines += [{"type": "IQ3_K", "guide": "imatrix", **before}]
    lines += [{"type": "IQ3_K", "guide": "hessian", **after}]
    lines += [{"type": "Q6_K", "guide": "imatrix", **before}]
    work = tmp_path / "mini"
    work.mkdir()
    (work / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    script = FOLDER / "better_bits.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--table", str(work)])
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert "| IQ3_K | 0.10000 x 0.500 | 0.20000 x 0.500 | 0.500 | 0.500 | +15.00 % |" in said
    assert "| 2 and 3 bits | 0.500 | x 0.500 | x 0.500 | +15.00 % | +50.00 ± 25.00 % |" in said
    assert "Q6_K" not in said


def test_names_shadow_nothing():
    """The folder of a script comes first on Python's path, so that `convert.py` there would hide an
    installed module of that name.
    """
    tree = {FOLDER, FOLDER.parent}
    paths = [path for path in sys.path if Path(path).resolve() not in tree]
    for script in SCRIPTS:
        assert script.stem not in sys.stdlib_module_names
        assert PathFinder.find_spec(script.stem, paths) is None, script.name


def test_pages_name_scripts_that_exist():
    root, found = FOLDER.parent, set()
    for page in [root / "README.md", *(root / "docs").rglob("*.md")]:
        found |= set(re.findall(r"\bbenchmarks/(\w+\.py)", page.read_text()))
        assert "tests/measure_" not in page.read_text(), page
    assert found and found <= {script.name for script in SCRIPTS}


def test_versions_measured_in_turn(tmp_path, monkeypatch, capsys):
    """Two packages that say how fast they are. One that ends is an error."""
    for name, speed in (("old", 100.0), ("new", 98.0)):
        package = tmp_path / name / "iqforge"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(
            "import contextlib, types\n"
            "def random_model(spec, device, ubatch):\n"
            "    print('loading')\n"
            f"    assert (spec, {name!r}) != ('gone', 'new')\n"
            "    return contextlib.nullcontext()\n"
            "def benchmark_model(model, prompts, generations, depths, repetitions):\n"
            "    labels = [f'tg{generations[0]} @ d{depth}' for depth in depths]\n"
            "    tests = [types.SimpleNamespace(label=label) for label in labels]\n"
            f"    return [types.SimpleNamespace(test=x, avg_ts={speed}) for x in tests]\n"
        )
    script, found = FOLDER / "alternate.py", tmp_path / "found.jsonl"
    words = [
        f"old={tmp_path}/old",
        f"new={tmp_path}/new",
        "gone",
        "m:Q8_0,layers=2",
        "-p",
        "0",
        "-n",
        "4",
        "-d",
        "0,64",
    ]
    monkeypatch.setattr(sys, "argv", [str(script), *words, "-r", "2", "--json", str(found)])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(script), run_name="__main__")
    assert stopped.value.code == 1
    out = capsys.readouterr().out
    for depth in (0, 64):
        assert f"| m:Q8_0,layers=2 tg4 @ d{depth} | 100.0 | 98.0 (-2.0 %) |" in out
    assert "gone" not in out
    samples = json.loads(found.read_text())["samples"]
    labels = "tg4 @ d0", "tg4 @ d64"
    assert samples == {
        name: {label: [speed, speed] for label in labels}
        for name, speed in (("old", 100.0), ("new", 98.0))
    }
