"""Trellis types: the tree over the code words, the search for the best of them, and both on a CUDA
device.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import iqforge
import numpy as np
import pytest
from iqforge.formats.types import ggml_type
from iqforge.quantize.encode import encode
from iqforge.quantize.search.trellis import SETTINGS, nearest
from iqforge.quantize.search.trellis.rows import word_search
from iqforge.quantize.search.trellis.tree import CODEBOOKS, FAN, LEAF, code_words, search_tree

from .encode_cases import edge_rows, importances
from .from_python import from_python
from .shared import SHARED

TYPES = list(SETTINGS)


def relative_error(x, y, w=1.0):
    return float(np.sqrt((w * (x - y) ** 2.0).sum() / (w * x**2.0).sum()))


def test_words_equal_the_decoders():
    indices = np.random.default_rng(1).integers(0, 1 << 16, 32).astype("<u2")
    row = np.zeros(4 + 68, dtype=np.uint8)
    row[:4] = np.array([1], dtype="<f4").view(np.uint8)
    row[4:8] = 0x88  # the multiple 1 for every block
    row[8:] = indices.view(np.uint8)
    words = code_words(CODEBOOKS["IQ2_KT"])[0][indices]
    assert np.array_equal(
        iqforge.decode("IQ2_KT", row[None], 256)[0], words.ravel().astype(np.float32)
    )


@pytest.mark.parametrize("leaf", [32, LEAF])
@pytest.mark.parametrize("name", TYPES)
def test_tree_holds_every_word_once_and_in_its_boxes(name, leaf):
    book, all_words = CODEBOOKS[name], code_words(CODEBOOKS[name])
    words, indices, leaf_boxes, node_boxes = search_tree(name, leaf)
    assert (
        words.flags.c_contiguous and leaf_boxes.flags.c_contiguous and node_boxes.flags.c_contiguous
    )
    for b in range(len(all_words)):
        assert np.array_equal(np.sort(indices[b].ravel()), np.arange(book.size))
        points = words[b].reshape(-1, book.dim, leaf).transpose(0, 2, 1)
        assert np.array_equal(points, all_words[b][indices[b]])
        low, high = (
            leaf_boxes[b]
            .reshape(-1, 2, book.dim, FAN)
            .transpose(1, 0, 3, 2)
            .reshape(2, -1, 1, book.dim)
        )
        assert (points >= low).all() and (points <= high).all()
        low, high = node_boxes[b].reshape(2, book.dim, -1).transpose(0, 2, 1)[:, :, None]
        points = points.reshape(book.nodes(leaf), -1, book.dim)
        assert (points >= low).all() and (points <= high).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["IQ2_KT", "IQ4_KT"])
def test_nearest_word_is_the_best_of_all(name):
    book, tree, search = CODEBOOKS[name], search_tree(name), from_python(word_search(name, 1.0))
    generator = np.random.default_rng(2)
    given, work = (
        np.empty(nearest.GIVEN, np.float32),
        np.empty(nearest.WORK, np.float32),
    )
    hits_by_eight = np.empty(LEAF // 8, np.int64)
    for trial in range(40):
        x = (generator.standard_normal(book.dim) * (trial > 0)).astype(np.float32)
        w = generator.lognormal(0, 2, book.dim).astype(np.float32)
        b, scale = trial % len(book.starts), np.float32((-1) ** trial * 0.025)
        words = code_words(book)[b].astype(np.float64)
        errors = (w * (x - float(scale) * words) ** 2).sum(axis=1)
        for begin in (-1, trial):
            for budget, wanted in (
                (np.float32(np.inf), True),
                (np.float32(errors.min() * 0.5), False),
            ):
                index = np.array([begin], dtype=np.int32)
                found = search(
                    x,
                    w,
                    0,
                    scale,
                    budget,
                    b,
                    book.starts[b],
                    *tree,
                    given,
                    work,
                    hits_by_eight.view(np.uint8),
                    hits_by_eight,
                    index,
                )
                if wanted:
                    assert errors[index[0]] <= errors.min() + 1e-5 * (w * x * x).sum() + 1e-9
                    assert found == pytest.approx(
                        errors[index[0]], abs=1e-5 * (w * x * x).sum() + 1e-5 * errors[index[0]]
                    )
                else:
                    assert found >= budget


def test_values_are_fitted_as_products_use_them():
    """The product factors of IQ2_KT and IQ3_KT are part of the fit: it is best for the weights, not
    for the row decoder's values.
    """
    x = np.random.default_rng(3).standard_normal((4, 1024)).astype(np.float32)
    for name, factor in (("IQ2_KT", 1.05), ("IQ3_KT", 1.01)):
        rows = encode(name, x)
        weights, plain = (
            iqforge.decode(name, rows, 1024, as_weights=True),
            iqforge.decode(name, rows, 1024),
        )
        assert np.array_equal(weights, plain * np.float32(factor))
        gain = SETTINGS[name].gain
        assert (x * weights).sum() / (weights**2.0).sum() == pytest.approx(1 / gain, abs=0.01)


def test_constants_of_the_kernels():
    from iqforge.quantize.cuda import trellis as trellis_cuda

    for name in TYPES:
        book = CODEBOOKS[name]
        constants, words, indices, _, node_boxes = trellis_cuda.tables(name)
        given = dict(trellis_cuda.defines(ggml_type(name)))
        assert len(constants) == sum(int(given[key]) for key in ("TARGETS", "POSITIVE", "NEGATIVE"))
        assert int(given["NODES"]) % 32 == 0 and node_boxes.shape == (
            len(book.starts),
            2,
            book.dim,
            int(given["NODES"]),
        )
        values = (words.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(values, np.stack([w[i] for w, i in zip(code_words(book), indices)]))


@pytest.mark.slow
@pytest.mark.skipif(
    not (importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core")),
    reason="cuda-core is not installed",
)
@pytest.mark.parametrize("name", TYPES)
def test_kernels_compile(name):
    """They use the cache on disk, and round every operation."""
    from iqforge.cuda_kernels.compile.nvrtc import cache_file, compile_spec
    from iqforge.quantize.cuda.trellis import spec

    kernels = spec(ggml_type(name))
    assert not kernels.fma and cache_file(kernels, "sm_90") != cache_file(
        replace(kernels, fma=True), "sm_90"
    )
    code = compile_spec(kernels, "sm_90")
    assert cache_file(kernels, "sm_90").read_bytes() == code.code and len(code.code) > 10000


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_device_is_no_worse_and_repeats_itself(gpu, name):
    path = SHARED / "golden/sources.npz"
    sources = (
        np.load(path)
        if path.exists()
        else {"gauss": np.random.default_rng(4).standard_normal((8, 1024)).astype(np.float32)}
    )
    logs = []
    for key in ("gauss", "student", "real"):
        for importance in (None, sources["im"]) if key in sources and "im" in sources else (None,):
            if key not in sources:
                continue
            x, w = sources[key], 1.0 if importance is None else importance.astype(np.float64)
            rows = encode(name, x, importance, device="cuda")
            assert np.array_equal(rows, encode(name, x, importance, device="cuda"))
            errors = [
                relative_error(x, iqforge.decode(name, r, 1024, as_weights=True), w)
                for r in (rows, encode(name, x, importance))
            ]
            assert errors[0] <= errors[1] * 1.002
            logs.append(np.log(errors[0] / errors[1]))
    assert np.mean(logs) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_device_on_edge_rows(gpu, name, monkeypatch):
    from iqforge.quantize.cuda import encoder as cuda

    x = edge_rows()
    for what, importance in importances().items():
        rows = encode(name, x, importance, device="cuda")
        y = iqforge.decode(name, rows, 1024)
        with np.errstate(all="ignore"):
            expected = iqforge.decode(name, encode(name, x, importance, threads=2), 1024)
        assert np.isfinite(y).all() and not y[:2].any(), what
        if importance is None:
            for row in (2, 3, 12 + 7, 29, 30, 31, 32, 33, 34, 35):
                errors = [relative_error(x[row].astype(np.float64), v[row]) for v in (y, expected)]
                assert errors[0] <= errors[1] * 1.02 + 1e-6, row
    whole = encode(name, x, device="cuda")
    monkeypatch.setattr(cuda, "PIECE_ELEMENTS", 3 * 1024)
    assert np.array_equal(whole, encode(name, x, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_device_finds_the_best_word_of_all(gpu, name):
    """Every group of 8192 elements is compared with every code word, in double precision, at the
    scale that was chosen for its block.
    """
    from iqforge.quantize.cuda.trellis import TrellisEncoder
    from iqforge.quantize.encode import prepare_weights

    generator, book = np.random.default_rng(6), CODEBOOKS[name]
    x = generator.standard_normal((8, 1024)).astype(np.float32)
    w = prepare_weights(generator.lognormal(size=1024), 1024)
    encoder = TrellisEncoder(ggml_type(name), 1024, w)
    arrays = encoder.arrays(8)
    arrays[0].copy_to_device(x)
    encoder.launch(arrays)
    (top, d), chosen = arrays[3].copy_to_host().T, arrays[5].copy_to_host()
    x = (abs(x) if book.magnitudes else x).astype(np.float64) / top[:, None]
    groups, words = 32 // book.dim, code_words(book).astype(np.float64)
    for row in range(8):
        for b in range(32):
            scale = float(d[row]) * chosen[row, b, groups]
            for g in range(groups):
                at = slice(32 * b + book.dim * g, 32 * b + book.dim * (g + 1))
                v, weights = words[chosen[row, b, groups + 1]], w[at].astype(np.float64)
                score = (v * v) @ weights - v @ (2 / scale * weights * x[row, at])
                energy = (weights * (x[row, at] / scale) ** 2).sum()
                assert score[chosen[row, b, g]] <= score.min() + 1e-5 * energy
