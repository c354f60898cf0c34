"""Compact base files and comparisons of two models: what is claimed to be exact is, and the
divergence is within its bounds.
"""

from __future__ import annotations

import re
import struct

import iqforge
import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.errors import EvaluationError, MalformedFileError, TruncatedFileError, UsageError
from iqforge.runtime.evaluate.base_file import record_length
from iqforge.runtime.evaluate.chunks import Chunks
from iqforge.runtime.evaluate.compact_base import (
    CODE_ERROR,
    CompactBase,
    CompactWriter,
    encode_compact,
    entries,
    open_base,
    record_type,
)
from iqforge.runtime.evaluate.divergence import log_softmax
from iqforge.runtime.evaluate.scores import compare_all

from .shared import shared

TINY = "golden/tools/gguf/tiny-llama-untied-f16.gguf"
SMALL = "golden/tools/gguf/tiny-llama-untied.Q4_K_M.imatrix.gguf"
TEXT = "golden/tools/eval/text.txt"


def pair(n_vocab, n_ctx=1024, seed=0):
    """Return chunks of random tokens, and logits of a base and of a model that is a little off."""
    random = torch.Generator().manual_seed(seed)
    tokens = np.random.default_rng(seed).integers(0, n_vocab, (1, n_ctx))
    chunks = Chunks(tokens, None)
    base = torch.randn(chunks.n_scored, n_vocab, generator=random) * 2.5
    return chunks, base, base + 0.2 * torch.randn(base.shape, generator=random)


def exact(base, logits, targets):
    return compare_all(logits, log_softmax(base), base.argmax(1).numpy(), targets)


@pytest.mark.parametrize("n_vocab", [1000, 4096, 70_000])
def test_a_record_is_a_tenth(n_vocab):
    size = record_type(*entries(n_vocab)).itemsize
    assert size <= 2 * record_length(n_vocab) / 10
    assert size > 2 * record_length(n_vocab) / 10 - 16


@pytest.mark.parametrize("n_vocab", [40, 1000, 4096])
def test_what_is_claimed_to_be_exact_is_and_the_rest_is_bounded(n_vocab, tmp_path):
    chunks, base, logits = pair(n_vocab)
    with CompactWriter(tmp_path / "base", chunks, n_vocab) as writer:
        writer.write(base)
    opened = open_base(tmp_path / "base")
    assert isinstance(opened, CompactBase)
    assert np.array_equal(opened.tokens, chunks.tokens)
    targets = chunks.targets(0)
    found, true = opened.compare(0, logits, targets), exact(base, logits, targets)
    for name in ("nll", "nll_base", "same_top"):
        assert np.array_equal(getattr(found, name), getattr(true, name)), name
    # Every token is at least its bound; the mean is within a few standard errors.
    slack = 3 * CODE_ERROR
    assert (found.least <= true.kld + slack).all()
    error = float(np.sqrt(found.variance.sum())) / len(targets)
    assert 0 < error < 0.2 * true.kld.mean() or n_vocab == 40
    assert abs(found.kld.mean() - true.kld.mean()) <= 4 * error + slack
    assert abs(found.kld - true.kld).max() < 20 * np.sqrt(found.variance.max()) + slack


def test_estimates_have_no_bias():
    """Over many draws the mean is that of the exact divergence, closer than one draw is."""
    n_vocab, found, true = 1000, [], []
    _, base, logits = pair(n_vocab, n_ctx=16)
    targets = np.zeros(len(base), dtype=np.int64)
    log_p, log_q = log_softmax(base).double(), log_softmax(logits).double()
    ratio = (log_p - log_q).numpy()
    for first in range(0, 40_000, 100):
        records = encode_compact(base, targets, first)
        drawn = np.take_along_axis(ratio, records["sample"].astype(np.int64), 1)
        found.append(records["remainder"] * drawn.mean(axis=1))
    rest = log_p.exp().numpy() * ratio
    rest[log_p.numpy() <= -16] = 0
    np.put_along_axis(rest, records["top"].astype(np.int64), 0, axis=1)
    true = rest.sum(axis=1)
    spread = np.std(found, axis=0)
    assert (abs(np.mean(found, axis=0) - true) < 0.3 * spread).all()


def test_a_confident_base_and_equal_logits():
    logits = torch.zeros(2, 300)
    logits[0, 7] = 60.0  # nothing remains
    records = encode_compact(logits, np.array([7, 7]))
    assert records["top"][:, 0].tolist() == [7, 0] and records["remainder"][0] == 0
    assert records["target"][0] == 0
    assert records["remainder"][1] == pytest.approx(1 - entries(300)[0] / 300)


def test_against_a_model_is_against_its_base_file(tmp_path, capsys):
    files = {name: str(tmp_path / name) for name in ("full", "compact")}
    settings = {"n_ctx": 256, "chunks": 2}
    for name, path in files.items():
        iqforge.measure_perplexity(
            shared(TINY),
            shared(TEXT),
            kl_divergence_base=path,
            kl_divergence_compact=name == "compact",
            **settings,
        )
    live = iqforge.measure_perplexity(shared(SMALL), shared(TEXT), against=shared(TINY), **settings)
    full, compact = (
        iqforge.measure_perplexity(shared(SMALL), None, kl_divergence_base=path, kl_divergence=True)
        for path in files.values()
    )
    assert full.mean_kld == pytest.approx(live.mean_kld, rel=1e-2)
    a, b = compact.statistics, live.statistics
    assert (a.ppl, a.ppl_base, a.same_top, a.rms_delta_p) == (
        b.ppl,
        b.ppl_base,
        b.same_top,
        b.rms_delta_p,
    )
    assert a.correlation == b.correlation and a.delta_p_quantiles(0.1) == b.delta_p_quantiles(0.1)
    least, error = a.kld_bounds
    assert least <= b.mean_kld[0] and abs(a.mean_kld[0] - b.mean_kld[0]) < 4 * error
    assert b.kld_bounds is None
    words = ["perplexity", "-m", str(shared(SMALL)), "--device", "cpu"]
    base = ["--kl-divergence-base", files["compact"], "--kl-divergence"]
    (tmp_path / "other.txt").write_text("another text")
    texts = ["-f", str(shared(TEXT)), "-f", str(tmp_path / "other.txt")]
    assert main([*words, *base, *texts]) == 0
    out, err = capsys.readouterr()
    assert re.findall("note: -f (.*) changes nothing here: .*compact holds another text", err) == [
        texts[-1]
    ]
    assert re.search(r"Compact base: the mean is an estimate ± 0\.\d+, and at least 0\.\d+", out)
    against = ["--kl-divergence-against", str(shared(TINY)), "-c", "256", "--chunks", "2"]
    assert main([*words, *against, "-f", str(shared(TEXT))]) == 0
    out = capsys.readouterr().out
    assert f"Mean    KLD: {live.mean_kld:10.6f}" in out and "Compact" not in out
    assert main([*words, *against, "-f", str(shared(TEXT)), "-f", str(shared(TEXT))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and f"KLD = {live.mean_kld:.6f}" in lines[0] == lines[1]


def test_the_reference_table_is_reproduced_without_a_base_file(capsys):
    expected = shared("golden/tools/eval/kld_output.txt").read_text()
    live = iqforge.measure_perplexity(
        shared(SMALL), shared(TEXT), against=shared(TINY), n_ctx=256, chunks=2
    )
    [mean] = re.findall(r"Mean    KLD:\s+([\d.]+)", expected)
    assert live.mean_kld == pytest.approx(float(mean), rel=2e-2)


def test_models_of_other_tokens_are_refused(tmp_path):
    other = iqforge.convert_model(shared("models/demo-llama"), tmp_path / "demo.gguf", "bf16")
    with pytest.raises(EvaluationError, match="other tokens"):
        iqforge.measure_perplexity(other, shared(TEXT), against=shared(TINY), n_ctx=64, chunks=2)


def test_damaged_files_are_named_errors(tmp_path):
    chunks, base, logits = pair(300, n_ctx=16)
    path = tmp_path / "base"
    with CompactWriter(path, chunks, 300) as writer:
        writer.write(base)
    data = path.read_bytes()
    for length in (8, 31, 60, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(TruncatedFileError):
            open_base(path)
    for offset, value in ((8, 2), (12, 3), (16, 0), (20, 0), (24, 301), (32, 300), (36, -1)):
        path.write_bytes(data[:offset] + struct.pack("<i", value) + data[offset + 4 :])
        with pytest.raises((MalformedFileError, TruncatedFileError)):
            open_base(path)
    start = 32 + 4 * 16
    for offset, value in (
        (0, struct.pack("<f", np.nan)),
        (4, struct.pack("<f", -1)),
        (8, b"\xff" * 2),
    ):
        path.write_bytes(data[: start + offset] + value + data[start + offset + len(value) :])
        with pytest.raises(MalformedFileError, match="record 0"):
            open_base(path).compare(0, logits, chunks.targets(0))


def test_keywords_that_exclude_each_other_are_refused():
    for keywords in (
        {"against": shared(TINY), "ppl_stride": 4},
        {"against": shared(TINY), "kl_divergence_base": "x"},
        {"kl_divergence_compact": True},
    ):
        with pytest.raises(UsageError):
            iqforge.measure_perplexity(shared(TINY), shared(TEXT), **keywords)


@pytest.mark.gpu
def test_comparisons_on_a_gpu_are_those_of_the_cpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    chunks, base, logits = pair(4096, n_ctx=256)
    targets = chunks.targets(0)
    on_cpu = encode_compact(base, targets)
    on_gpu = encode_compact(base.cuda(), targets)
    assert np.array_equal(on_cpu["top"][:, 0], on_gpu["top"][:, 0])
    assert np.abs(on_cpu["target"] - on_gpu["target"]).max() < 1e-5
    assert np.abs(on_cpu["remainder"] - on_gpu["remainder"]).max() < 1e-6
    with CompactWriter(tmp_path / "base", chunks, 4096) as writer:
        writer.write(base)
    opened, true = open_base(tmp_path / "base"), exact(base, logits, targets)
    one, other = (opened.compare(0, z, targets) for z in (logits, logits.cuda()))
    live = compare_all(logits.cuda(), log_softmax(base.cuda()), base.argmax(1).numpy(), targets)
    for name in ("nll", "nll_base", "kld"):
        assert np.abs(getattr(one, name) - getattr(other, name)).max() < 1e-4, name
        assert np.abs(getattr(true, name) - getattr(live, name)).max() < 1e-4, name
    assert np.array_equal(one.same_top, other.same_top)
    assert np.array_equal(true.same_top, live.same_top)
