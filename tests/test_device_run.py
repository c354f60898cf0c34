"""Quantizing through devices: the pieces, their order, their memory, and what goes wrong, on a
device made of numpy.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
import types
import unittest.mock
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import IqforgeError, NonFiniteError, UsageError
from iqforge.formats.codec import block_decoder, decode, encode_float
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.values import string
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.quantize.cuda import device as cuda_device
from iqforge.quantize.cuda import pieces as cuda_run
from iqforge.quantize.encode import row_encoder
from iqforge.quantize.run.piece import Target, row_group
from iqforge.quantize.run.stream import Output, stream


class FakeEncoder:
    """The CPU's search behind the interface of `CudaEncoder`."""

    def __init__(self, type, n_cols, weighted):
        self.type, self.n_cols, self.weighted = type, n_cols, weighted

    def arrays(self, rows, new):
        blocks = self.n_cols // self.type.block_size
        results = [((rows * blocks, self.type.block_bytes), np.uint8)]
        if self.type.header_bytes:
            results = [
                ((rows, self.type.header_bytes), np.uint8),
                ((rows, blocks, self.type.block_bytes), np.uint8),
            ]
        return [new((rows, self.n_cols), np.float32), *(new(*result) for result in results)]

    def launch(self, arrays, stream, weights):
        assert (weights is None) == (not self.weighted)
        x = arrays[0]
        out = np.empty((len(x), self.type.row_bytes(self.n_cols)), dtype=np.uint8)
        row_encoder(self.type, self.n_cols, weights)(x, out)
        if head := self.type.header_bytes:
            arrays[1][...] = out[:, :head]
        arrays[-1][...] = out[:, head:].reshape(arrays[-1].shape)


class FakeDevice:
    """What `CudaDevice` does, in numpy, at once, and after a random delay. Memory is filled with
    rubbish when it is handed out.
    """

    def __init__(self, name="fake:0", fail_at=None):
        self.name, self.fail_at, self.busy, self.most, self.count = name, fail_at, 0, 0, 0
        self.lock, self.random = threading.Lock(), random.Random(1)

    @contextlib.contextmanager
    def context(self):
        with self.lock:
            self.busy, self.count = self.busy + 1, self.count + 1
            self.most = max(self.most, self.busy)
        try:
            yield
        finally:
            with self.lock:
                self.busy -= 1

    def stream(self):
        return object()

    def wait(self, stream):
        time.sleep(self.random.random() / 200)
        if self.fail_at is not None and self.count >= self.fail_at:
            raise IqforgeError(f"{self.name} fell off the bus")

    def pinned(self, n_bytes):
        return np.full(n_bytes, 0xAA, dtype=np.uint8)

    memory = pinned

    def upload(self, host, target, stream):
        target[...] = host

    def download(self, source, host, stream):
        host[...] = source

    def encoder(self, type, n_cols, weighted):
        return FakeEncoder(type, n_cols, weighted)

    def widen(self, name, raw, x, found, stream):
        values = decode(name, raw.view(np.uint8)[None], len(raw))[0]
        bad = np.nonzero(~np.isfinite(values))[0]
        if len(bad):
            found[:] = bad[0], len(bad)
        values[bad] = 0
        x[:] = values

    def measure(self, type, x, results, w, rows_per_matrix, partials, stream):
        rows, matrices = len(x) // w.shape[1], len(w)
        data = np.concatenate([result.reshape(rows, -1) for result in results], axis=1)
        x = x.reshape(matrices, rows_per_matrix, -1).astype(np.float64)
        e = x - decode(type, data, x.shape[2], as_weights=True).reshape(x.shape)
        w = w.reshape(matrices, 1, -1)
        partials[...] = 0
        partials[0] = (
            (e**2).sum(),
            (x**2).sum(),
            (w * e**2).sum(),
            (w * x**2).sum(),
            abs(e).max(),
            abs(x).max(),
        )

    def join(self, heads, bodies, out, stream):
        out[:, : heads.shape[1]], out[:, heads.shape[1] :] = heads, bodies.reshape(len(out), -1)


def info(name, shape, kind="BF16"):
    return TensorInfo(name, shape, ggml_type(kind))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Sources of four types; experts; norms; a row that 256 does not divide."""
    tensors = [
        info("token_embd.weight", (24, 256)),
        info("blk.0.attn_norm.weight", (256,), "F32"),
        info("blk.0.attn_q.weight", (40, 256), "F16"),
        info("blk.0.ffn_up_exps.weight", (5, 8, 256)),
        info("blk.0.ffn_down.weight", (16, 512), "F32"),
        info("blk.0.odd.weight", (8, 96)),
        info("blk.0.old.weight", (16, 256), "Q8_0"),
    ]
    path, generator = tmp_path_factory.mktemp("model") / "model.gguf", np.random.default_rng(3)
    with GGUFWriter(path, {"general.architecture": string("llama")}, tensors) as sink:
        for tensor in tensors:
            x = generator.standard_normal((tensor.n_rows, tensor.n_cols)).astype(np.float32)
            sink.write(tensor, iqforge.encode(tensor.type, x))
    return path


def imatrix(model: Path) -> Imatrix:
    generator, entries = np.random.default_rng(4), {}
    with open_gguf(model) as source:
        for t in source.tensors:
            if t.name.startswith("blk.") and len(t.shape) > 1 and "attn_q" not in t.name:
                entries[t.name] = Entry(
                    generator.lognormal(size=(t.n_matrices, t.n_cols)) * 100,
                    np.full(t.n_matrices, 100),
                )
    return Imatrix(entries, path="some.dat")


def quantize(model: Path, out: Path, type: str, devices=(), **options):
    """The report and the digest of a run through fake devices; on the CPU without them."""
    with (
        unittest.mock.patch(
            "iqforge.quantize.cuda.devices.find_devices", return_value=range(len(devices))
        ),
        unittest.mock.patch(
            "iqforge.quantize.cuda.device.CudaDevice", lambda number: devices[number]
        ),
    ):
        report = iqforge.quantize_model(
            model, out, type, pure=True, allow_requantize=True, device="cuda", **options
        )
    return report, hashlib.sha256(out.read_bytes()).hexdigest()


@pytest.mark.parametrize("type", ["IQ4_K", "IQ2_KS", "IQ4_K_R4", "Q4_0", "Q8_KV"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bytes_are_the_cpu_s_for_any_number_of_devices(
    model, tmp_path, monkeypatch, type, weighted
):
    given = imatrix(model) if weighted else None
    expected, digest = quantize(model, tmp_path / "cpu.gguf", type, imatrix=given)
    reports = []
    monkeypatch.setattr(cuda_run, "PIECE_ELEMENTS", 4096 + 512)
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
    function, factor = block_decoder(ggml_type("IQ4_K"), as_weights=True)
    values, sums = np.empty(256, dtype=np.float32), np.empty(cuda_device.SUMS)
    function(data[0], values)
    e, y = values.astype(np.float64) - x, x.astype(np.float64)
    cuda_device.measure_block(x, w, values, factor, sums)
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
    cuda_device.measure_block(
        np.float32([3e38, 1]), np.ones(2, np.float32), np.float32([np.nan, 1]), np.float32(1), sums
    )
    assert np.isinf(sums[4]) and sums[5] == np.float32(3e38)


def test_pieces_cover_every_row_once():
    from iqforge.quantize.plan.plan import PlannedTensor

    workers = cuda_run.DeviceWorkers([FakeDevice()], 1)
    cases = [
        ((3, 70000, 1024), "IQ4_K_R4"),
        ((128, 768, 2048), "IQ2_KS"),
        ((50, 256), "Q4_0"),
        ((1, 1 << 26), "Q4_0"),
        ((16, 1 << 22), "Q4_0_R8"),
    ]
    for shape, kind in cases:
        plan = PlannedTensor(info("a.weight", shape), info("a.weight", shape, kind))
        pieces, rows = list(workers.pieces(plan.source, row_group([Target(0, 0, plan)]))), shape[-2]
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
            ] <= cuda_run.PIECE_ELEMENTS or stop - start <= plan.target.type.group_rows


def test_pieces_under_way_are_bounded(model, tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_run, "PIECE_ELEMENTS", 512)
    devices = [FakeDevice("fake:0"), FakeDevice("fake:1")]
    quantize(model, tmp_path / "a.gguf", "Q4_0", devices, threads=6)
    assert all(1 < device.most <= 3 for device in devices)
    assert abs(devices[0].count - devices[1].count) <= 2


def write_holes(folder: Path, kind: str, value: float) -> Path:
    """A model of one stacked tensor with three numbers that are not finite, the first in row 5,
    column 9 of the last matrix.
    """
    tensor, x = (
        info("blk.0.ffn_up_exps.weight", (3, 16, 256), kind),
        np.ones((48, 256), dtype=np.float32),
    )
    x[37, 9] = x[37, 11] = x[45, 3] = value
    with GGUFWriter(
        folder / "bad.gguf", {"general.architecture": string("llama")}, [tensor]
    ) as sink:
        sink.write(tensor, encode_float(kind, x))
    return folder / "bad.gguf"


@pytest.mark.parametrize("kind, value", [("F32", np.nan), ("F16", -np.inf), ("BF16", np.inf)])
def test_number_that_is_not_finite_is_named_as_on_the_cpu(tmp_path, monkeypatch, kind, value):
    monkeypatch.setattr(cuda_run, "PIECE_ELEMENTS", 2048)
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
    monkeypatch.setattr(cuda_run, "PIECE_ELEMENTS", 2048)
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
    monkeypatch.setattr(cuda_run, "PIECE_ELEMENTS", 512)
    before = threading.active_count()
    with pytest.raises(IqforgeError, match="fake:1 fell off the bus"):
        quantize(
            model,
            tmp_path / "q.gguf",
            "IQ4_K",
            [FakeDevice("fake:0"), FakeDevice("fake:1", fail_at=9)],
        )
    assert threading.active_count() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "q.gguf.journal",
        "q.gguf.part",
    ]  # what is finished stays
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
    monkeypatch.setattr(cuda_run, "PIECE_ELEMENTS", 512)

    class FullDisk:
        def write(self, tensor, data):
            raise IqforgeError("no space")

    from iqforge.quantize.plan.plan import plan_uniform

    devices = [FakeDevice()]
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda number: devices[number])
    with open_gguf(model) as source, pytest.raises(IqforgeError, match="no space"):
        planned = plan_uniform(source.tensors, ggml_type("IQ4_K"), allow_requantize=True)
        stream(source, [Output(planned, FullDisk())], devices=[0])
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
    with caplog.at_level("INFO"):
        assert find_devices("auto") == ()
    assert "on the CPU" in caplog.text


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
