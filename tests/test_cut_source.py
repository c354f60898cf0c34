"""A source file that is truncated while a run reads it ends in a named error, and the run can be
resumed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import iqforge
import numpy as np
import pytest
import torch
from iqforge import load_model
from iqforge.errors import TruncatedFileError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.runtime.weights import store

from .tiny_checkpoint import make_tiny_llama

CUT = """
import os, sys, threading, time
import iqforge
from iqforge.formats import random_access
source, out = sys.argv[1:]
read, n_reads = random_access.RandomAccessFile.read, 0

def cut_after_some(self, start, n_bytes, tensor=None):
    global n_reads
    n_reads += self.path == source and os.path.exists(out + ".part")
    if n_reads == 8:
        os.truncate(source, os.path.getsize(source) // 2)
    time.sleep(0.005)
    return read(self, start, n_bytes, tensor)

random_access.RandomAccessFile.read = cut_after_some
try:
    iqforge.quantize_model(source, out, "Q8_0", pure=True, threads=1)
except iqforge.errors.TruncatedFileError as error:
    print(error)
    sys.exit(3)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(
        iqforge.convert_model(make_tiny_llama(tmp_path / "c", n_layers=2), tmp_path / "m.gguf")
    )


def test_quantizing_names_missing_bytes_and_resumes(tmp_path: Path, model: Path):
    expected, out = tmp_path / "expected.gguf", tmp_path / "out.gguf"
    iqforge.quantize_model(model, expected, "Q8_0", pure=True)
    content, state = model.read_bytes(), model.stat()
    done = subprocess.run(
        [sys.executable, "-c", CUT, str(model), str(out)], text=True, capture_output=True
    )
    assert done.returncode == 3, (done.returncode, done.stderr)
    assert str(model) in done.stdout and "tensor 'blk." in done.stdout
    assert "at byte" in done.stdout and "ends here" in done.stdout
    assert not out.exists() and (tmp_path / "out.gguf.part").exists()
    model.write_bytes(content)
    os.utime(model, ns=(state.st_atime_ns, state.st_mtime_ns))  # as cp -p and rsync -t restore it
    kept = (tmp_path / "out.gguf.part").stat().st_ino
    iqforge.quantize_model(model, out, "Q8_0", pure=True)
    assert out.read_bytes() == expected.read_bytes() and out.stat().st_ino == kept


def test_a_running_model_names_the_weight_that_is_missing(model: Path, monkeypatch):
    """A runtime without memory for all weights reads them when it needs them."""
    monkeypatch.setattr(store, "available_memory", lambda: 0)
    ids = torch.tensor([1, 2, 3])
    with load_model(model, cache_bytes=0) as running:
        running.forward(ids)
        os.truncate(model, model.stat().st_size // 2)
        with pytest.raises(TruncatedFileError, match="tensor 'blk.*ends here"):
            running.forward(ids)


def test_rows_that_were_read_stay_when_the_file_is_cut(model: Path):
    with open_gguf(model) as source:
        tensor = source.tensors[-1]
        rows = source.read_rows(tensor, 0, tensor.n_rows)
        before = np.array(rows)
        os.truncate(model, 100)
        assert np.array_equal(rows, before)
