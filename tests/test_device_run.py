"""Quantizing through devices: pieces, their order, their memory, and errors, on a device made of
numpy.
"""

from __future__ import annotations

import hashlib
import threading
import types
import unittest.mock
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import IqforgeError, NonFiniteError, UsageError
from iqforge.formats.codecs.codec import decode
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.types import ggml_type
from iqforge.quantize.cuda import device_kernels
from iqforge.quantize.run import cuda_device
from iqforge.quantize.run import piece as run_piece
from iqforge.quantize.run.piece import OutputTensor, device_spans, row_group
from iqforge.quantize.run.stream import RunOutput, stream

from . import device_models
from .device_models import imatrix, info, write_holes
from .fake_device import FakeDevice

model = device_models.model  # a fixture


def quantize(model: Path, out: Path, type: str, devices=(), **options):
    """Return the report and the digest of a run through fake devices, or on the CPU without
    devices.
    """
    with (
        unittest.mock.patch(
            "iqforge.quantize.cuda.devices.find_devices", return_value=range(len(devices))
        ),
        unittest.mock.patch(
            "iqforge.quantize.run.cuda_device.CudaDevice", lambda number: devices[number]
        ),
    ):
        report = iqforge.quantize_model(
            model, out, type, pure=True, allow_requantize=True, device="cuda", **options
        )
    return report, hashlib.sha256(out.read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("type", ["IQ4_K", "IQ2_KS", "IQ4_K_R4", "Q4_0", "Q8_KV"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bytes_are_the_cpu_s_for_any_number_of_devices(
    model, tmp_path, monkeypatch, type, weighted
):
    given = imatrix(model) if weighted else None
    expected, digest = quantize(model, tmp_path / "cpu.gguf", type, imatrix=given)
    reports = []
    monkeypatch.setattr(run_piece, "DEVICE_PIECE_ELEMENTS", 4096 + 512)
    for number, threads in ((1, 1), (2, 8), (3, 2)):
        devices = [FakeDevice(f"fake:{n}") for n in range(number)]
        report, found = quantize(
            model, tmp_path / "device.gguf", type, devices, imatrix=given, threads=threads
        )
        assert found == digest
        reports.append(
            [(t.rmse, t.weighted_rmse, t.weighted, t.largest_error) for t in report.tensors]
        )
    assert reports[0] == reports[1] == reports[2], "the report depends on the number of devices"
    for ours, theirs in zip(reports[0], expected.tensors):
        assert (ours[0] is None) == (theirs.rmse is None) and ours[2] == theirs.weighted
        if ours[0] is not None:
            assert np.allclose(
                [ours[0], ours[1], ours[3]],
                [theirs.rmse, theirs.weighted_rmse, theirs.largest_error],
                rtol=1e-4,
            )


def test_sums_of_a_block():
    generator = np.random.default_rng(5)
    x, w = (
        generator.standard_normal(256).astype(np.float32),
        generator.gamma(1, 1, 256).astype(np.float32),
    )
    data = iqforge.encode("IQ4_K", x[None], w)
    values, sums = decode("IQ4_K", data, 256, as_weights=True)[0], np.empty(device_kernels.SUMS)
    e, y = values.astype(np.float64) - x, x.astype(np.float64)
    device_kernels.measure_block(x, w, values, np.float32(1), sums)
    assert np.allclose(
        sums,
        [
            (e**2).sum(),
            (y**2).sum(),
            (w * e**2).sum(),
            (w * y**2).sum(),
            abs(e).max(),
            abs(y).max(),
        ],
        rtol=1e-6,
    )
    device_kernels.measure_block(
        np.float32([3e38, 1]), np.ones(2, np.float32), np.float32([np.nan, 1]), np.float32(1), sums
    )
    assert np.isinf(sums[4]) and sums[5] == np.float32(3e38)


def test_pieces_cover_every_row_once():
    from iqforge.quantize.plan.plan import PlannedTensor

    cases = [
        ((3, 70000, 1024), "IQ4_K_R4"),
        ((128, 768, 2048), "IQ2_KS"),
        ((50, 256), "Q4_0"),
        ((1, 1 << 26), "Q4_0"),
        ((16, 1 << 22), "Q4_0_R8"),
    ]
    for shape, kind in cases:
        plan = PlannedTensor(info("a.weight", shape), info("a.weight", shape, kind))
        pieces, rows = (
            list(device_spans(plan.source, row_group([OutputTensor(0, 0, plan)]))),
            shape[-2],
        )
        assert (
            pieces[0][0] == 0
            and pieces[-1][1] == plan.source.n_rows
            and all(a[1] == b[0] for a, b in zip(pieces, pieces[1:]))
        )
        for start, stop in pieces:
            assert (start % rows == 0 and stop % rows == 0) or start // rows == (stop - 1) // rows
            assert start % rows % plan.target.type.group_rows == 0
            assert (stop - start) * shape[
                -1
            ] <= run_piece.DEVICE_PIECE_ELEMENTS or stop - start <= plan.target.type.group_rows


def test_pieces_under_way_are_bounded(model, tmp_path, monkeypatch):
    monkeypatch.setattr(run_piece, "DEVICE_PIECE_ELEMENTS", 512)
    devices = [FakeDevice("fake:0"), FakeDevice("fake:1")]
    quantize(model, tmp_path / "a.gguf", "Q4_0", devices, threads=6)
    assert all(1 < device.most <= 3 for device in devices)
    assert abs(devices[0].count - devices[1].count) <= 2


@pytest.mark.parametrize("kind, value", [("F32", np.nan), ("F16", -np.inf), ("BF16", np.inf)])
def test_number_that_is_not_finite_is_named_as_on_the_cpu(tmp_path, monkeypatch, kind, value):
    monkeypatch.setattr(run_piece, "DEVICE_PIECE_ELEMENTS", 2048)
    path = write_holes(tmp_path, kind, value)
    messages = []
    for devices in ((), [FakeDevice()], [FakeDevice(), FakeDevice()]):
        with pytest.raises(NonFiniteError) as caught:
            quantize(path, tmp_path / "q.gguf", "IQ4_K", devices)
        messages.append(str(caught.value))
    assert len(set(messages)) == 1 and "row 5, column 9" in messages[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.gguf"]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_nan_to_zero(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(run_piece, "DEVICE_PIECE_ELEMENTS", 2048)
    path = write_holes(tmp_path, kind, np.nan)
    expected, digest = quantize(path, tmp_path / "cpu.gguf", "IQ4_K", nan_to_zero=True)
    report, found = quantize(
        path, tmp_path / "device.gguf", "IQ4_K", [FakeDevice(), FakeDevice()], nan_to_zero=True
    )
    assert found == digest and report.tensors[0].zeroed == expected.tensors[0].zeroed == 3


def test_importance_that_is_not_finite_is_named(model, tmp_path):
    given = imatrix(model)
    given.entries["blk.0.ffn_down.weight"].sums[0, 7] = np.nan
    with pytest.raises(IqforgeError, match="blk.0.ffn_down.weight.*column 7"):
        quantize(model, tmp_path / "q.gguf", "IQ4_K", [FakeDevice()], imatrix=given)


def test_device_that_fails_ends_the_run(model, tmp_path, monkeypatch):
    monkeypatch.setattr(run_piece, "DEVICE_PIECE_ELEMENTS", 512)
    before = set(threading.enumerate())
    with pytest.raises(IqforgeError, match="fake:1 fell off the bus"):
        quantize(
            model,
            tmp_path / "q.gguf",
            "IQ4_K",
            [FakeDevice("fake:0"), FakeDevice("fake:1", fail_at=9)],
        )
    assert set(threading.enumerate()) <= before
    # What is finished stays.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "q.gguf.journal",
        "q.gguf.part",
    ]
    report, found = quantize(model, tmp_path / "q.gguf", "IQ4_K")
    assert (
        len(report.tensors) == 7 and found == quantize(model, tmp_path / "whole.gguf", "IQ4_K")[1]
    )


def test_memory_that_cannot_be_had_is_named():
    error = pytest.importorskip("numba.cuda.cudadrv.error")
    device = object.__new__(cuda_device.CudaDevice)
    device.name = "cuda:1"

    def full(n_bytes, dtype):
        raise error.CudaDriverError("CUDA_ERROR_OUT_OF_MEMORY")

    device._cuda = types.SimpleNamespace(device_array=full)
    with pytest.raises(
        IqforgeError, match="4096 bytes of memory of cuda:1 .*OUT_OF_MEMORY.*NTHREADS"
    ):
        device.memory(4096)


def test_sink_that_fails_ends_the_run(model, monkeypatch):
    monkeypatch.setattr(run_piece, "DEVICE_PIECE_ELEMENTS", 512)

    class FullDisk:
        def write(self, tensor, data):
            raise IqforgeError("no space")

    from .uniform_plan import plan_uniform

    devices = [FakeDevice()]
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda number: devices[number])
    with open_gguf(model) as source, pytest.raises(IqforgeError, match="no space"):
        planned = plan_uniform(source.tensors, ggml_type("IQ4_K"), allow_requantize=True)
        stream(source, [RunOutput(planned, FullDisk())], devices=[0])
    assert devices[0].busy == 0


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:0,", "cuda:0;1", "CUDA", ""])
def test_unknown_devices(model, tmp_path, capsys, device):
    assert (
        main(
            ["quantize", "--pure", "--device", device, str(model), str(tmp_path / "q.gguf"), "Q8_0"]
        )
        == 1
    )
    assert "unknown device" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_numpy_without_what_numba_cuda_uses(monkeypatch):
    from iqforge.cuda_kernels.compile import numba_cuda

    monkeypatch.setattr(numba_cuda.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delattr(np, "row_stack", raising=False)
    with pytest.raises(UsageError, match=r"numpy below 2\.5, and .* is installed"):
        numba_cuda.cuda_module.__wrapped__()


def test_missing_cuda(model, tmp_path, monkeypatch, capsys, caplog):
    from iqforge.cuda_kernels.compile import numba_cuda as kernel_cuda
    from iqforge.quantize.cuda.devices import find_devices

    def missing():
        raise UsageError("CUDA devices need the package numba-cuda: pip install 'iqforge[cuda]'")

    monkeypatch.setattr(kernel_cuda, "cuda_module", missing)
    assert (
        main(
            [
                "quantize",
                "--pure",
                "--device",
                "cuda:0",
                str(model),
                str(tmp_path / "q.gguf"),
                "Q8_0",
            ]
        )
        == 1
    )
    assert "pip install 'iqforge[cuda]'" in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert find_devices("cpu") == ()
    for gpu in (False, True):  # the reason is printed only on a machine with a GPU
        monkeypatch.setattr("iqforge.quantize.cuda.devices.has_nvidia_gpu", lambda gpu=gpu: gpu)
        with caplog.at_level("INFO"):
            assert find_devices("auto") == ()
        assert ("the GPU is not used: CUDA devices need" in caplog.text) == gpu


def test_auto_says_that_it_is_the_cpu(model, tmp_path, monkeypatch, capsys):
    """The message comes when the work starts, so not before an error about the input."""
    monkeypatch.setattr("iqforge.quantize.cuda.devices.find_devices", lambda device: ())
    words = ["quantize", "--pure", "--device", "auto"]
    assert main([*words, str(tmp_path / "no.gguf"), str(tmp_path / "q.gguf"), "Q8_0"]) == 1
    said = capsys.readouterr().err
    assert "no such file" in said and "CPU" not in said and "CUDA" not in said
    assert main([*words, str(model), str(tmp_path / "q.gguf"), "Q8_0"]) == 0
    assert capsys.readouterr().err.count("quantizing on the CPU\n") == 1


def test_devices_that_are_named(monkeypatch):
    from iqforge.cuda_kernels.compile import numba_cuda as kernel_cuda
    from iqforge.quantize.cuda.devices import find_devices

    monkeypatch.setattr(kernel_cuda, "cuda_module", lambda: types.SimpleNamespace(gpus=[0, 1, 2]))
    assert find_devices("cuda") == find_devices("auto") == (0, 1, 2)
    assert find_devices("cuda:2") == (2,) and find_devices("cuda:2,0") == (2, 0)
    with pytest.raises(UsageError, match="no device 'cuda:3': 3 CUDA"):
        find_devices("cuda:0,3")
    with pytest.raises(UsageError, match="twice"):
        find_devices("cuda:1,1")
