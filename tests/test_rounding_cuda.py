"""Rounding with second moments on a GPU gives the bytes of the CPU."""

from __future__ import annotations

import iqforge
import numpy as np
import pytest
import torch
from iqforge.formats.types import ggml_type
from iqforge.imatrix.moments.store import DeviceSums
from iqforge.quantize.rounding.cuda.rounders import DeviceRounders
from iqforge.quantize.rounding.factor import factored
from iqforge.quantize.rounding.layouts.codes import SCALES
from iqforge.quantize.rounding.layouts.vectors import VECTORS
from iqforge.quantize.rounding.layouts.words import TABLES
from iqforge.quantize.rounding.methods import ON_CPU
from iqforge.quantize.rounding.ternary_rounder import TWINS
from iqforge.quantize.run.cuda_device import CudaDevice
from iqforge.quantize.search.trellis.tree import CODEBOOKS

from .imatrices import N_CTX, tiny_llama_file
from .second_moments import correlated, moments_of, weights
from .tiny_checkpoint import PROSE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def rounders():
    return DeviceRounders([CudaDevice(0)])


@pytest.mark.parametrize("name", [*SCALES, *VECTORS, *TABLES, "IQ4_KSS", *CODEBOOKS, *TWINS])
def test_bytes_are_those_of_the_cpu(rounders, name):
    type, x, given = ggml_type(name), weights(rows=200, n=768), moments_of(correlated(768))
    x[3] = 0
    made = [list(on.rounder(type, 768, given, 0.25, 2, "x").stages(x)) for on in (ON_CPU, rounders)]
    for expected, found in zip(*made, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["Q4_0", "IQ3_K", "IQ4_KS", "IQ2_XS"])
def test_searches_give_the_bytes_of_the_cpu(rounders, name):
    type, x = ggml_type(name), weights(rows=70, n=512)
    importance = np.random.default_rng(0).gamma(1, 1, 512)
    made = [np.empty((70, type.row_bytes(512)), dtype=np.uint8) for _ in range(2)]
    for on, out in zip((ON_CPU, rounders), made, strict=True):
        on.search(type, 512, importance)(x, out)
    np.testing.assert_array_equal(*made)


@pytest.mark.parametrize("n", [96, 1024, 1120])
def test_sums_on_the_gpu_are_factored_as_on_the_cpu(rounders, n):
    sums = (correlated(n) * 777).astype(np.float32)
    h = sums.astype(np.float64) / 777
    there = DeviceSums(torch.from_numpy(sums).cuda(), 777, np.diagonal(h).copy())
    given = moments_of(h, hold=h, there=there)
    with rounders.place() as place:
        made = place.factored(given, 0.1, "x")
        expected = factored(h, 0.1)
        np.testing.assert_array_equal(made.feedback.copy_to_host()[0], expected.feedback)
        np.testing.assert_array_equal(made.moments.copy_to_host()[0], expected.moments)
        np.testing.assert_array_equal(made.weights[0], expected.weights)
    rest = weights(rows=13, n=n).astype(np.float64)
    found = rounders.held_out_error(given, rest)
    assert found == pytest.approx(ON_CPU.held_out_error(given, rest), rel=1e-12)


@pytest.mark.parametrize("type", ["Q4_0", "IQ4_NL"])
def test_files_are_those_of_the_cpu(type, tmp_path):
    path = tiny_llama_file(tmp_path)
    made = iqforge.collect_hessian(path, PROSE * 40, tmp_path / "h.safetensors", n_ctx=N_CTX)
    for device in ("cpu", "cuda"):
        iqforge.quantize_model(
            path, tmp_path / device, type, hessian=made, device=device, pure=True
        )
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "cuda").read_bytes()


def test_calibrating_twice_gives_the_same_bytes(tmp_path):
    path = tiny_llama_file(tmp_path)
    for out, threads in (("a", 1), ("b", 4)):
        iqforge.quantize_model(
            path,
            tmp_path / out,
            "Q4_0",
            calibrate=PROSE * 40,
            calibrate_chunks=10,
            calibrate_ctx=N_CTX,
            device="cuda",
            threads=threads,
            pure=True,
        )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
