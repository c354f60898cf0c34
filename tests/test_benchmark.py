"""The benchmark of quantizers: its report, and its messages about things that it cannot use."""

from __future__ import annotations

import json

import numpy as np
import pytest
from iqforge.cli import main as cli
from iqforge.errors import MalformedFileError, NotFoundError, UnsupportedTypeError, UsageError
from iqforge.quantize.encode import encode
from iqforge.quantize.report.reference_library import ReferenceLibrary
from iqforge.quantize.report.timing import measure_on_cpu, sample_rows, weighted_error
from iqforge.quantize.report.type_bench import read_speeds

SMALL = ["--rows", "4", "--cols", "256", "--repeat", "1", "--seconds", "0.001"]


class Half:
    """A library that knows only Q8_0, and quantizes half of its input."""

    def has(self, type):
        return type.name in ("Q8_0", "IQ2_BN")

    def requires_importance(self, type):
        return type.name == "IQ2_BN"

    def survives(self, type, x, importance):
        return True

    def quantize(self, type, x, importance):
        return encode(type, x / 2, importance)


def test_a_library_runs_on_the_same_rows():
    x, importance = sample_rows(4, 256)
    timing = measure_on_cpu("Q8_0", x, importance, Half(), repeat=1, seconds=0.001)
    assert timing.search > 0 and timing.reference > 0 and timing.same_bytes is None
    assert timing.error < 0.01 and 0.49 < timing.reference_error < 0.51
    assert measure_on_cpu("Q4_0", x, importance, Half(), repeat=1, seconds=0.001).reference is None
    assert measure_on_cpu("IQ2_BN", x, None, Half(), repeat=1, seconds=0.001).reference is None


def test_weighted_error_counts_by_importance():
    x = np.ones((1, 256), dtype=np.float32)
    x[0, 128:] = np.linspace(1, 2, 128)
    rows = encode("Q4_0", x)
    only_ones = np.where(np.arange(256) < 128, 1.0, 0.0)
    assert weighted_error("Q4_0", x, rows, only_ones) < 1e-3 < weighted_error("Q4_0", x, rows, None)


def test_command_as_json_table_and_markdown(tmp_path, capsys):
    speeds = tmp_path / "speeds.json"
    speeds.write_text(json.dumps({"melem_per_s": {"Q8_0": 0.001}}))
    words = ["quantize-bench", "--type", "Q8_0", "Q4_0", *SMALL, "--reference-speeds", str(speeds)]
    assert cli([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["type"] for row in rows] == ["Q8_0", "Q4_0"]
    assert (
        rows[0]["table"] == 0.001 and rows[0]["table_ratio"] > 1 and rows[1]["table_ratio"] is None
    )
    assert cli([*words, "--md"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith("| type | M elements/s |")
        and len(lines) == 4
        and lines[3].count("|") == lines[0].count("|")
    )
    assert cli([*words, "--no-importance"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    "content", ["", "[]", '{"melem_per_s": 3}', '{"melem_per_s": {"Q8_0": "fast"}}']
)
def test_tables_that_are_none(tmp_path, content):
    path = tmp_path / "speeds.json"
    path.write_text(content)
    with pytest.raises(MalformedFileError, match="speeds.json"):
        read_speeds(path)
    with pytest.raises(NotFoundError):
        read_speeds(tmp_path / "none.json")


def test_libraries_that_are_none(tmp_path, capsys):
    with pytest.raises(NotFoundError):
        ReferenceLibrary(tmp_path / "libggml.so")
    (tmp_path / "libggml.so").write_bytes(b"no library")
    with pytest.raises(UsageError, match="libggml.so"):
        ReferenceLibrary(tmp_path / "libggml.so")
    assert cli(["quantize-bench", *SMALL, "--reference-library", "x", "--device", "cuda"]) == 1
    assert cli(["quantize-bench", *SMALL, "--rows", "0"]) == 1
    assert "--rows is 0, expected 1 or more" in capsys.readouterr().err
    with pytest.raises(UnsupportedTypeError):
        measure_on_cpu("I2_S", *sample_rows(4, 256))
