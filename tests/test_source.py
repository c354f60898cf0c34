"""Every source implements the whole `Source` contract."""

from __future__ import annotations

import ast
from pathlib import Path

import iqforge
import numpy as np
from iqforge.formats.source import Source, TensorInfo, WrappedSource
from iqforge.formats.types import ggml_type
from iqforge.quantize.run.sample import RowSample, SampledSource
from iqforge.runtime.bench.synthetic import SyntheticSource

ROOT = Path(iqforge.__file__).parent
CONTRACT = {"parallel_reads", "read_bytes", "origin", "locate", "stored", "period", "inner"}


class Counted(Source):
    """Sixteen rows of Q4_0_R8 with ascending bytes."""

    path, files, metadata = "counted", (), {}
    tensors = (TensorInfo("x", (16, 64), ggml_type("Q4_0_R8")),)

    def read_rows(self, tensor, start, stop):
        assert start % 8 == stop % 8 == 0
        row = tensor.row_bytes
        return (np.arange(start * row, stop * row) % 251).astype(np.uint8).reshape(-1, row)


class Renamed(WrappedSource):
    def __init__(self, inner):
        super().__init__(inner)
        self.tensors = tuple(TensorInfo("y", t.shape, t.type) for t in inner.tensors)

    def stored(self, tensor):
        return self.inner.tensors[self.tensors.index(tensor)]


def test_bytes_are_read_through_whole_row_groups():
    source = Counted()
    (tensor,) = source.tensors
    expected = (np.arange(tensor.n_bytes) % 251).astype(np.uint8)
    for start, stop in ((0, tensor.n_bytes), (7, 9), (287, 289), (100, 500), (5, 5)):
        assert np.array_equal(source.read_bytes(tensor, start, stop), expected[start:stop])


def test_wrapped_sources_know_where_their_tensors_are_stored():
    source = Counted()
    wrapped = Renamed(Renamed(source))
    (tensor,) = wrapped.tensors
    assert source.origin is source and source.parallel_reads == 0
    assert wrapped.origin is source and wrapped.locate(tensor) is source.tensors[0]
    assert np.array_equal(wrapped.read_bytes(tensor, 7, 99), source.read_bytes(tensor, 7, 99))
    assert wrapped.period(tensor) == source.period(source.tensors[0]) == 16


def test_readers_and_periods_pass_through():
    source = SyntheticSource("llama-8b:Q8_0")
    tensor = next(t for t in source.tensors if t.name == "output.weight")
    sample = SampledSource(source, [RowSample(tensor, 8, 72)])
    source.parallel_reads = 5
    assert Renamed(source).parallel_reads == 5
    assert source.period(tensor) < tensor.n_rows and sample.period(sample.tensors[0]) == 64
    assert np.array_equal(
        sample.read_bytes(sample.tensors[0], 3, 9), source.read_rows(tensor, 8, 9)[0, 3:9]
    )


def test_nothing_probes_for_parts_of_the_contract():
    folders = [f for f in ROOT.iterdir() if f.is_dir() and f.name[0] not in "._"]
    for file in (file for folder in folders for file in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
                and isinstance(name := node.args[1], ast.Constant)
            ):
                assert name.value not in CONTRACT, f"{file}:{node.lineno} probes for {name.value}"
