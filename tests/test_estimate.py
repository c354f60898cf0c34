"""Estimates of a dry run for time, memory and disk: it tries the run's own pieces, adds them up
correctly, and leaves no files.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import NonFiniteError, OutputError
from iqforge.formats import disk
from iqforge.formats.codecs.codec import encode_float
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import string
from iqforge.quantize.run import cuda_device, estimate
from iqforge.quantize.run import piece as run_piece
from iqforge.quantize.run.sample import SampledSource, spread

from .fake_device import FakeDevice
from .imatrices import imatrix_of
from .tiny_checkpoint import make_tiny_llama
from .uniform_plan import plan_uniform


def info(name, shape, kind="BF16"):
    return TensorInfo(name, shape, ggml_type(kind))


def write(path: Path, tensors: list[TensorInfo], value: float | None = None) -> Path:
    generator = np.random.default_rng(3)
    with GGUFWriter(path, {"general.architecture": string("llama")}, tensors) as sink:
        for tensor in tensors:
            x = generator.standard_normal((tensor.n_rows, tensor.n_cols)).astype(np.float32)
            sink.write(
                tensor, encode_float(tensor.type, x if value is None else np.full_like(x, value))
            )
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    tensors = [
        info("token_embd.weight", (64, 256)),
        info("blk.0.attn_norm.weight", (256,), "F32"),
        info("blk.0.attn_q.weight", (128, 256)),
        info("blk.0.ffn_up_exps.weight", (4, 32, 256)),
        info("blk.0.ffn_down.weight", (64, 512)),
    ]
    return write(tmp_path_factory.mktemp("model") / "model.gguf", tensors)


def test_samples_are_spread_in_whole_groups():
    tensors = [info("a", (100, 256)), info("b", (6, 64, 256)), info("c", (300, 256))]
    for offset in (0.25, 0.75):
        samples = spread(tensors, 10, 20 * 256, 8, offset)
        assert {own.tensor.name for own in samples} == {"a", "b", "c"} and len(
            {(own.tensor.name, own.start) for own in samples}
        ) == 10
        for own in samples:
            assert (
                own.stop - own.start == 16
                and own.start % own.matrix_rows % 8 == 0
                and own.stop <= own.tensor.n_rows
            )
            assert own.start // own.matrix_rows == (own.stop - 1) // own.matrix_rows
    small = spread([info("b", (6, 64, 256))], 3, 1 << 20, 4)
    assert [own.stop - own.start for own in small] == [64] * 3, "a sample is part of one matrix"
    stacks = spread([info("b", (6, 64, 256))], 2, 3 * 64 * 256 + 5, 4, whole=True)
    assert [own.shape for own in stacks] == [(3, 64, 256)] * 2 and all(
        own.start % 64 == 0 for own in stacks
    )


def test_sampled_rows_and_importances_are_those_of_the_source(model):
    imatrix = imatrix_of(model)
    with open_gguf(model) as source:
        experts = source.tensor("blk.0.ffn_up_exps.weight")
        sampled = SampledSource(source, spread([experts], 4, 8 * 256, 8))
        weights = imatrix.importance(experts.name, experts.shape)
        lookup = sampled.importance(imatrix.importance)
        for tensor, own in zip(sampled.tensors, sampled.rows):
            assert np.array_equal(
                sampled.read_rows(tensor, 2, 7),
                source.read_rows(experts, own.start + 2, own.start + 7),
            )
            assert np.array_equal(
                lookup(tensor.name, tensor.shape), weights[own.start // 32 : own.start // 32 + 1]
            )
        stacked = SampledSource(source, spread([experts], 1, 2 * 32 * 256, 8, whole=True))
        assert (
            len(stacked.importance(imatrix.importance)("0", stacked.tensors[0].shape))
            == stacked.tensors[0].n_matrices
            == 2
        )


def test_kinds_are_of_types_row_length_and_weights(model):
    imatrix = imatrix_of(model)
    del imatrix.entries["blk.0.attn_q.weight"]
    with open_gguf(model) as source:
        plan = plan_uniform(source.tensors, ggml_type("IQ4_K"), token_embedding_type="Q8_0")
        kinds = estimate.workloads_of(source, [plan], [imatrix.importance])
        found = [
            ([t.name.split(".")[-2] for t in kind.tensors], kind.weighted, kind.kept)
            for kind in kinds
        ]
    assert found == [
        (["token_embd"], False, False),
        (["attn_norm"], False, True),
        (["attn_q"], False, False),
        (["ffn_up_exps"], True, False),
        (["ffn_down"], True, False),
    ]
    assert kinds[3].piece == 32 * 256, "a piece is part of one matrix"


def test_times_of_kinds_add_up(model, monkeypatch):
    """The time of the run is known, as it advances a clock by the cost of each piece."""
    cost, now = {"Q8_0": 1e-6, "IQ4_K": 4e-6, "F32": 2e-6}, [0.0]

    def working(source, outputs, threads, devices):
        (planned,) = (output.planned for output in outputs)
        assert threads == 2
        now[0] += sum(plan.source.n_elements * cost[plan.target.type.name] for plan in planned)

    monkeypatch.setattr(estimate, "stream", working)
    monkeypatch.setattr(estimate, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    with open_gguf(model) as source:
        plan = plan_uniform(source.tensors, ggml_type("IQ4_K"), token_embedding_type="Q8_0")
        made = estimate.estimate_run(source, [plan], [None], threads=2, setup=3.0)
    expected = sum(p.source.n_elements * cost[p.target.type.name] for p in plan)
    assert made.working == pytest.approx(expected) and made.seconds == pytest.approx(
        3 + made.loading + made.working
    )
    assert sum(kind.n_elements for kind in made.workloads) == sum(p.source.n_elements for p in plan)


@pytest.mark.parametrize("devices", [0, 2])
def test_estimate_of_a_run(model, tmp_path, monkeypatch, devices):
    """The real pipeline is estimated, with importances and two outputs, also on devices made of
    numpy.
    """
    monkeypatch.setattr(run_piece, "DEVICE_PIECE_ELEMENTS", 4096)
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda number: FakeDevice(f"fake:{number}"))
    monkeypatch.setattr(
        "iqforge.quantize.cuda.devices.find_devices", lambda device: tuple(range(devices))
    )
    outputs = [(tmp_path / "a.gguf", "IQ4_K"), (tmp_path / "b.gguf", "Q4_0")]
    first, second = iqforge.quantize_models(
        model,
        outputs,
        imatrix_of(model),
        pure=True,
        dry_run=True,
        estimate=True,
        device="cuda",
        threads=2,
    )
    made = first.estimate
    assert made is second.estimate and not list(tmp_path.iterdir())
    assert made.setup > 0 and made.working > 0 and made.seconds >= made.setup + made.working
    assert 50 << 20 < made.peak_bytes < 4 << 30 and all(
        kind.tried > 0 and kind.spent > 0 for kind in made.workloads
    )
    assert any(kind.on_device for kind in made.workloads) == bool(devices)
    reports = iqforge.quantize_models(model, outputs, imatrix_of(model), pure=True)
    assert (
        made.disks[0].needed == sum(os.path.getsize(out) for out, _ in outputs)
        and len(made.disks) == 1
    )
    assert reports[0].estimate is None


def test_memory_grows_with_workers_and_pieces(model):
    with open_gguf(model) as source:
        kinds = estimate.workloads_of(
            source, [plan_uniform(source.tensors, ggml_type("IQ4_K"))], [None]
        )
    one, four = (estimate.memory_of_pieces(kinds, workers) for workers in (1, 4))
    largest = max(kind.piece for kind in kinds)
    assert largest == 64 * 512 and 12 * largest < one < four == pytest.approx(4 * one, rel=1e-3)
    bigger = [TensorInfo("x.weight", (1 << 14, 1 << 14), ggml_type("BF16"))]
    with_big = types.SimpleNamespace(tensors=tuple(bigger))
    big = estimate.workloads_of(with_big, [plan_uniform(bigger, ggml_type("IQ4_K"))], [None])
    assert 20 << 20 < estimate.memory_of_pieces(big, 2) < 60 << 20, (
        "bounded, however large the tensor"
    )
    assert estimate.memory_of_pieces(big, 2, readers=16) > estimate.memory_of_pieces(big, 2)


_RUN = """
import sys
from iqforge.cli import main
from iqforge.quantize.run.estimate import resident_bytes
code = main(sys.argv[1:])
print("peak of the process", resident_bytes("VmHWM") / 2**20)
sys.exit(code)
"""


def test_memory_is_the_peak_of_the_run(tmp_path):
    """The estimate is not below the peak of the process, nor far above it."""
    path = write(tmp_path / "model.gguf", [info("blk.0.ffn_up.weight", (8192, 4096))])
    iqforge.warm_up(["Q8_0"])  # compiling takes memory
    files = [str(path), str(tmp_path / "q.gguf"), "Q8_0", "2"]
    words = [sys.executable, "-c", _RUN, "quantize", "--device", "cpu"]

    def printed(flags: list[str], pattern: str) -> float:
        said = subprocess.run([*words, *flags, *files], capture_output=True, text=True, check=True)
        found = re.search(pattern, said.stdout)
        assert found is not None
        return float(found[1])

    estimated = printed(["--dry-run"], r"\npeak memory =\s+([\d.]+) MiB")
    peak = printed([], r"peak of the process ([\d.]+)")
    assert peak < 1.02 * estimated < 1.02 * (peak + 56)


def test_an_estimate_refuses_what_a_run_refuses(tmp_path):
    path = write(tmp_path / "bad.gguf", [info("blk.0.ffn_up.weight", (16, 256))], np.nan)
    with pytest.raises(NonFiniteError):
        iqforge.quantize_model(path, tmp_path / "q.gguf", "Q4_0", dry_run=True, estimate=True)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.gguf"]


def test_command_prints_the_estimate(model, tmp_path, capsys):
    words = ["--pure", "--dry-run", str(model), str(tmp_path / "q.gguf"), "Q4_0", "2"]
    assert main(["quantize", *words]) == 0
    said = capsys.readouterr().out
    for line in (
        "disk        = ",
        " are free",
        "peak memory = ",
        "time        = ",
        "preparing",
        "loading code",
        "nothing was written",
    ):
        assert line in said
    assert main(["quantize", "--no-estimate", *words]) == 0
    said = capsys.readouterr().out
    assert "peak memory" not in said and "quant size" in said and not list(tmp_path.iterdir())


def test_space_is_counted_per_disk(tmp_path, monkeypatch, capsys):
    (tmp_path / "b").mkdir()
    files = [(tmp_path / "a.gguf", 10), (tmp_path / "b" / "c.gguf", 20)]
    (need,) = disk.disk_needs(files)
    assert need.needed == 30 and need.free > 0 and need.fits
    monkeypatch.setattr(
        disk.shutil, "disk_usage", lambda folder: types.SimpleNamespace(total=100, free=25)
    )
    with pytest.raises(OutputError, match="need 30 bytes, 25 are free"):
        disk.check_disks(files)
    disk.check_disks(files[1:])
    with pytest.raises(OutputError, match="No such file"):
        disk.disk_needs([(tmp_path / "missing" / "a.gguf", 1)])


def test_outputs_that_do_not_fit_together_are_refused_before_the_first_byte(tmp_path, monkeypatch):
    source = iqforge.convert_model(
        make_tiny_llama(tmp_path / "hf", n_layers=1), tmp_path / "m.gguf"
    )
    size = iqforge.quantize_model(source, tmp_path / "a.gguf", "Q8_0", pure=True).target_bytes
    (tmp_path / "a.gguf").unlink()
    monkeypatch.setattr(
        disk.shutil,
        "disk_usage",
        lambda folder: types.SimpleNamespace(total=100 * size, free=int(1.5 * size)),
    )
    with pytest.raises(OutputError, match="are free"):
        iqforge.quantize_models(
            source, [(tmp_path / "a.gguf", "Q8_0"), (tmp_path / "b.gguf", "Q8_0")], pure=True
        )
    assert not list(tmp_path.glob("[ab].gguf*"))


def test_dry_run_says_that_the_disk_is_too_small(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        disk.shutil, "disk_usage", lambda folder: types.SimpleNamespace(total=100, free=25)
    )
    assert (
        main(["quantize", "--pure", "--dry-run", str(model), str(tmp_path / "q.gguf"), "Q4_0"]) == 0
    )
    assert "too few are free" in capsys.readouterr().out
