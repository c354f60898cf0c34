"""Quantizing: bytes, metadata, the command, and errors."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import (
    ImatrixError,
    NonFiniteError,
    NotFoundError,
    OutputError,
    UsageError,
)
from iqforge.formats.codecs.codec import encode_float
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import string
from iqforge.imatrix.data import Entry
from iqforge.quantize.encode import encode

from .imatrices import imatrix_of
from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def bf16(checkpoint, tmp_path_factory) -> Path:
    return iqforge.convert_model(
        checkpoint, tmp_path_factory.mktemp("gguf") / "tiny.gguf", outtype="bf16"
    )


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def info(name, shape, kind="F16"):
    return TensorInfo(name, shape, ggml_type(kind))


# ---- run


def test_bytes_are_those_of_encode(bf16, tmp_path):
    imatrix = imatrix_of(bf16)
    report = iqforge.quantize_model(
        bf16, tmp_path / "q.gguf", "IQ4_K", imatrix, pure=True, token_embedding_type="q8_0"
    )
    with open_gguf(bf16) as source, open_gguf(tmp_path / "q.gguf") as result:
        for before, after in zip(source.tensors, result.tensors):
            rows = source.read_rows(before, 0, before.n_rows)
            if after.type is before.type:
                expected = rows
            else:
                weights = imatrix.importance(before.name, before.shape)
                x = iqforge.decode(before.type, rows, before.n_cols)
                expected = encode(after.type, x, None if weights is None else weights[0])
            assert np.array_equal(expected, result.read_rows(after, 0, after.n_rows)), after.name
        kinds = {t.name: t.type.name for t in result.tensors}
        assert (
            kinds["token_embd.weight"] == "Q8_0"
            and kinds["output.weight"] == "IQ4_K"
            and kinds["output_norm.weight"] == "F32"
        )
        meta = result.metadata
    assert meta["general.file_type"].data == 140 and meta["general.quantization_version"].data == 2
    assert (
        meta["quantize.imatrix.file"].data == "some.dat"
        and meta["quantize.imatrix.dataset"].data == "text.txt"
    )
    assert (
        meta["quantize.imatrix.entries_count"].data == len(imatrix.entries)
        and meta["quantize.imatrix.chunks_count"].data == 7
    )
    by_name = {t.planned.source.name: t for t in report.tensors}
    assert (
        0.03 < by_name["blk.0.ffn_up.weight"].weighted_rmse < 0.08
        and by_name["blk.0.ffn_up.weight"].weighted
    )
    assert by_name["output_norm.weight"].rmse is None and not by_name["token_embd.weight"].weighted
    assert report.target_bytes == sum(t.planned.target.n_bytes for t in report.tensors)


def test_every_expert_uses_its_own_importance(tmp_path):
    model = iqforge.convert_model(
        make_tiny_qwen3moe(tmp_path / "hf", n_experts=4), tmp_path / "m.gguf", outtype="f32"
    )
    imatrix = imatrix_of(model)
    iqforge.quantize_model(model, tmp_path / "q.gguf", "IQ3_K", imatrix, pure=True)
    with open_gguf(model) as source, open_gguf(tmp_path / "q.gguf") as result:
        t = result.tensor("blk.1.ffn_down_exps.weight")
        per = t.n_rows // t.n_matrices
        weights = imatrix.importance(t.name, t.shape)
        for e in range(t.n_matrices):
            x = source.read_rows(source.tensor(t.name), e * per, (e + 1) * per).view(np.float32)
            assert np.array_equal(
                encode("IQ3_K", x, weights[e]), result.read_rows(t, e * per, (e + 1) * per)
            )


@pytest.mark.parametrize("kind", ["IQ4_KS", "IQ4_K_R4", "Q4_K"])
def test_threads_do_not_change_a_byte(bf16, tmp_path, kind):
    digests = set()
    for threads in (1, 2, 5, 1):
        iqforge.quantize_model(
            bf16, tmp_path / "q.gguf", kind, imatrix_of(bf16), pure=True, threads=threads
        )
        digests.add(digest(tmp_path / "q.gguf"))
    assert len(digests) == 1


def test_checkpoint_and_shards_give_the_same_file(checkpoint, bf16, tmp_path):
    iqforge.quantize_model(bf16, tmp_path / "a.gguf", "IQ3_K", pure=True)
    iqforge.quantize_model(checkpoint, tmp_path / "b.gguf", "IQ3_K", pure=True)
    shards = iqforge.split_model(bf16, tmp_path / "split", max_tensors=5)
    iqforge.quantize_model(shards[0], tmp_path / "c.gguf", "IQ3_K", pure=True)
    assert digest(tmp_path / "a.gguf") == digest(tmp_path / "b.gguf") == digest(tmp_path / "c.gguf")


def test_dry_run_writes_nothing(bf16, tmp_path, capsys):
    out = tmp_path / "q.gguf"
    assert main(["quantize", "--pure", "--dry-run", "--verbose", str(bf16), str(out), "IQ4_K"]) == 0
    printed = capsys.readouterr().out
    assert not list(tmp_path.iterdir()) and "converting to iq4_k" in printed and "BPW" in printed
    size = float(printed.split("quant size  =")[1].split("MiB")[0])
    iqforge.quantize_model(bf16, out, "IQ4_K", pure=True)
    with open_gguf(out) as result:
        assert abs(sum(t.n_bytes for t in result.tensors) / 2**20 - size) < 0.01


def test_command_prints_a_line_per_tensor(bf16, tmp_path, capsys):
    assert (
        main(
            [
                "quantize",
                "--verbose",
                "--pure",
                "--token-embedding-type",
                "q8_0",
                str(bf16),
                str(tmp_path / "q.gguf"),
                "iq4_nl",
                "2",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    with open_gguf(bf16) as source:
        count = len(source.tensors)
    assert sum(line.startswith("[") for line in out.splitlines()) == count
    assert (
        f"[   1/{count:4d}]" in out
        and "converting to iq4_nl" in out
        and "rel. rmse = 0.0" in out
        and "quantize time" in out
    )


def test_default_output_name(bf16, tmp_path):
    copy = tmp_path / "model.gguf"
    copy.write_bytes(bf16.read_bytes())
    assert main(["quantize", "--pure", str(copy), "q8_0"]) == 0
    assert (tmp_path / "ggml-model-Q8_0.gguf").exists()


# ---- what goes wrong


def failing(*argv: str, capsys) -> str:
    assert main(["quantize", *argv]) == 1
    error = capsys.readouterr().err
    assert "error: " in error and "Traceback" not in error
    return error


def test_wrong_words(bf16, tmp_path, capsys):
    out = str(tmp_path / "q.gguf")
    assert "did you mean" in failing("--pure", str(bf16), out, "IQ4K", capsys=capsys)
    assert "NTHREADS" in failing("--pure", str(bf16), out, "IQ4_K", "many", capsys=capsys)
    assert "expected IN" in failing("--pure", str(bf16), capsys=capsys)
    assert "no such file" in failing(
        "--pure", str(tmp_path / "none.gguf"), out, "IQ4_K", capsys=capsys
    )
    assert "unknown ggml type" in failing(
        "--pure", "--output-tensor-type", "q9", str(bf16), out, "IQ4_K", capsys=capsys
    )
    assert "none.dat" in failing(
        "--pure", "--imatrix", str(tmp_path / "none.dat"), str(bf16), out, "IQ4_K", capsys=capsys
    )
    assert not list(tmp_path.iterdir())


def test_output_is_input(bf16, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(bf16)
    before = digest(bf16)
    for out in (bf16, link):
        with pytest.raises(OutputError, match="same file"):
            iqforge.quantize_model(bf16, out, "Q8_0", pure=True)
    assert digest(bf16) == before


def test_errors_leave_nothing(bf16, tmp_path):
    out = tmp_path / "q.gguf"
    with pytest.raises(NotFoundError):
        iqforge.quantize_model(tmp_path / "nothing", out, "Q8_0", pure=True)
    wrong = imatrix_of(bf16)
    wrong.entries["blk.1.ffn_up.weight"] = Entry(np.ones((1, 128)), np.ones(1, dtype=np.int64))
    with pytest.raises(ImatrixError, match="blk.1.ffn_up.weight"):
        iqforge.quantize_model(bf16, out, "IQ4_K", wrong, pure=True)
    assert not list(tmp_path.iterdir())


def test_nan_in_the_source_is_named(tmp_path):
    x = np.zeros((40, 256), dtype=np.float32)
    x[33, 7] = np.inf
    tensor = info("blk.0.ffn_up.weight", x.shape, "F32")
    with GGUFWriter(
        tmp_path / "bad.gguf", {"general.architecture": string("llama")}, [tensor]
    ) as sink:
        sink.write(tensor, encode_float("F32", x))
    with pytest.raises(
        NonFiniteError, match=r"bad.gguf, tensor 'blk.0.ffn_up.weight': inf at row 33, column 7"
    ):
        iqforge.quantize_model(tmp_path / "bad.gguf", tmp_path / "q.gguf", "IQ4_K", pure=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.gguf"]


@pytest.mark.parametrize("kind", ["F32", "BF16"])
@pytest.mark.parametrize("target", ["IQ4_K", "IQ4_KS", "F16"])
def test_nan_to_zero(tmp_path, capsys, kind, target):
    x = np.random.default_rng(3).standard_normal((40, 256)).astype(np.float32)
    x = iqforge.decode(kind, encode_float(kind, x), 256)
    clean, bad = x.copy(), [(0, 0, np.nan), (33, 7, np.inf), (33, 255, -np.inf)]
    for row, column, value in bad:
        x[row, column], clean[row, column] = value, 0
    tensors = [
        info("blk.0.ffn_up.weight", x.shape, kind),
        info("blk.0.ffn_down.weight", x.shape, kind),
        info("blk.0.attn_norm.weight", (256,), "F32"),
    ]
    with GGUFWriter(
        tmp_path / "bad.gguf", {"general.architecture": string("llama")}, tensors
    ) as sink:
        for tensor, values in zip(tensors, (x, clean, x[33:34])):
            sink.write(tensor, encode_float(tensor.type, values))
    command = ["quantize", "--pure", str(tmp_path / "bad.gguf"), str(tmp_path / "q.gguf"), target]
    if target != "F16":
        assert (
            main(command) == 1
            and "row 0, column 0" in capsys.readouterr().err
            and not (tmp_path / "q.gguf").exists()
        )
    assert main([*command, "--nan-to-zero", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert (
        out.count("set to 0") == 2
        and "3 non-finite set to 0" in out
        and "warning: 3 NaN or infinite value(s) in 1 tensor(s)" in out
    )
    report = iqforge.quantize_model(
        tmp_path / "bad.gguf", tmp_path / "q.gguf", target, pure=True, nan_to_zero=True
    )
    assert [t.zeroed for t in report.tensors] == [3, 0, 0] and np.isfinite(report.tensors[0].rmse)
    with open_gguf(tmp_path / "q.gguf") as result:
        up, down, norm = (np.array(result.read_rows(t, 0, t.n_rows)) for t in result.tensors)
        # What keeps its type keeps its bytes.
        assert np.array_equal(up, down) and np.isinf(norm.view(np.float32)).sum() == 2


def test_values_that_do_not_fit_are_named(tmp_path):
    x = np.full((4, 256), 1e6, dtype=np.float32)
    tensor = info("blk.0.ffn_up.weight", x.shape, "F32")
    with GGUFWriter(
        tmp_path / "big.gguf", {"general.architecture": string("llama")}, [tensor]
    ) as sink:
        sink.write(tensor, encode_float("F32", x))
    with pytest.raises(NonFiniteError, match="values up to 1e[+]06 do not fit into F16"):
        iqforge.quantize_model(tmp_path / "big.gguf", tmp_path / "q.gguf", "F16", pure=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.gguf"]


def test_bytes_after_the_rows_are_kept(tmp_path):
    tensors = [
        info("blk.0.ffn_up.weight", (256, 128), "I2_S"),
        info("blk.0.ffn_down.weight", (128, 256), "F32"),
    ]
    data = np.random.default_rng(2).integers(0, 256, tensors[0].n_bytes, dtype=np.uint8)
    with GGUFWriter(
        tmp_path / "a.gguf", {"general.architecture": string("llama")}, tensors
    ) as sink:
        sink.write(tensors[0], data)
        sink.write(tensors[1], np.zeros(tensors[1].n_bytes, dtype=np.uint8))
    with pytest.raises(UsageError, match="a.gguf, tensor .*allow-requantize"):
        iqforge.quantize_model(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q8_0", pure=True)
    tensors[0] = info("blk.0.attn_norm.weight", (256, 128), "I2_S")
    with GGUFWriter(
        tmp_path / "a.gguf", {"general.architecture": string("llama")}, tensors
    ) as sink:
        sink.write(tensors[0], data)
        sink.write(tensors[1], np.zeros(tensors[1].n_bytes, dtype=np.uint8))
    iqforge.quantize_model(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q8_0", pure=True)
    with open_gguf(tmp_path / "b.gguf") as result:
        kept = result.tensor("blk.0.attn_norm.weight")
        assert np.array_equal(result.read_bytes(kept, 0, kept.n_bytes), data)


def big_model(folder: Path) -> Path:
    """Write 64 MB of bf16 in one tensor, which takes long enough to be interrupted."""
    tensor = info("blk.0.ffn_up.weight", (8192, 4096), "BF16")
    path = folder / "big.gguf"
    tile = encode_float(
        "BF16", np.random.default_rng(0).standard_normal((512, 4096)).astype(np.float32)
    )
    with GGUFWriter(path, {"general.architecture": string("llama")}, [tensor]) as sink:
        for _ in range(16):
            sink.write(tensor, tile)
    return path


def test_file_size_limit_is_an_error_with_nothing_left(tmp_path):
    model, out = big_model(tmp_path), tmp_path / "q.gguf"
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        " resource.setrlimit(resource.RLIMIT_FSIZE, (10**7, 10**7));from iqforge.cli import main;"
        " sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "quantize", "--pure", str(model), str(out), "Q8_0"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "q.gguf" in done.stderr and "Traceback" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.gguf"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_run_leaves_no_finished_file(tmp_path, number):
    model, out = big_model(tmp_path), tmp_path / "q.gguf"
    encode("IQ4_KS", np.ones((1, 256), dtype=np.float32))  # compiled before the clock runs
    process = subprocess.Popen(
        [sys.executable, "-m", "iqforge", "quantize", "--pure", str(model), str(out), "IQ4_KS"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    part = Path(f"{out}.part")
    deadline = time.monotonic() + 300
    while not (part.exists() and part.stat().st_size > 2 << 20):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    _, error = process.communicate(timeout=300)
    assert not out.exists()
    if number == signal.SIGINT:
        assert process.returncode == 130 and "interrupted" in error and "Traceback" not in error
        assert not part.exists()
        return
    iqforge.quantize_model(
        model, out, "Q8_0", pure=True
    )  # a part file of a killed run is no obstacle
    assert out.exists() and not part.exists()


def test_memory_stays_far_below_the_tensor(tmp_path):
    """A 400 MB tensor (800 MB as float32) is quantized in less than 300 MB, so
    without torch too. On four cores at most: every thread takes 16 MB.
    """
    cores = sorted(os.sched_getaffinity(0))[:4]
    script = Path(__file__).parents[1] / "benchmarks/memory.py"
    done = subprocess.run(
        [
            sys.executable,
            str(script),
            "--gigabytes",
            "0.45",
            "--largest",
            "0.4",
            "--type",
            "Q8_0",
            "--dir",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ""},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("peak resident ")[1].split(" MB")[0]) < 300
