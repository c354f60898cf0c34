"""Quantizing on a CUDA device gives the bytes of the CPU."""

from __future__ import annotations

import importlib.util
import types

import numpy as np
import pytest
from iqforge.errors import UsageError
from iqforge.formats.types import ggml_type
from iqforge.quantize.encode import encode
from iqforge.quantize.searches import search_tables, searches

from .encode_cases import (
    N_COLS,
    TYPES,
    edge_rows,
    importances,
    reason_to_skip,
)
from .shared import SHARED


def assert_same(name: str, x: np.ndarray, importance: np.ndarray | None, what: str) -> None:
    with np.errstate(all="ignore"):
        expected = encode(name, x, importance, threads=2)
    actual = encode(name, x, importance, device="cuda")
    differing = np.nonzero((expected != actual).any(axis=1))[0]
    assert not len(differing), (
        f"{name}, {what}: {int((expected != actual).sum())} bytes differ, rows"
        f" {differing[:8].tolist()}"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_same_bytes_as_cpu(gpu, name):
    edge = edge_rows()
    rng = np.random.default_rng(13)
    bulk = (rng.standard_normal((256, N_COLS)) * rng.uniform(0.001, 10, (256, 1))).astype(
        np.float32
    )
    for what, importance in importances().items():
        assert_same(name, edge, importance, f"edge rows, importance {what}")
        assert_same(name, bulk, importance, f"Gaussian rows, importance {what}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_same_bytes_on_golden_sources(gpu, name):
    path = SHARED / "golden/sources.npz"
    if not path.exists():
        pytest.skip("reference data not found: golden/sources.npz (set IQFORGE_SHARED)")
    sources = np.load(path)
    for key in ("gauss", "student", "real", "edge"):
        for importance in (None, sources["im"], sources["imz"]):
            assert_same(name, sources[key], importance, key)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [t for t in TYPES if t in searches()["steps"]])
def test_launches_that_no_cuda_block_divides(gpu, name):
    """Threads after the last block or row must not change anything."""
    x = edge_rows()[33:40]
    for columns in (256, 768):
        expected = encode(name, np.ascontiguousarray(x[:, :columns]))
        for rows in 40 * [1, 3, 7]:
            assert np.array_equal(
                encode(name, np.ascontiguousarray(x[:rows, :columns]), device="cuda"),
                expected[:rows],
            )


@pytest.mark.gpu
def test_interleaved_type(gpu):
    assert_same("IQ4_K_R4", edge_rows(), None, "edge rows")


@pytest.mark.gpu
def test_pieces_do_not_change_bytes(gpu, monkeypatch):
    from iqforge.quantize.cuda import encoder as cuda

    x = edge_rows()
    whole = {name: encode(name, x, device="cuda") for name in ("Q4_0", "IQ4_KS")}
    monkeypatch.setattr(cuda, "PIECE_ELEMENTS", 3 * N_COLS)
    for name, expected in whole.items():
        assert np.array_equal(encode(name, x, device="cuda:0"), expected)


@pytest.mark.gpu
def test_missing_device(gpu):
    with pytest.raises(UsageError, match="no device 'cuda:999'"):
        encode("Q4_0", np.zeros((1, 32), np.float32), device="cuda:999")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA:0"])
def test_unknown_devices(device):
    with pytest.raises(UsageError, match="unknown device"):
        encode("Q4_0", np.zeros((1, 32), np.float32), device=device)


@pytest.mark.skipif(not reason_to_skip(), reason="a CUDA device is here")
def test_missing_device_is_reported():
    with pytest.raises(UsageError, match="numba-cuda|CUDA device"):
        encode("Q4_0", np.zeros((1, 32), np.float32), device="cuda")


@pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed"
)
@pytest.mark.parametrize(
    "kind",
    [
        *("plain", "single", "block"),
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("row", "steps")),
    ],
)
def test_compiled_code_rounds_like_the_cpu(kind, monkeypatch):
    """NVVM's code of each kind of search has no fused or approximate operation. No device is
    needed.
    """
    import numba.cuda.dispatcher
    from iqforge.cuda_kernels.compile import numba_cuda as kernel_cuda
    from iqforge.quantize.cuda import search_kernels
    from numba import cuda

    device = types.SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: device)
    seen = []

    def compile_only(source, name, file, signature, registers=None, **names):
        namespace = {"cuda": cuda, "float32": np.float32} | names
        exec(source, namespace)
        for exact in (True, False):
            kernel_cuda._compiling.exact = exact
            ptx, _ = cuda.compile(
                namespace[name], signature, device=False, output="ptx", abi="numba", cc=(9, 0)
            )
            seen.append(kernel_cuda.inexact_instructions(ptx))
        kernel_cuda._compiling.exact = False

    monkeypatch.setattr(search_kernels, "compile_kernel", compile_only)
    kernel_cuda._prepare()
    name, search = next(iter(searches()[kind].items()))
    tables = () if kind == "plain" else tuple((t.dtype.str, t.ndim) for t in search_tables(name))
    search_kernels.search_kernel.__wrapped__(ggml_type(name), kind, search, 0, tables)
    assert seen[0] == []
    assert kind == "plain" or any("fma" in found for found in seen[1]), (
        "the check would not notice joined operations"
    )
