"""The two layouts of importance matrices: their limits, and values that stay in their file."""

from __future__ import annotations

import copy
import dataclasses
import os

import iqforge
import numpy as np
import pytest
from iqforge.errors import ImatrixError, TruncatedFileError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.imatrix.experts import with_experts
from iqforge.imatrix.files.load import load_imatrix, save_imatrix

from .imatrices import N_CTX, ROUTER, UP, tokens, write_dat


def test_incomplete_experts(tmp_path, caplog):
    """The reference drops a tensor of which 2 of 32 experts saw nothing; here it stays, with ones,
    in both layouts.
    """
    counts = np.full(32, 6)
    counts[[3, 9]] = 0
    imatrix = tokens(np.where(counts[:, None] > 0, 12.0, 0.0) * np.ones(4), counts)
    imatrix.entries[ROUTER] = Entry(np.full((1, 4), 96.0), np.array([192]))
    save_imatrix(imatrix, tmp_path / "x.dat")
    assert "2 of 32 experts saw no input" in caplog.text
    read = load_imatrix(tmp_path / "x.dat")
    assert (read.importance(UP, (32, 2, 4)) == np.where(counts[:, None] > 0, 2, 1)).all()
    assert (with_experts(read).entries[UP].counts > 0).tolist() == (counts > 0).tolist()
    iqforge.convert_imatrix(tmp_path / "x.dat", tmp_path / "x.gguf", chunk_size=N_CTX)
    assert (load_imatrix(tmp_path / "x.gguf").entries[UP].counts > 0).tolist() == (
        counts > 0
    ).tolist()


def test_matrices_that_see_every_row_share_a_count(tmp_path):
    """This is how llama.cpp stores the heads of latent attention."""
    imatrix = tokens([[1, 2], [3, 4]], [5, 5], name="blk.0.attn_k_b.weight")
    save_imatrix(imatrix, tmp_path / "x.gguf")
    entry = load_imatrix(tmp_path / "x.gguf").entries["blk.0.attn_k_b.weight"]
    assert entry.sums.tolist() == [[1, 2, 3, 4]] and entry.counts.tolist() == [5]


def test_values_are_read_from_the_file_that_was_opened(tmp_path):
    path = write_dat(tmp_path / "x.dat", {UP: (1, [1, 2, 3, 4]), ROUTER: (1, [5, 6])}, 1)
    loaded = load_imatrix(path)
    write_dat(tmp_path / "y.dat", {UP: (1, [9, 9, 9, 9])}, 1)
    os.replace(tmp_path / "y.dat", path)
    assert loaded.entries[UP].sums.tolist() == [[1, 2, 3, 4]]
    assert loaded.entry(UP, (2, 5, 2)).sums.tolist() == [[1, 2], [3, 4]] and loaded.importance(
        UP, (2, 5, 2)
    ).tolist() == [[1, 2], [3, 4]]
    loaded = load_imatrix(path)
    assert copy.deepcopy(loaded).entries[UP].sums.tolist() == [[9, 9, 9, 9]]
    os.truncate(path, 30)
    with pytest.raises(TruncatedFileError, match="x.dat"):
        loaded.entries[UP].sums


@pytest.mark.parametrize("suffix", ["dat", "gguf"])
def test_tensors_of_latent_attention(tmp_path, suffix):
    """attn_k_b and attn_v_b of mainline's files have a matrix per head, which all see every row;
    ik_llama.cpp's have attn_kv_b.
    """
    rng, heads, nope, rank, rows = np.random.default_rng(0), 3, 4, 8, 20
    k_b, v_b, kv_b = rng.random((heads, nope)), rng.random((heads, rank)), rng.random((1, rank))
    entries = {
        "blk.0.attn_k_b.weight": Entry(k_b, np.full(heads, rows)),
        "blk.0.attn_v_b.weight": Entry(v_b, np.full(heads, rows)),
        "blk.1.attn_kv_b.weight": Entry(kv_b, np.array([rows])),
    }
    path = tmp_path / f"x.{suffix}"
    save_imatrix(Imatrix(entries, 2, rows // 2, ("a",)), path)
    if suffix == "gguf":  # one count for what is not experts', and a flat row of values
        with open_gguf(path) as file:
            assert {t.name: t.shape for t in file.tensors if ".0." in t.name} == {
                "blk.0.attn_k_b.weight.in_sum2": (heads * nope,),
                "blk.0.attn_k_b.weight.counts": (1,),
                "blk.0.attn_v_b.weight.in_sum2": (heads * rank,),
                "blk.0.attn_v_b.weight.counts": (1,),
            }
    imatrix = load_imatrix(path)
    found = {
        name: imatrix.importance(name, shape)
        for name, shape in (
            ("blk.0.attn_k_b.weight", (heads, 16, nope)),
            ("blk.0.attn_v_b.weight", (heads, 16, rank)),
            ("blk.0.attn_kv_b.weight", (heads * 20, rank)),
            ("blk.1.attn_kv_b.weight", (heads * 20, rank)),
            ("blk.1.attn_v_b.weight", (heads, 16, rank)),
        )
    }
    np.testing.assert_allclose(found["blk.0.attn_k_b.weight"], k_b / rows, rtol=1e-6)
    np.testing.assert_allclose(found["blk.0.attn_v_b.weight"], v_b / rows, rtol=1e-6)
    np.testing.assert_allclose(
        found["blk.0.attn_kv_b.weight"], v_b.mean(0, keepdims=True) / rows, rtol=1e-6
    )
    np.testing.assert_allclose(found["blk.1.attn_kv_b.weight"], kv_b / rows, rtol=1e-6)
    np.testing.assert_allclose(
        found["blk.1.attn_v_b.weight"], np.repeat(kv_b / rows, heads, 0), rtol=1e-6
    )
    of_all = imatrix.importance("blk.0.attn_v_b.weight", (heads * 16, rank))
    np.testing.assert_allclose(of_all, v_b.mean(0, keepdims=True) / rows, rtol=1e-6)
    # Its input is queries, which no other tensor sees.
    assert imatrix.importance("blk.1.attn_k_b.weight", (heads, 16, nope)) is None
    with pytest.raises(ImatrixError, match="values"):
        imatrix.importance("blk.0.attn_v_b.weight", (heads, 16, rank + 1))


def test_names_of_views(tmp_path):
    """ik_llama.cpp collects attn_k_b under the name of its view of the matrix."""
    name, heads, nope = "blk.0.attn_k_b.weight", 3, 4
    values = np.random.default_rng(0).random((heads, nope))
    entries = {f"{name} (reshaped)": Entry(values, np.array([1]))}
    save_imatrix(Imatrix(entries, 1, 1), tmp_path / "x.dat")
    imatrix = load_imatrix(tmp_path / "x.dat")
    assert list(imatrix.entries) == [name]
    np.testing.assert_allclose(imatrix.importance(name, (heads, 16, nope)), values, rtol=1e-6)
    folded = imatrix.importance(name, (heads * 16, nope))
    np.testing.assert_allclose(folded[0], values.mean(0), rtol=1e-6)


@pytest.mark.parametrize("suffix", ["dat", "gguf"])
def test_numbers_that_no_file_holds(tmp_path, suffix):
    out = tmp_path / f"x.{suffix}"
    with pytest.raises(
        ImatrixError, match=f"tensor '{UP}': a value is .*, which 32 bits do not hold"
    ):
        save_imatrix(tokens([[1, 1e42]], [N_CTX]), out)
    with pytest.raises(ImatrixError, match="number of chunks would be 4294967296"):
        save_imatrix(dataclasses.replace(tokens([[1, 1]], [N_CTX]), chunk_count=2**32), out)
    if suffix == "dat":
        with pytest.raises(ImatrixError, match="number of calls of .* would be 8796093022208"):
            save_imatrix(tokens([[1, 1]], [2**48]), out)
    assert not list(tmp_path.iterdir())
