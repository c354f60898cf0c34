"""The kernels that round with second moments, compiled by g++, make the bytes of the CPU."""

from __future__ import annotations

import shutil
import threading
import time
import unittest.mock
from dataclasses import dataclass

import iqforge
import numpy as np
import pytest
from iqforge.errors import ImatrixError
from iqforge.formats.types import TYPES, ggml_type
from iqforge.quantize.rounding.cuda.factor import Wanted, factored_there, held_out_error_there
from iqforge.quantize.rounding.cuda.memory import Memory
from iqforge.quantize.rounding.cuda.place import Place, rounder_there
from iqforge.quantize.rounding.cuda.rounders import DeviceRounders
from iqforge.quantize.rounding.factor import Factor, factored
from iqforge.quantize.rounding.layouts.codes import SCALES
from iqforge.quantize.rounding.layouts.vectors import VECTORS
from iqforge.quantize.rounding.layouts.words import TABLES
from iqforge.quantize.rounding.methods import ON_CPU, guides, rounder_of
from iqforge.quantize.rounding.row_metric import CoupledRounder, RowMetric
from iqforge.quantize.rounding.ternary_rounder import TWINS
from iqforge.quantize.search.trellis.tree import CODEBOOKS

from .imatrices import N_CTX, tiny_llama_file
from .rounding_on_host import HostDevice, rounding_library
from .second_moments import correlated, moments_of, weights
from .tiny_checkpoint import PROSE

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return rounding_library(tmp_path_factory.mktemp("rounding"))


def both(library, name, x, h, passes=1, shrink=0.25):
    """Return the bytes of the CPU and of the kernels after every stage."""
    type, n = ggml_type(name), x.shape[1]
    factor = factored(h, shrink)
    expected = list(rounder_of(type, n, factor, passes).stages(x))
    memory = Memory(HostDevice(library))
    there = factored_there([Wanted(moments_of(h), shrink, "x")], 0, memory, None)
    np.testing.assert_array_equal(there.feedback[0], factor.feedback)
    np.testing.assert_array_equal(there.moments[0], factor.moments)
    np.testing.assert_array_equal(there.weights[0], factor.weights)
    made = rounder_there(type)(type, n, there, passes, memory, None)
    return expected, list(made.stages([x]))


def one_factored(given, shrink, memory):
    """Return the factor of one matrix."""
    made = factored_there([Wanted(given, shrink, "x")], 0, memory, None)
    return Factor(made.moments[0], made.feedback[0], made.weights[0])


# The others of a family run the same code with other numbers.
FEW = ("Q4_0", "Q4_K", "IQ3_K", "IQ2_KS", "MXFP4", "IQ3_S")
ALL = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.full)
    for name in (*SCALES, *VECTORS, *TABLES, "IQ4_KSS", *CODEBOOKS)
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_bytes_are_those_of_the_cpu(library, name):
    x = weights(rows=11, n=512)
    x[3] = 0
    x[4, 256:] *= 40
    expected, made = both(library, name, x, correlated(512))
    assert len(made) == len(expected) == 2
    for one, other in zip(expected, made, strict=True):
        np.testing.assert_array_equal(other, one)
    assert (made[0] != made[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["IQ3_K", "IQ2_XS", pytest.param("IQ2_KS", marks=pytest.mark.full)]
)
def test_matrices_are_rounded_together_as_alone(library, name):
    """Those that wait for the GPU together, also where one of them cannot be factored."""
    type, n, count = ggml_type(name), 256, 5
    device, given = HostDevice(library), [correlated(n, seed) for seed in range(count)]
    given[2] = np.kron(np.eye(n // 2), np.array([[1.0, 50], [50, 1]]))
    rounders, made, errors = DeviceRounders([device]), {}, {}
    together, answer = [], Place.answer
    go = threading.Event()

    def waiting(place, batch):
        together.append(len(batch))
        go.wait()  # until all others wait
        answer(place, batch)

    def run(index):
        rounder = rounders.rounder(type, n, moments_of(given[index]), 0.25, 1, f"x{index}")
        try:
            if index % 2:
                made[index] = list(rounder.stages(weights(rows=3, n=n, seed=index)))
            else:
                rounder(
                    weights(rows=3, n=n, seed=index), out := np.empty((3, type.row_bytes(n)), "u1")
                )
                made[index] = [out]
        except ImatrixError as error:
            errors[index] = error

    with unittest.mock.patch.object(Place, "answer", waiting):
        threads = [threading.Thread(target=run, args=(i % count,)) for i in range(2 * count)]
        for thread in threads:
            thread.start()
        while sum(together) + len(rounders._waiting) < len(threads):
            time.sleep(0.001)
        go.set()
        for thread in threads:
            thread.join()
    assert max(together) > 2 and errors.keys() == {2} and errors[2].tensor == "x2"
    for index in set(range(count)) - {2}:
        factor, x = factored(given[index], 0.25), weights(rows=3, n=n, seed=index)
        expected = list(rounder_of(type, n, factor, 1).stages(x))
        for one, other in zip(expected if index % 2 else expected[-1:], made[index], strict=True):
            np.testing.assert_array_equal(other, one)


@pytest.mark.parametrize(
    "name, n, rows",
    [
        pytest.param("Q4_0", 96, 131, marks=pytest.mark.slow),
        pytest.param("IQ2_K", 256, 9, marks=pytest.mark.slow),
        pytest.param("IQ4_NL", 32, 3, marks=pytest.mark.full),
        pytest.param("Q4_1", 544, 131, marks=pytest.mark.full),
        pytest.param("IQ3_KS", 768, 131, marks=pytest.mark.full),
    ],
)
def test_odd_widths_dead_columns_and_importances_alone(library, name, n, rows):
    """Widths that no tile divides, more rows than a tile has, columns that are always zero, and
    moments without correlations.
    """
    h = correlated(n)
    h[5] = h[:, 5] = 0
    h[n - 1] = h[:, n - 1] = 0
    for moments, passes in ((h, 2), (np.diag(np.diagonal(h)), 0)):
        expected, made = both(library, name, weights(rows=rows, n=n), moments, passes)
        assert len(made) == len(expected) == passes + 1
        for one, other in zip(expected, made, strict=True):
            np.testing.assert_array_equal(other, one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TQ1_0", pytest.param("IQ1_BN", marks=pytest.mark.full)])
def test_ternary_digits(library, name):
    """They are rounded as the type that has the same values."""
    type, x, h = ggml_type(name), weights(rows=5, n=256), correlated(256)
    expected = np.empty((5, type.row_bytes(256)), dtype=np.uint8)
    made = np.empty_like(expected)
    given = moments_of(h)
    ON_CPU.rounder(type, 256, given, 0.3, 1, "x")(x, expected)
    DeviceRounders([HostDevice(library)]).rounder(type, 256, given, 0.3, 1, "x")(x, made)
    np.testing.assert_array_equal(made, expected)


@pytest.mark.full
def test_rows_that_are_rounded_together(library):
    """A rounder of devices makes the CPU's bytes of rows that make up for each other's errors."""
    generator, type, n, rows = np.random.default_rng(), ggml_type("Q4_0"), 256, 96
    x, h = weights(rows, n), correlated(n)
    feedback = np.triu(generator.normal(0, 0.1, (rows, rows)), 1).astype(np.float32)
    metric = RowMetric((48, 80, rows), feedback)
    made = []
    for rounders in (ON_CPU, DeviceRounders([HostDevice(library)])):
        rounder = rounders.rounder(type, n, moments_of(h), 0.25, 1, "x")
        made.append(np.empty((rows, type.row_bytes(n)), dtype=np.uint8))
        CoupledRounder(type, n, rounder, metric)(x, made[-1])
    np.testing.assert_array_equal(*made)


@pytest.mark.full
def test_every_type_that_moments_guide_has_kernels():
    for name, type in TYPES.items():
        plain = type.plain
        twin = ggml_type(TWINS.get(plain.name, plain.name))
        assert (rounder_there(twin) is not None) == guides(type), name


@dataclass(frozen=True)
class Sums:
    """`SumsOnDevice` in numpy."""

    sums: np.ndarray
    count: int
    diagonal: np.ndarray
    share: float = 0.0
    prior: np.ndarray | None = None
    device: int = 0


@pytest.mark.slow
@pytest.mark.parametrize("n", [96, pytest.param(320, marks=pytest.mark.full)])
def test_sums_on_a_device_are_factored_as_on_the_cpu(library, n, caplog):
    sums = (correlated(n) * 777).astype(np.float32)
    h = sums.astype(np.float64) / 777
    memory = Memory(HostDevice(library))
    given = moments_of(h, hold=h, there=Sums(sums, 777, np.diagonal(h).copy()))
    made, expected = one_factored(given, 0.1, memory), factored(h, 0.1)
    np.testing.assert_array_equal(made.feedback, expected.feedback)
    np.testing.assert_array_equal(made.moments, expected.moments)
    rest = weights(rows=11, n=n).astype(np.float64)
    error = held_out_error_there(given, rest, 0, memory, None)
    assert error == pytest.approx(ON_CPU.held_out_error(given, rest), rel=1e-12)
    for prior in (None, correlated(n, seed=5)):  # of experts that saw few tokens
        mixed = 0.7 * h + 0.3 * (np.diag(np.diagonal(h)) if prior is None else prior)
        there = Sums(sums, 777, np.diagonal(mixed).copy(), 0.3, prior)
        given = moments_of(mixed, there=there)
        made, expected = one_factored(given, 0.1, memory), factored(mixed, 0.1)
        np.testing.assert_array_equal(made.feedback, expected.feedback)
        np.testing.assert_array_equal(made.moments, expected.moments)
    # Not definite at first, and never.
    close = np.kron(np.eye(n // 2), np.array([[1.0, 1.05], [1.05, 1]]))
    made, expected = one_factored(moments_of(close), 0, memory), factored(close, 0)
    np.testing.assert_array_equal(made.feedback, expected.feedback)
    assert caplog.text.count("damping is now 0.1") == 2
    far = np.kron(np.eye(n // 2), np.array([[1.0, 50], [50, 1]]))
    with pytest.raises(ImatrixError, match="cannot be factored"):
        one_factored(moments_of(far), 0, memory)


@pytest.mark.full
def test_runs_with_several_devices_give_the_file_of_the_cpu(library, tmp_path):
    path = tiny_llama_file(tmp_path)
    made = iqforge.collect_hessian(path, PROSE * 20, tmp_path / "h.safetensors", n_ctx=N_CTX)

    def quantize(devices):
        out = tmp_path / f"{len(devices)}.gguf"
        with (
            unittest.mock.patch(
                "iqforge.quantize.cuda.devices.find_devices", return_value=range(len(devices))
            ),
            unittest.mock.patch(
                "iqforge.quantize.run.cuda_device.CudaDevice", lambda number: devices[number]
            ),
        ):
            iqforge.quantize_model(
                path,
                out,
                "Q4_0",
                pure=True,
                device="cuda",
                hessian=made,
                hessian_shrink=0.3,
                refine=False,
            )
        return out.read_bytes()

    devices = [HostDevice(library) for _ in range(3)]
    assert quantize(devices) == quantize([])
    assert sum(device.launched for device in devices)
