"""Quantization runs that are interrupted, and the files that they leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.formats.codecs.codec import encode_float
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import string
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.quantize.run import cpu_worker
from iqforge.quantize.run.report import RunProgress

N_TENSORS = 12


def write_model(
    path: Path, n_tensors: int = N_TENSORS, rows: int = 64, seed: int = 1, **changed
) -> Path:
    """Write a model. changed: values for the first column of a tensor's first row, by position."""
    generator = np.random.default_rng(seed)
    tensors = [
        TensorInfo(f"blk.{i}.ffn_up.weight", (rows, 256), ggml_type("F32"))
        for i in range(n_tensors)
    ]
    with GGUFWriter(path, {"general.architecture": string("llama")}, tensors) as sink:
        for number, tensor in enumerate(tensors):
            x = generator.standard_normal((rows, 256)).astype(np.float32)
            if f"t{number}" in changed:
                x[0, 0] = changed[f"t{number}"]
            sink.write(tensor, encode_float("F32", x))
    return path


class BreakAfter(RunProgress):
    """End the run, as Ctrl-C does, when this many tensors are done."""

    def __init__(self, n: int):
        self.left, self.resumed, self.done = n, 0, 0
        self.said: list[str] = []  # of how tensors were rounded

    def layers_rounded(self, choices):
        self.said = [choice.line() for choice in choices]

    def resume(self, finished):
        self.resumed = len(finished)

    def tensor_done(self, index, report):
        self.done, self.left = self.done + 1, self.left - 1
        if self.left == 0:
            raise KeyboardInterrupt


def break_off(model: Path, out: Path, after: int, type: str = "Q4_0", **options) -> None:
    with pytest.raises(KeyboardInterrupt):
        iqforge.quantize_model(model, out, type, pure=True, progress=BreakAfter(after), **options)


@contextmanager
def fails_after(monkeypatch, n: int) -> Iterator[None]:
    """Expect a run on the CPU within the context, which fails with its n-th piece of rows."""
    work, calls = cpu_worker.work, []

    def stop(source, piece, *rest):
        calls.append(piece)
        if len(calls) == n:
            raise RuntimeError("stop")
        return work(source, piece, *rest)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="stop"):
        patched.setattr("iqforge.quantize.run.stream.work", stop)
        yield


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


LEFT = ["model.gguf", "q.gguf.journal", "q.gguf.part"]


def imatrix(seed: int) -> Imatrix:
    sums = np.random.default_rng(seed).lognormal(size=(1, 256))
    return Imatrix(
        {f"blk.{i}.ffn_up.weight": Entry(sums, np.full(1, 10)) for i in range(N_TENSORS)},
        path="some.dat",
    )
