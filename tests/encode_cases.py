"""Rows and importances that are hard to encode, and helpers of tests on a CUDA device."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, wait

import numpy as np
from iqforge.errors import UsageError
from iqforge.formats.types import ggml_type
from iqforge.quantize.encode import encode
from iqforge.quantize.searches import encodable_types

# Trellis types have another algorithm on a device: tests/test_trellis.py.
TYPES = [
    name
    for name in encodable_types()
    if not ggml_type(name).is_float
    and not ggml_type(name).is_interleaved
    and not name.endswith("_KT")
]


N_COLS = 1024


def reason_to_skip() -> str | None:
    from iqforge.cuda_kernels.compile.numba_cuda import cuda_module

    try:
        cuda_module()
    except UsageError as error:
        return str(error)
    return None


def compile_both(name: str, devices: tuple[str, ...] = ("cpu", "cuda")) -> None:
    """Compile the searches of a type, with importances and without, into numba's caches on disk."""
    x = np.ones((1, N_COLS), np.float32)
    for device in devices:
        for importance in (None, x[0]):
            encode(name, x, importance, device=device)


def compile_side_by_side(names: list[str], **options) -> None:
    """Compile searches with a process per core, as numba compiles one function at a time, and a
    type takes 5 to 20 seconds. Workers of pytest-xdist share the cores. Errors are left to the
    tests, which meet them again. Processes find this module by its name in the package, whatever
    the folder of the clone is called.
    """
    compile_one = importlib.import_module("iqforge.tests.encode_cases").compile_both
    cores = os.cpu_count() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    with ProcessPoolExecutor(
        max(1, min(len(names), cores)), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        wait([pool.submit(compile_one, name, **options) for name in names])


def edge_rows() -> np.ndarray:
    """Return values that divide, round or compare badly: zeros of both signs, constants,
    subnormals, near overflow, lone outliers.
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
