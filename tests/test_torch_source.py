"""PyTorch checkpoints: the same GGUF as from safetensors, views of all kinds, and files that are
cut while they are read.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import iqforge
import numpy as np
import pytest
import torch
from iqforge.api import open_source
from iqforge.convert.checkpoint import storage
from iqforge.convert.tensors.rows import StoredRows
from iqforge.convert.torch.header import read_torch_header
from iqforge.errors import (
    TruncatedFileError,
    UnsupportedTypeError,
)
from safetensors.torch import load_file

from .tiny_checkpoint import make_tiny_llama
from .torch_files import as_torch, stored


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("shards", [1, 3])
def test_same_file_as_from_safetensors(tmp_path: Path, dtype: str, shards: int):
    folder = make_tiny_llama(tmp_path / "model", dtype=dtype)
    expected = iqforge.convert_model(folder, tmp_path / "expected.gguf", name="x").read_bytes()
    as_torch(folder, shards)
    assert iqforge.convert_model(folder, tmp_path / "made.gguf", name="x").read_bytes() == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_wider_dtypes_become_f32(tmp_path: Path, dtype: torch.dtype):
    folder = make_tiny_llama(tmp_path / "model", dtype="f32")
    tensors = {
        name: (values.double() * (1e4 if dtype is torch.int32 else 1 + 2**-30)).to(dtype)
        for name, values in load_file(folder / "model.safetensors").items()
    }
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with open_source(folder) as source:
        for name, stored in (
            ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
            ("output_norm.weight", "model.norm.weight"),
        ):
            tensor = next(t for t in source.tensors if t.name == name)
            rows = source.read_rows(tensor, 0, tensor.n_rows)
            assert tensor.type.name == "F32"
            assert np.array_equal(
                rows.view(np.float32).reshape(tensor.shape), tensors[stored].float().numpy()
            )


def test_views_of_all_kinds(tmp_path: Path):
    base = torch.arange(4 * 6 * 5, dtype=torch.float32).reshape(4, 6, 5)
    kept = {
        "plain": base,
        "offset": base[2],
        "transposed": base[1].t(),
        "every second": base[:, ::2],
        "expanded": base[0, 0].expand(3, 5),
        "swapped": base.permute(2, 0, 1),
        "scalar": base[1, 2, 3],
        "empty": base[:0],
        "parameter": torch.nn.Parameter(base[3, 1:4]),
        "bf16 column": base[0].bfloat16()[:, 2:3],
        "same": base,
        "one row": base[:1, :1].transpose(0, 1),
    }
    with stored(tmp_path, kept) as checkpoint:
        assert list(checkpoint.tensors) == list(kept)
        for name, values in kept.items():
            tensor = checkpoint.tensors[name]
            raw = (
                values.detach()
                .contiguous()
                .view(torch.uint8 if values.ndim else torch.int32)
                .numpy()
                .tobytes()
            )
            assert (
                tensor.shape == tuple(values.shape) and checkpoint.data(tensor).tobytes() == raw
            ), name
            if values.numel() and values.ndim:
                rows = StoredRows(checkpoint, tensor)
                assert b"".join(rows.read(n, n + 1).tobytes() for n in range(rows.n_rows)) == raw, (
                    name
                )
            checkpoint.release(tensor)
        assert (
            checkpoint.tensors["plain"].strides is None
            and checkpoint.tensors["one row"].strides is None
        )
        assert checkpoint.tensors["transposed"].strides == (1, 5)


def test_strides_are_read_in_spans_and_in_parts(tmp_path: Path, monkeypatch):
    """Every range of elements of a view is read correctly from spans of a few elements, whatever
    its strides.
    """
    base = torch.arange(4 * 6 * 5, dtype=torch.int16).reshape(4, 6, 5)
    kept = {
        "transposed": base[1].t(),
        "swapped": base.permute(2, 0, 1),
        "expanded": base[0, 0].expand(3, 5),
        "both": base[::2, 1::2].transpose(0, 1),
    }
    monkeypatch.setattr(storage, "_SPAN_BYTES", 16)
    with stored(tmp_path, kept) as checkpoint:
        for name, values in kept.items():
            tensor, expected = checkpoint.tensors[name], values.contiguous().numpy().tobytes()
            for start in range(0, len(expected) + 1, 2):
                for stop in range(start, len(expected) + 1, 2):
                    assert checkpoint.read(tensor, start, stop).tobytes() == expected[start:stop]


@pytest.mark.parametrize("form", ["safetensors", "torch", "torch with strides"])
def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path, form: str):
    folder = make_tiny_llama(tmp_path / "model", n_layers=1)
    if form != "safetensors":
        as_torch(folder, 1)
    if form == "torch with strides":
        tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].t().contiguous().t()
        torch.save(tensors, folder / "pytorch_model.bin")
    with open_source(folder) as source:
        checkpoint = source.checkpoint
        tensor = checkpoint.tensors["model.layers.0.mlp.up_proj.weight"]
        info = next(info for info in source.tensors if info.name == "blk.0.ffn_up.weight")
        source.read_rows(info, 0, 8)
        end = tensor.begin + (tensor.end - tensor.begin) // 2
        os.truncate(tensor.file, end)
        with pytest.raises(TruncatedFileError) as raised:
            source.read_rows(info, 0, info.n_rows)
    error = raised.value
    assert (Path(error.file), error.tensor) == (tensor.file, tensor.name)
    assert "ends here" in error.message and tensor.begin < error.offset <= end


CUT = """
import itertools, os, sys, threading, time
import iqforge
from iqforge.formats import random_access
weights, out = sys.argv[1:]
read, begun, ended = random_access.RandomAccessFile.read, threading.Event(), threading.Event()
reads = itertools.count()

def slow(self, *arguments):
    if next(reads) == 8:
        begun.set()
    time.sleep(0.002)
    if begun.is_set():  # others that have come before may be reading
        ended.wait()
    return read(self, *arguments)

def cut():
    begun.wait()
    os.truncate(weights, os.path.getsize(weights) // 3)
    ended.set()

random_access.RandomAccessFile.read = slow
threading.Thread(target=cut, daemon=True).start()
iqforge.convert_model(os.path.dirname(weights), out)
"""


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_conversion_whose_source_is_cut_ends_in_an_error(tmp_path: Path, form: str):
    """A thread truncates the file while others read it. The result is a named error, no signal and
    no output; the restored file is converted.
    """
    folder = make_tiny_llama(tmp_path / "model", n_layers=8)
    if form == "torch":
        as_torch(folder, 1)
    weights = next(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin"))
    content, out = weights.read_bytes(), tmp_path / "out" / "made.gguf"
    out.parent.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", CUT, str(weights), str(out)], text=True, capture_output=True
    )
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "TruncatedFileError" in done.stderr and weights.name in done.stderr
    assert "tensor 'model." in done.stderr and "ends here" in done.stderr
    assert not out.exists()
    weights.write_bytes(content)
    iqforge.convert_model(folder, out)
    assert out.exists()


def test_float8_and_small_integers_are_named(tmp_path: Path):
    with stored(
        tmp_path,
        {"a": torch.zeros(2, 16, dtype=torch.float8_e4m3fn), "b": torch.zeros(3, dtype=torch.int8)},
    ) as checkpoint:
        assert [tensor.dtype for tensor in checkpoint.tensors.values()] == ["F8_E4M3", "I8"]
        with pytest.raises(UnsupportedTypeError, match="tensor 'b'.*I8"):
            checkpoint.type_of(checkpoint.tensors["b"])


def test_only_the_header_is_read(tmp_path: Path):
    torch.save({"a": torch.zeros(64 << 20, dtype=torch.uint8)}, tmp_path / "a.bin")
    tracemalloc.start()
    assert read_torch_header(tmp_path / "a.bin")["a"].n_bytes == 64 << 20
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
