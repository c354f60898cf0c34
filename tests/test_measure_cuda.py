"""Measuring the CUDA table with a tiny model on the CPU: figures are stored at once, and an
interrupted run resumes.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from iqforge.runtime.bench import bench
from iqforge.runtime.bench.shapes import SHAPES
from iqforge.runtime.bench.synthetic import SyntheticSource

TYPES = ("Q8_0", "Q4_0")


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location(
        "measure_cuda", Path(__file__).parents[1] / "benchmarks/cuda_runtime.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "measure_cuda", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.ALL_ROWS = [*module.ROWS, *module.ARCHITECTURES]
    module.ROWS = [module.Row("llama-tiny", type, ("1 / 2", "-"), 9) for type in TYPES]
    return module


def run(script, monkeypatch, *words: str) -> int:
    options = ["--device", "cpu", "--precision", "f32", "-p", "8", "-n", "2", "-r", "2"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/cuda_runtime.py", *options, *words])
    return script.main()


def test_every_shape_has_a_row(script):
    """But small ones, for tests. What does not fit one device has a row of its first layers."""
    rows = script.ALL_ROWS
    assert {row.shape for row in rows} == {x for x in SHAPES if not x.endswith("-tiny")}
    for row in rows:
        with SyntheticSource(row.name) as source:
            assert sum(tensor.n_bytes for tensor in source.tensors) < 130 * 2**30
    assert "(first 20 layers) IQ4_K" in next(x.label for x in rows if x.shape == "deepseek-v3")


@pytest.mark.full
def test_a_run_resumes_where_one_was_cut_off(script, monkeypatch, tmp_path, capsys):
    path, measured, run_test = tmp_path / "cuda.jsonl", [], bench.run_test

    def counted(model, test, **options):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(test.label)
        return run_test(model, test, **options)

    monkeypatch.setattr(bench, "run_test", counted)
    with pytest.raises(KeyboardInterrupt):
        run(script, monkeypatch, "--json", str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["row"], line["test"], len(line["samples_ts"])) for line in lines] == [
        ("llama-tiny:Q8_0", "pp", 2),
        ("llama-tiny:Q8_0", "tg", 2),
        ("llama-tiny:Q4_0", "pp", 2),
    ]
    with open(path, "a") as file:
        file.write('{"row": "llama-tiny:Q4_0", "te')  # a write that was cut off
    measured.clear()
    capsys.readouterr()
    assert run(script, monkeypatch, "--json", str(path)) == 0
    assert measured == ["tg2"]
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 4 and all(line.count("±") == 2 for line in table[2:])
    assert {line.count("|") for line in table} == {7}
    assert run(script, monkeypatch, "--json", str(path)) == 0 and measured == ["tg2"]
    assert run(
        script, monkeypatch, "--json", str(path), "-n", "3", "--type", "Q8_0"
    ) == 0 and measured[1:] == ["pp8", "tg3"]
    capsys.readouterr()
    monkeypatch.setattr(script, "code", lambda: "other sources")
    measured.clear()
    assert run(script, monkeypatch, "--json", str(path), "--table") == 0 and not measured
    assert capsys.readouterr().out.splitlines() == table
    assert run(script, monkeypatch, "--json", str(path), "--type", "Q8_0") == 0 and measured == [
        "pp8",
        "tg2",
    ]


def test_a_row_that_fails_does_not_touch_the_others(script, monkeypatch, capsys):
    run_test = bench.run_test

    def failing(model, test, **options):
        if "Q8_0" in str(model.source.path):
            raise RuntimeError("no such kernel")
        return run_test(model, test, **options)

    monkeypatch.setattr(bench, "run_test", failing)
    assert run(script, monkeypatch) == 1
    captured = capsys.readouterr()
    assert "no such kernel" in captured.err and "| - / - |" in captured.out.splitlines()[2]
    assert captured.out.splitlines()[3].count("±") == 2


def test_the_table_of_architectures(script, monkeypatch, tmp_path, capsys):
    """Rows with and without a deep context."""
    monkeypatch.setattr(script, "DEEP", 16)
    rows = [script.Row("llama-tiny", type, ("1 / 2", "-"), deep=type == "Q8_0") for type in TYPES]
    monkeypatch.setattr(script, "ARCHITECTURES", rows)
    path = tmp_path / "cuda.jsonl"
    assert run(script, monkeypatch, "--architectures", "--json", str(path)) == 0
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["test"] for line in found] == ["pp", "tg", "deep", "pp", "tg"]
    header, _, deep, plain = capsys.readouterr().out.splitlines()
    assert header.count("|") == deep.count("|") == plain.count("|") == 7
    assert deep.endswith(" %) |") and plain.endswith("| - |")


def test_rows_of_the_tables_are_known_shapes(script):
    for row in script.ARCHITECTURES:
        assert row.shape in SHAPES
