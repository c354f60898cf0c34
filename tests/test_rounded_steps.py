"""Products of steps in 8 bits on the CPU, type by type and in whole models."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import pytest
import torch
from iqforge.formats.codecs import codec
from iqforge.formats.types import ggml_type
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.model import Model
from iqforge.runtime.simd import dots
from iqforge.runtime.simd.codes import CODES, build, grid
from iqforge.runtime.simd.operations import operation
from iqforge.runtime.simd.products import Rows, Vectors, plain_rows, plain_type
from iqforge.runtime.simd.threads import Program, run
from iqforge.runtime.simd.units import UNITS

from .stored_rows import COLUMNS, of_types, stored

pytestmark = pytest.mark.skipif(not dots.available(), reason="needs AVX2")

GROUP, CHUNK = 16, 256
FLOATS = ("F32", "F16", "BF16")
QUANTIZED = [n for n in codec.decodable_types() if plain_type(ggml_type(n)).name not in FLOATS]


def multiplied(rows: Rows, x: np.ndarray, threads: int = 2) -> np.ndarray:
    rounded = np.zeros(dots.rounded_bytes(rows.n_cols), np.uint8)
    y, first = np.full(len(rows.data), np.nan, np.float32), np.zeros(1, np.int64)
    vectors = [Vectors(array.ctypes.data) for array in (x, rounded, y, first)]
    operations = [
        dots.rounding(vectors[0], 1, rows.n_cols, vectors[1]),
        dots.multiplications(rows, len(rows.data), *vectors),
    ]
    run(Program(operations), threads)
    return y


def in_8_bits(x: np.ndarray) -> np.ndarray:
    """Each 16 as codes of 8 bits with a scale; what follows the last 256 as it is."""
    whole = x[: len(x) // CHUNK * CHUNK].reshape(-1, GROUP)
    largest = np.abs(whole).max(1, keepdims=True)
    codes = np.rint(whole * (np.float32(127) / np.maximum(largest, 1e-30)))
    return np.concatenate(
        [(codes * (largest / np.float32(127)).astype(float)).ravel(), x[whole.size :]]
    )


def test_every_quantized_unit_has_codes():
    assert CODES.keys() == UNITS.keys() - set(FLOATS)


@pytest.mark.parametrize("name", of_types(QUANTIZED))
def test_products_are_those_of_rounded_vectors(name):
    """Also if the rows end where memory does, and with columns beyond the last 256."""
    type = ggml_type(name)
    columns = COLUMNS if type.block_size > 64 else COLUMNS + 64
    data = stored(name, n_cols=columns)
    plain = np.ascontiguousarray(plain_rows(type, data, columns))
    with at_the_end_of_memory(plain) as rows:
        x = np.random.default_rng(3).standard_normal(columns).astype(np.float32)
        x[32:48] = 0
        weights = codec.decode(type, data, columns, as_weights=True).astype(float)
        kept = Rows(plain_type(type), rows.array, columns)
        found = multiplied(kept, x)
        error = np.abs(found - weights @ in_8_bits(x))
        assert (error <= 2e-6 * (np.abs(weights) @ np.abs(x))).all()
        assert np.array_equal(found, multiplied(kept, x, 3))  # whatever the number of threads
        del kept


class at_the_end_of_memory:
    """A copy of an array, after which no memory may be read, where the system can do that."""

    def __init__(self, source: np.ndarray):
        page = mmap.PAGESIZE
        pages = -(-source.nbytes // page)
        self._map = mmap.mmap(-1, (pages + 1) * page)
        whole = np.frombuffer(self._map, np.uint8)
        self._fence = whole.ctypes.data + pages * page
        self.array = whole[pages * page - source.nbytes : pages * page].reshape(source.shape)
        self.array[:] = source

    def __enter__(self) -> at_the_end_of_memory:
        self._allow(0)
        return self

    def __exit__(self, *_: object) -> None:
        self._allow(3)  # to read and to write

    def _allow(self, what: int) -> None:
        if os.name == "posix":
            protect = ctypes.CDLL(None).mprotect
            assert protect(ctypes.c_void_p(self._fence), ctypes.c_size_t(mmap.PAGESIZE), what) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [5, 300])
def test_what_is_not_finite_stays_so(value, column):
    rows = Rows(ggml_type("Q8_0"), stored("Q8_0"), COLUMNS)
    x = np.ones(COLUMNS, np.float32)
    x[column] = value
    assert not np.isfinite(multiplied(rows, x)).any()


@pytest.mark.parametrize(
    "spec",
    [
        "llama-tiny:IQ4_K",
        pytest.param("qwen3moe-tiny:Q8_0", marks=pytest.mark.slow),
        pytest.param("qwen35-tiny:Q8_0", marks=pytest.mark.slow),
    ],
)
def test_steps_in_8_bits_are_close_to_float32(spec):
    tokens, found = [3, 1, 4, 1, 5, 9, 2, 6], {}
    for precision in ("f32", "int8"):
        with Model(SyntheticSource(spec), "cpu", precision=precision) as model:
            state = model.new_state(16)
            logits = [model._step(token, state) for token in tokens]
            found[precision] = torch.stack([x for x in logits if x is not None]).log_softmax(-1)
    exact, rounded = found["f32"], found["int8"]
    assert len(exact) == len(rounded) == len(tokens)
    divergence = (exact.exp() * (exact - rounded)).sum(-1)
    assert 0 < divergence.mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Q4_K", "IQ6_K", "IQ3_XXS"])
def test_processors_without_dot_products_of_bytes(name, monkeypatch):
    """They have pairs of words, shuffles of 16 bytes, and loads one by one."""
    rows = Rows(ggml_type(name), stored(name), COLUMNS)
    x = np.random.default_rng(3).standard_normal(COLUMNS).astype(np.float32)
    expected = multiplied(rows, x)
    features = {"avx2", "fma", "f16c"}
    for module in (build, grid):
        monkeypatch.setattr(module, "has_feature", features.__contains__)

    def of_avx2(template, name="", **names):
        return operation(template, f"{name}_avx2", **names)

    monkeypatch.setattr(dots, "operation", of_avx2)
    assert np.allclose(multiplied(rows, x), expected, rtol=1e-5, atol=1e-4)
