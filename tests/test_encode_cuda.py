"""Quantizing on a CUDA device gives the bytes of the CPU."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import types
from concurrent.futures import ProcessPoolExecutor, wait

import numpy as np
import pytest
from iqforge.errors import UsageError
from iqforge.formats.types import ggml_type
from iqforge.quantize.encode import _searches, encodable_types, encode

from .shared import SHARED

# Trellis types have another algorithm on a device: tests/test_trellis.py.
TYPES = [
    name
    for name in encodable_types()
    if not ggml_type(name).is_float
    and not ggml_type(name).is_interleaved
    and not name.endswith("_KT")
]
N_COLS = 1024


def _reason_to_skip() -> str | None:
    from iqforge.cuda_kernels.compile.numba_cuda import cuda_module

    try:
        cuda_module()
    except UsageError as error:
        return str(error)
    return None


def compile_both(name: str, devices: tuple[str, ...] = ("cpu", "cuda")) -> None:
    """Searches of a type, with importances and without, into numba's caches on disk."""
    x = np.ones((1, N_COLS), np.float32)
    for device in devices:
        for importance in (None, x[0]):
            encode(name, x, importance, device=device)


def compile_side_by_side(names: list[str], **options) -> None:
    """numba compiles one function at a time, a type for 5 to 20 seconds: a process per core for it.
    An error comes again in the test.
    """
    with ProcessPoolExecutor(
        min(len(names), os.cpu_count()), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        wait([pool.submit(compile_both, name, **options) for name in names])


@pytest.fixture(scope="session")
def gpu(request):
    if reason := _reason_to_skip():
        pytest.skip(reason)
    asked = {
        value
        for item in request.session.items
        if "gpu" in item.fixturenames and hasattr(item, "callspec")
        for value in item.callspec.params.values()
        if value in TYPES
    }
    if len(asked) > 2:
        compile_side_by_side(sorted(asked))


def edge_rows() -> np.ndarray:
    """Values that divide, round or compare badly: zeros of both signs, constants, subnormals, near
    overflow, lone outliers.
    """
    rng = np.random.default_rng(11)
    gauss = rng.standard_normal((40, N_COLS)).astype(np.float32)
    x = gauss.copy()
    for row, value in enumerate(
        [0.0, -0.0, 1.0, -1.0, 1e-30, 1e-38, 1e-40, 1e-45, -3e-41, 65504.0, 1e10, 1e30]
    ):
        x[row] = np.float32(value)
    for row, scale in enumerate(
        [1e-45, 1e-42, 1e-40, 1e-38, 1e-36, 1e-30, 1e-20, 6e-8, 6e-5, 1e4, 1e10, 1e18, 1e30, 1e37],
        12,
    ):
        x[row] = gauss[row] * np.float32(scale)
    x[26] = 0
    x[26, ::256] = 1
    x[27] = 1e-30
    x[27, 5] = 1e30
    x[28] = np.where(gauss[28] > 0, np.float32(0), np.float32(-0.0))
    x[29] = np.round(gauss[29] * 4)  # many ties
    x[30] = np.abs(gauss[30])
    x[31] = -np.abs(gauss[31])
    x[32, :512] = 0
    x[33] = rng.standard_t(2, N_COLS)
    x[34] = np.arange(N_COLS) % 16 - 8
    x[35] = np.arange(N_COLS) % 2 * 2 - 1
    return x


def importances() -> dict[str, np.ndarray | None]:
    rng = np.random.default_rng(12)
    some = rng.gamma(0.5, 2, N_COLS).astype(np.float32)
    gaps = some.copy()
    gaps[:256] = 0
    gaps[300:310] = 0
    wide = (10.0 ** rng.uniform(-30, 30, N_COLS)).astype(np.float32)
    return {
        "none": None,
        "some": some,
        "gaps": gaps,
        "zeros": np.zeros(N_COLS, np.float32),
        "wide": wide,
    }


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
@pytest.mark.parametrize("name", [t for t in TYPES if t in _searches()["steps"]])
def test_launches_that_no_cuda_block_divides(gpu, name):
    """Threads behind the last block or row must leave it alone."""
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
def test_device_that_is_not_there(gpu):
    with pytest.raises(UsageError, match="no device 'cuda:999'"):
        encode("Q4_0", np.zeros((1, 32), np.float32), device="cuda:999")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA:0"])
def test_unknown_devices(device):
    with pytest.raises(UsageError, match="unknown device"):
        encode("Q4_0", np.zeros((1, 32), np.float32), device=device)


@pytest.mark.skipif(not _reason_to_skip(), reason="a CUDA device is here")
def test_missing_device_is_said():
    with pytest.raises(UsageError, match="numba-cuda|CUDA device"):
        encode("Q4_0", np.zeros((1, 32), np.float32), device="cuda")


@pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed"
)
@pytest.mark.parametrize("kind", ["plain", "single", "block", "row", "steps"])
def test_compiled_code_rounds_like_the_cpu(kind, monkeypatch):
    """Without a device: the machine code that NVVM makes of each kind of search has no joined or
    approximate operation.
    """
    import numba.cuda.dispatcher
    from iqforge.cuda_kernels.compile import numba_cuda as kernel_cuda
    from iqforge.quantize.cuda import encoder as cuda_searches
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

    monkeypatch.setattr(cuda_searches, "compile_kernel", compile_only)
    kernel_cuda._prepare()
    name, search = next(iter(_searches()[kind].items()))
    cuda_searches._kernel.__wrapped__(ggml_type(name), kind, search, 0, ())
    assert seen[0] == []
    assert kind == "plain" or any("fma" in found for found in seen[1]), (
        "the check would not notice joined operations"
    )
