"""The output of quantize: a summary by role, the worst tensors, a line of progress; and its
flags.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from iqforge.cli import main
from iqforge.formats.ftypes import FILE_TYPES
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.quantize.commands.flags import preset_lines
from iqforge.quantize.plan.plan import PlannedTensor
from iqforge.quantize.report.bars import RunPrinter
from iqforge.quantize.report.summary import summary_lines
from iqforge.quantize.run.report import RunReport, TensorReport


def tensor(name: str, type: str, rmse: float | None, rows: int = 4, note: str = "") -> TensorReport:
    source = TensorInfo(name, (rows, 256), ggml_type("F32"))
    planned = PlannedTensor(source, source.with_type(ggml_type(type)), note)
    return TensorReport(planned, rmse, None if rmse is None else rmse / 2, rmse is not None)


REPORT = RunReport(
    [
        tensor("token_embd.weight", "Q6_K", 0.01),
        *(tensor(f"blk.{n}.attn_v.weight", "Q4_K", 0.03 + 0.01 * n, 4 * n + 4) for n in range(3)),
        tensor("blk.3.attn_v.weight", "Q5_K", 0.02, note="a fallback"),
        tensor("blk.0.ffn_up.weight", "IQ2_K", 0.3),
        tensor("blk.0.attn_norm.weight", "F32", None),
    ]
)


def test_a_line_for_each_role_and_type():
    lines = summary_lines(REPORT)
    rows = [line.split() for line in lines[1 : lines.index("")]]
    error = math.sqrt((4 * 0.03**2 + 8 * 0.04**2 + 12 * 0.05**2) / 24)
    assert rows == [
        ["token_embd", "1", "q6_K", "0.00", "6.56", "0.01000", "0.00500"],
        ["attn_v", "3", "q4_K", "0.00", "4.50", f"{error:.5f}", f"{error / 2:.5f}"],
        ["1", "q5_K", "0.00", "5.50", "0.02000", "0.01000"],
        ["ffn_up", "1", "iq2_k", "0.00", "2.38", "0.30000", "0.15000"],
        ["attn_norm", "1", "f32", "0.00", "32.00"],
    ]


def test_the_five_worst_tensors_and_the_notes():
    lines = summary_lines(REPORT)
    worst = lines[lines.index("largest errors:") + 1 :]
    assert [line.split()[0] for line in worst[:5]] == [
        "blk.0.ffn_up.weight",
        "blk.2.attn_v.weight",
        "blk.1.attn_v.weight",
        "blk.0.attn_v.weight",
        "blk.3.attn_v.weight",
    ]
    assert worst[5:] == ["", "blk.3.attn_v.weight: a fallback"]
    twice = replace(REPORT, tensors=REPORT.tensors * 2)
    assert summary_lines(twice)[-1] == "2 tensors: a fallback"


@pytest.mark.parametrize("verbose", [False, True])
def test_verbose_prints_lines_for_tensors(verbose, capsys, monkeypatch):
    monkeypatch.setattr("iqforge.quantize.report.bars.time.monotonic", lambda: 0.0)
    printer = RunPrinter(verbose=verbose)
    printer.begin([report.planned for report in REPORT.tensors])
    for index, report in enumerate(REPORT.tensors):
        printer.advance(report.planned.source.n_elements)
        printer.tensor_done(index, report)
    printer.close()
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == (len(REPORT.tensors) if verbose else 0)
    assert printed.err == "", "no bar without a terminal, and no line before five seconds"


def test_a_long_run_without_a_terminal_says_how_far_it_is(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr("iqforge.quantize.report.bars.time.monotonic", lambda: now)
    plans = [tensor(f"blk.{n}.ffn_up.weight", "Q8_0", 0.1).planned for n in range(100)]
    printer = RunPrinter(label="a.gguf")
    printer.begin(plans)
    printer.time_left._clock = lambda: now
    printer.time_left._last = 0.0
    for plan in plans:
        now += 1.0
        printer.advance(plan.source.n_elements)
    printer.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "quantizing a.gguf: 5.0 % in 5 s, about 1.6 min left",
        "quantizing a.gguf: 65 % in 1.1 min, about 35 s left",
    ]


def test_help_names_every_preset_by_size(capsys):
    plain = [name for name, preset in FILE_TYPES.items() if not preset.base.is_interleaved]
    named = re.findall(r"[A-Z]+\d[A-Z0-9_]*", preset_lines().replace("IQ4_K_R4", ""))
    assert sorted(named) == sorted(plain)
    bits = [FILE_TYPES[name].base.bits_per_weight for name in named]
    assert bits == sorted(bits)
    assert main(["help", "quantize"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "iqforge types" in printed and "4 to 5 bits IQ4_KSS" in printed
    assert "--ffn-down-type T type of tensors with ffn_down in their names" in printed
    assert "-t N, --threads N" in printed and "auto (default" in printed
    assert "type of with" not in printed and "type of accepted" not in printed


def test_threads_are_given_once(tmp_path, capsys):
    assert main(["quantize", "-t", "2", str(tmp_path / "in.gguf"), "q8_0", "3"]) == 1
    assert "-t and NTHREADS" in capsys.readouterr().err
