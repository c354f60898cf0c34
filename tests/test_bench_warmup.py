"""Timed spans contain no capture of a CUDA graph. Kernels and graphs are plain torch
(prompt_on_cpu.py, step_on_cpu.py).
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from iqforge.runtime.bench import sweep as bench_sweep
from iqforge.runtime.bench.bench import Test as BenchTest
from iqforge.runtime.bench.bench import run_test
from iqforge.runtime.bench.options import SweepOptions
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.engine import Engine
from iqforge.runtime.cuda.prompt.common import graphs as prompt_graphs
from iqforge.runtime.cuda.step.graphs import StepGraphs
from iqforge.runtime.model import Model

from . import prompt_on_cpu
from .step_graphs_on_cpu import CPU


@pytest.fixture
def captured(monkeypatch):
    """Return (a model with a fast path for passes of 16 rows, a list that gets an entry for every
    capture).
    """
    prompt_on_cpu.install(monkeypatch)
    prompt_on_cpu.captures(monkeypatch)
    captures = []

    def noted(owner):
        real = owner._capture
        monkeypatch.setattr(
            owner,
            "_capture",
            lambda self, *args: (captures.append(owner.__name__), real(self, *args))[1],
        )

    noted(prompt_graphs.PassGraphs)
    noted(StepGraphs)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with Model(SyntheticSource("llama-tiny:Q8_0"), CPU, ubatch=16) as model:
        model.__dict__["engine"] = Engine(model.network, Context(CPU, torch.float16, ubatch=16))
        yield model, captures
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "test, kinds",
    [
        (BenchTest(n_prompt=10), {"PassGraphs"}),
        (BenchTest(n_prompt=16), {"PassGraphs"}),
        (BenchTest(n_prompt=42), {"PassGraphs"}),
        (BenchTest(n_prompt=26, depth=16), {"PassGraphs"}),
        (BenchTest(n_prompt=26, depth=39), {"PassGraphs"}),
        (BenchTest(n_prompt=7), {"StepGraphs"}),
        (BenchTest(n_gen=1), {"StepGraphs"}),
        (BenchTest(n_gen=6), {"StepGraphs"}),
        (BenchTest(n_gen=1, depth=255), {"PassGraphs", "StepGraphs"}),
        (BenchTest(n_prompt=26, n_gen=1, depth=5), {"PassGraphs", "StepGraphs"}),
    ],
    ids=lambda x: getattr(x, "label", ""),
)
def test_repetitions_capture_nothing(captured, test, kinds):
    model, captures = captured
    seen = []

    def progress(line):  # the time does not include filling the context
        seen.append((line, len(captures)))

    run_test(model, test, repetitions=3, progress=progress)
    # So there was something to capture.
    assert {*captures[: seen[1][1]]} == kinds and seen[0] == (
        "warm-up",
        0,
    )
    ends = [at for _, at in seen[1:]] + [len(captures)]
    timed = [
        after - at
        for (line, at), after in zip(seen[1:], ends[1:], strict=True)
        if not line.endswith("filling the context")
    ]
    assert timed == [0, 0, 0]


@pytest.mark.parametrize("tg", [1, 3])
def test_rows_of_a_sweep_capture_nothing(monkeypatch, captured, tg):
    model, captures = captured
    at = []  # at the beginning and at the end of every span of time
    clock = SimpleNamespace(perf_counter=lambda: (at.append(len(captures)), time.perf_counter())[1])
    monkeypatch.setattr(bench_sweep, "time", clock)
    assert len(list(bench_sweep.sweep(model, 64, SweepOptions(tg=tg)))) == 4
    assert (
        len(at) == 16 and at == [len(captures)] * 16 and {*captures} == {"PassGraphs", "StepGraphs"}
    )
