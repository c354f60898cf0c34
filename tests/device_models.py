"""Models that are quantized on devices."""

from __future__ import annotations

from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.formats.codecs.codec import encode_float
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import string
from iqforge.imatrix.data import Entry, Imatrix


def info(name, shape, kind="BF16"):
    return TensorInfo(name, shape, ggml_type(kind))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Write a model with sources of four types, experts, norms, and a row whose length is not a
    multiple of 256.
    """
    tensors = [
        info("token_embd.weight", (24, 256)),
        info("blk.0.attn_norm.weight", (256,), "F32"),
        info("blk.0.attn_q.weight", (40, 256), "F16"),
        info("blk.0.ffn_up_exps.weight", (5, 8, 256)),
        info("blk.0.ffn_down.weight", (16, 512), "F32"),
        info("blk.0.odd.weight", (8, 96)),
        info("blk.0.old.weight", (16, 256), "Q8_0"),
    ]
    path, generator = tmp_path_factory.mktemp("model") / "model.gguf", np.random.default_rng(3)
    with GGUFWriter(path, {"general.architecture": string("llama")}, tensors) as sink:
        for tensor in tensors:
            x = generator.standard_normal((tensor.n_rows, tensor.n_cols)).astype(np.float32)
            sink.write(tensor, iqforge.encode(tensor.type, x))
    return path


def imatrix(model: Path) -> Imatrix:
    generator, entries = np.random.default_rng(4), {}
    with open_gguf(model) as source:
        for t in source.tensors:
            if t.name.startswith("blk.") and len(t.shape) > 1 and "attn_q" not in t.name:
                entries[t.name] = Entry(
                    generator.lognormal(size=(t.n_matrices, t.n_cols)) * 100,
                    np.full(t.n_matrices, 100),
                )
    return Imatrix(entries, path="some.dat")


def write_holes(folder: Path, kind: str, value: float) -> Path:
    """Write a model of one stacked tensor with three numbers that are not finite, the first in row
    5, column 9 of the last matrix.
    """
    tensor, x = (
        info("blk.0.ffn_up_exps.weight", (3, 16, 256), kind),
        np.ones((48, 256), dtype=np.float32),
    )
    x[37, 9] = x[37, 11] = x[45, 3] = value
    with GGUFWriter(
        folder / "bad.gguf", {"general.architecture": string("llama")}, [tensor]
    ) as sink:
        sink.write(tensor, encode_float(kind, x))
    return folder / "bad.gguf"
