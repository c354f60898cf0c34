"""Calls by path that take `device`: conversion, errors of types, and types for a size, on a device
made of numpy.
"""

from __future__ import annotations

import contextlib
import math
import unittest.mock
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import NonFiniteError, UsageError
from iqforge.quantize.report import device_stats
from iqforge.quantize.report.row_errors import row_spans

from . import device_models
from .device_models import imatrix, info, write_holes
from .fake_device import FakeDevice

DEMO = Path(iqforge.__file__).parent / "demo" / "model"
TYPES = ["IQ4_K", "Q4_0", "Q8_0", "IQ4_K_R4", "IQ2_KS", "BF16"]
model = device_models.model  # a fixture


@contextlib.contextmanager
def fake_devices(count: int):
    """Find `count` devices, whatever is asked for."""
    made = [FakeDevice(f"fake:{number}") for number in range(count)]
    with (
        unittest.mock.patch(
            "iqforge.quantize.cuda.devices.find_devices", return_value=tuple(range(count))
        ) as found,
        unittest.mock.patch("iqforge.quantize.run.cuda_device.CudaDevice", lambda n: made[n]),
    ):
        yield made, found


@pytest.fixture
def without_gpus(monkeypatch):
    from iqforge.cuda_kernels.compile import numba_cuda

    def missing():
        raise UsageError("CUDA devices need a GPU")

    monkeypatch.setattr(numba_cuda, "cuda_module", missing)


def test_conversion_quantizes_on_devices(tmp_path):
    on_cpu = iqforge.convert_model(DEMO, tmp_path / "cpu.gguf", "iq4_nl")
    with fake_devices(2) as (made, found):
        there = iqforge.convert_model(DEMO, tmp_path / "there.gguf", "iq4_nl", device="cuda")
        assert found.call_args.args == ("cuda",) and all(one.count for one in made)
    assert there.read_bytes() == on_cpu.read_bytes()


def test_conversion_to_floats_uses_no_device(tmp_path):
    expected = iqforge.convert_model(DEMO, tmp_path / "cpu.gguf", "f16").read_bytes()
    for device, asked in (("auto", 0), ("cuda", 1), ("cpu", 1)):
        with fake_devices(1) as (made, found):
            out = iqforge.convert_model(DEMO, tmp_path / f"{device}.gguf", "f16", device=device)
            assert found.call_count == asked and not made[0].count
        assert out.read_bytes() == expected


@pytest.mark.parametrize("weighted", [False, True])
def test_errors_on_devices_are_the_cpu_s(model, monkeypatch, weighted):
    given = imatrix(model) if weighted else None
    expected = iqforge.quantize_stats(model, TYPES, given, force=True)
    found = []
    for elements, count, threads in ((1 << 21, 1, 1), (4096, 2, 3), (4096, 1, 8)):
        monkeypatch.setattr(device_stats, "PIECE_ELEMENTS", elements)
        with fake_devices(count) as (made, _):
            found.append(
                iqforge.quantize_stats(
                    model, TYPES, given, force=True, threads=threads, device="cuda"
                )
            )
        assert all(one.count for one in made)
    assert found[1].as_dict() == found[2].as_dict(), "the figures depend on the number of devices"
    for report in found:
        for ours, theirs in zip(report.tensors, expected.tensors, strict=True):
            assert (ours.tensor, ours.rows, ours.weighted) == (
                theirs.tensor,
                theirs.rows,
                theirs.weighted,
            )
            assert ours.errors.keys() == theirs.errors.keys()
            for name, sums in ours.errors.items():
                other = theirs.errors[name]
                assert (sums.n_elements, sums.n_bytes) == (other.n_elements, other.n_bytes)
                for what in ("e2", "x2", "we2", "wx2", "largest_error"):
                    a, b = getattr(sums, what), getattr(other, what)
                    assert math.isclose(a, b, rel_tol=1e-5), (name, what)


def test_samples_on_devices_are_the_same_rows(model):
    expected = iqforge.quantize_stats(model, ["IQ4_K"], rows=16, include=["exps", "attn"])
    with fake_devices(1):
        found = iqforge.quantize_stats(
            model, ["IQ4_K"], rows=16, include=["exps", "attn"], device="cuda:0"
        )
    for ours, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert ours.rows == theirs.rows < ours.tensor.n_rows
        assert math.isclose(ours.errors["IQ4_K"].rmse, theirs.errors["IQ4_K"].rmse, rel_tol=1e-5)


def test_pieces_of_a_device():
    tensor = info("blk.0.ffn_up_exps.weight", (5, 40, 256))
    spans = list(row_spans(tensor, 96))
    for weighted in (False, True):
        pieces = list(device_stats.groups(tensor, spans, weighted))
        assert [span for piece in pieces for span in piece] == spans
        matrices = [{start // 40 for start, _ in piece} for piece in pieces]
        assert all(len(own) == 1 for own in matrices) if weighted else len(pieces) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_named_as_on_the_cpu(tmp_path, value):
    path, messages = write_holes(tmp_path, "F32", value), []
    for device in ("cpu", "cuda"):
        with fake_devices(device == "cuda"), pytest.raises(NonFiniteError) as caught:
            iqforge.quantize_stats(path, ["IQ4_K"], device=device)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "row 5, column 9" in messages[0]


def test_types_for_a_size_are_chosen_on_devices():
    expected = iqforge.recipe_for_target(DEMO, bpw=5.5, types=["Q4_0", "Q8_0", "IQ4_NL"])
    with fake_devices(1) as (made, _):
        found = iqforge.recipe_for_target(
            DEMO, bpw=5.5, types=["Q4_0", "Q8_0", "IQ4_NL"], device="cuda"
        )
    assert made[0].count and found.recipe.tensor_types == expected.recipe.tensor_types
    assert math.isclose(found.predicted_kld, expected.predicted_kld, rel_tol=1e-4)


@pytest.mark.parametrize(
    "call",
    [
        lambda path, **o: iqforge.quantize_stats(path, ["Q8_0"], **o),
        lambda path, **o: iqforge.recipe_for_target(path, bpw=8.0, types=["Q8_0", "Q4_0"], **o),
    ],
)
def test_auto_uses_devices_for_large_work(model, monkeypatch, call):
    with fake_devices(1) as (made, found):
        call(model, device="auto")
        assert not found.called and not made[0].count
        monkeypatch.setattr("iqforge.api.devices.WORTH_DEVICES", 1)
        call(model, device="auto")
        assert found.call_args.args == ("auto",) and made[0].count


@pytest.mark.parametrize(
    "call",
    [
        lambda out, **o: iqforge.convert_model(DEMO, out, "q4_0", **o),
        lambda out, **o: iqforge.convert_model(DEMO, out, "f16", **o),
        lambda _, **o: iqforge.quantize_stats(DEMO, ["Q8_0"], **o),
        lambda _, **o: iqforge.recipe_for_target(DEMO, bpw=4.5, types=["Q4_0"], **o),
    ],
)
def test_devices_that_cannot_be_are_named(without_gpus, tmp_path, call):
    with pytest.raises(UsageError, match="unknown device 'gpu'; use cpu, auto, cuda"):
        call(tmp_path / "x.gguf", device="gpu")
    with pytest.raises(UsageError, match="CUDA devices need a GPU"):
        call(tmp_path / "x.gguf", device="cuda")
    assert not list(tmp_path.iterdir())


def test_commands_take_device(without_gpus, model, tmp_path, capsys):
    out = str(tmp_path / "x.gguf")
    for words in (
        ["convert", str(DEMO), "--outtype", "q8_0", "--outfile", out],
        ["quantize-stats", str(model), "--type", "Q8_0"],
        ["quantize", "--target-bpw", "8", str(model), out],
    ):
        assert main([*words, "--device", "cuda"]) == 1
        assert "CUDA devices need a GPU" in capsys.readouterr().err
        main(["help", words[0]])
        assert "--device D" in capsys.readouterr().out
