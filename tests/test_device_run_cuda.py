"""Quantizing whole files through a CUDA device gives the files of the CPU."""

from __future__ import annotations

from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.errors import NonFiniteError
from iqforge.quantize.run import piece as run_piece

from .device_models import imatrix, model, write_holes  # noqa: F401  (model is a fixture)


@pytest.mark.gpu
@pytest.mark.parametrize("type", ["IQ4_K", "IQ2_KS", "IQ4_K_R4", "Q4_0", "Q8_KV", "MXFP4", "TQ1_0"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bytes_and_report_of_the_cpu(gpu, model, tmp_path, monkeypatch, type, weighted):  # noqa: F811
    given = imatrix(model) if weighted else None
    expected = iqforge.quantize_model(
        model, tmp_path / "cpu.gguf", type, given, pure=True, allow_requantize=True
    )
    for piece in (4096 + 512, 1 << 25):
        monkeypatch.setattr(run_piece, "DEVICE_PIECE_ELEMENTS", piece)
        report = iqforge.quantize_model(
            model,
            tmp_path / "gpu.gguf",
            type,
            given,
            pure=True,
            allow_requantize=True,
            device="cuda",
        )
        assert (tmp_path / "gpu.gguf").read_bytes() == (tmp_path / "cpu.gguf").read_bytes()
        for ours, theirs in zip(report.tensors, expected.tensors):
            if ours.rmse is not None:
                assert np.allclose(
                    [ours.rmse, ours.weighted_rmse, ours.largest_error],
                    [theirs.rmse, theirs.weighted_rmse, theirs.largest_error],
                    rtol=1e-4,
                )


@pytest.mark.gpu
@pytest.mark.parametrize("kind, value", [("F32", np.nan), ("F16", -np.inf), ("BF16", np.inf)])
def test_numbers_that_are_not_finite(gpu, tmp_path, kind, value):
    path = write_holes(tmp_path, kind, value)
    with pytest.raises(NonFiniteError, match=f"{np.float32(value)} at row 5, column 9"):
        iqforge.quantize_model(path, tmp_path / "q.gguf", "IQ4_K", pure=True, device="cuda:0")
    expected = iqforge.quantize_model(
        path, tmp_path / "cpu.gguf", "IQ4_K", pure=True, nan_to_zero=True
    )
    report = iqforge.quantize_model(
        path, tmp_path / "gpu.gguf", "IQ4_K", pure=True, nan_to_zero=True, device="cuda"
    )
    assert (tmp_path / "gpu.gguf").read_bytes() == (tmp_path / "cpu.gguf").read_bytes()
    assert report.tensors[0].zeroed == expected.tensors[0].zeroed == 3


@pytest.mark.gpu
def test_two_devices_take_turns(gpu, model, tmp_path, monkeypatch):  # noqa: F811
    """The same GPU, named twice, stands in for two of them."""
    from iqforge.quantize.cuda import devices

    monkeypatch.setattr(run_piece, "DEVICE_PIECE_ELEMENTS", 2048)
    digests = []
    for numbers in ((0,), (0, 0), (0, 0, 0)):
        monkeypatch.setattr(devices, "find_devices", lambda device, numbers=numbers: numbers)
        iqforge.quantize_model(
            model,
            tmp_path / "gpu.gguf",
            "IQ4_K",
            imatrix(model),
            pure=True,
            allow_requantize=True,
            device="cuda",
        )
        digests.append((tmp_path / "gpu.gguf").read_bytes())
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
def test_errors_of_types_are_the_cpu_s(gpu, model, weighted):  # noqa: F811
    given = imatrix(model) if weighted else None
    types = ["IQ4_K", "Q4_0", "Q8_0", "IQ4_K_R4", "IQ2_KS", "BF16", "IQ4_KT"]
    expected = iqforge.quantize_stats(model, types, given, force=True)
    found = iqforge.quantize_stats(model, types, given, force=True, device="cuda")
    for ours, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert ours.rows == theirs.rows and ours.errors.keys() == theirs.errors.keys()
        for name, sums in ours.errors.items():
            near = 0.1 if name == "IQ4_KT" else 1e-4  # its search differs on a GPU
            assert np.isclose(sums.rmse, theirs.errors[name].rmse, rtol=near), name
            assert np.isclose(sums.weighted_rmse, theirs.errors[name].weighted_rmse, rtol=near)


@pytest.mark.gpu
def test_conversion_gives_the_bytes_of_the_cpu(gpu, tmp_path):
    demo = Path(iqforge.__file__).parent / "demo" / "model"
    made = [
        iqforge.convert_model(demo, tmp_path / f"{device}.gguf", "iq4_k", device=device)
        for device in ("cpu", "cuda")
    ]
    assert made[0].read_bytes() == made[1].read_bytes()
