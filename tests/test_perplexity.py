"""Perplexity, base files and divergences: against the reference's files and tables, and against the
formulas written out.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
import struct

import iqforge
import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import (
    EvaluationError,
    IqforgeError,
    MalformedFileError,
    NonFiniteError,
    NotFoundError,
    TruncatedFileError,
    UsageError,
)
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.types import TYPES
from iqforge.formats.values import boolean
from iqforge.runtime.evaluate import report
from iqforge.runtime.evaluate.base_file import BaseFile, encode_records
from iqforge.runtime.evaluate.chunks import Chunks, read_text
from iqforge.runtime.evaluate.divergence import Divergence, measure_divergence
from iqforge.runtime.evaluate.perplexity import measure_perplexity
from iqforge.runtime.model import load_model
from iqforge.runtime.state.cache import CacheSettings

from .reference_arithmetic import use_reference_attention, use_reference_products
from .shared import shared
from .tiny_checkpoint import PROSE, make_tiny_llama
from .tiny_model import write_gguf
from .torch_threads import torch_threads

N_CTX = 32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Write an F32 model, its Q8_0 form and a text file."""
    folder = tmp_path_factory.mktemp("perplexity")
    with CheckpointSource(open_checkpoint(make_tiny_llama(folder / "hf", dtype="f32"))) as source:
        write_gguf(folder / "f32.gguf", source)
        write_gguf(folder / "q8.gguf", source, lambda t: "Q8_0" if len(t.shape) > 1 else "F32")
    (folder / "text.txt").write_text(PROSE * 2)
    return folder


@pytest.fixture
def one_thread():
    """Use one thread: thousands of small operations wait longer for a second than it helps."""
    with torch_threads(1):
        yield


def test_chunks_cut_and_score_as_the_reference_does():
    chunks = Chunks.cut(list(range(100, 137)), 16, -1, bos=7)
    assert len(chunks) == 2 and chunks.first == 8 and chunks.n_scored == 7
    assert chunks.inputs(0, 2).tolist() == [[7, *range(101, 116)], [7, *range(117, 132)]]
    assert chunks.targets(1).tolist() == list(range(125, 132))
    assert (
        len(Chunks.cut(range(100), 16, 3, None)) == 3
        and Chunks.cut(range(100), 15, 0, None).n_scored == 7
    )
    assert Chunks.cut(range(100), 16, -1, None).inputs(0, 1)[0, 0] == 0


def test_perplexity_is_the_formula(tiny):
    with load_model(tiny / "f32.gguf") as model:
        text = read_text(tiny / "text.txt")
        result = measure_perplexity(model, text, n_ctx=N_CTX, chunks=3)
        tokens = model.tokenizer.encode(text)
        nll = []
        for start in range(0, 3 * N_CTX, N_CTX):
            inputs = [model.special_tokens.bos, *tokens[start + 1 : start + N_CTX]]
            log_q = model.forward(inputs).double().log_softmax(-1)
            nll += [-log_q[t, tokens[start + t + 1]].item() for t in range(N_CTX // 2, N_CTX - 1)]
    assert result.n_scored == len(nll) == 3 * (N_CTX - 1 - N_CTX // 2)
    assert result.perplexity == pytest.approx(math.exp(np.mean(nll)), rel=1e-5)
    assert result.uncertainty == pytest.approx(
        math.exp(np.mean(nll)) * np.std(nll) / math.sqrt(len(nll) - 1), rel=1e-4
    )
    assert [score.start for score in result.running] == [0, N_CTX, 2 * N_CTX]


def test_perplexity_repeats_and_does_not_depend_on_the_batch(tiny):
    with load_model(tiny / "f32.gguf") as model:
        text, steps = read_text(tiny / "text.txt"), []
        one = measure_perplexity(model, text, n_ctx=N_CTX, progress=steps.append)
        assert one.perplexity == measure_perplexity(model, text, n_ctx=N_CTX).perplexity
        assert one.perplexity == pytest.approx(
            measure_perplexity(model, text, n_ctx=N_CTX, batch_tokens=1).perplexity, rel=1e-6
        )
    assert [p.chunk for p in steps] == list(range(1, one.n_chunks + 1)) and steps[
        -1
    ].perplexity == one.perplexity
    assert steps[-1].seconds_left == 0 and steps[-1].tokens_per_second > 0


@pytest.mark.parametrize("n_vocab", [300, 301])
def test_records_hold_log_probabilities(n_vocab):
    logits = torch.randn(5, n_vocab, generator=torch.Generator().manual_seed(0)) * 8
    logits[1] = 3.0  # all alike: no range to divide
    logits[2, 7] = 200.0  # everything else is clipped
    records = encode_records(logits)
    assert (
        records.shape == (5, 2 * math.ceil(n_vocab / 2) + 4)
        and (records[:, 4 + n_vocab :] == 0).all()
    )
    scale, low = (np.ascontiguousarray(records[:, :4]).view("<f4")[:, i, None] for i in (0, 1))
    decoded = scale * records[:, 4 : 4 + n_vocab] + low
    exact = logits.double().log_softmax(-1).numpy()
    expected = np.maximum(exact, exact.max(1, keepdims=True) - 24)
    assert np.abs(decoded - expected).max() <= 24 / 65535 / 2 * 1.02
    assert (records[1, 4:] == 0).all() and decoded[1, 0] == pytest.approx(
        -math.log(n_vocab), abs=1e-6
    )


def test_divergence_from_itself_is_nothing_and_from_another_something(tiny, tmp_path):
    base = tmp_path / "base.kld"
    with load_model(tiny / "f32.gguf") as model:
        saved = measure_perplexity(
            model, read_text(tiny / "text.txt"), n_ctx=N_CTX, save_logits=base
        )
        itself = measure_divergence(model, base)
    with load_model(tiny / "q8.gguf") as model:
        rows = []
        other = measure_divergence(
            model, base, on_chunk=lambda chunk, s: rows.append(report.table_row(chunk, s))
        )
        exact = _divergence_by_hand(model, base)
    assert itself.perplexity == pytest.approx(saved.perplexity, rel=1e-9)
    assert itself.statistics.ppl_base[0] == pytest.approx(saved.perplexity, rel=1e-4)
    assert (
        abs(itself.mean_kld) < 1e-6
        and itself.statistics.same_top[0] > 0.98
        and itself.statistics.correlation > 0.9999
    )
    assert len(rows) == saved.n_chunks and other.mean_kld > 10 * abs(itself.mean_kld)
    np.testing.assert_allclose(
        np.concatenate(other.statistics.kld_values), exact, rtol=2e-3, atol=1e-6
    )
    assert other.statistics.kld_quantiles(0, 0.5, 1) == pytest.approx(
        [exact.min(), np.median(exact), exact.max()], rel=2e-3, abs=1e-6
    )


def _divergence_by_hand(model, path) -> np.ndarray:
    base, values = BaseFile(path), []
    for chunk in range(base.n_chunks):
        tokens = base.tokens[chunk].copy()
        tokens[0] = model.special_tokens.bos
        log_q = model.forward(tokens).double().log_softmax(-1).numpy()[base.n_ctx // 2 : -1]
        log_p = base.log_probabilities(chunk).astype(np.float64)
        values.append(np.where(log_p > -16, np.exp(log_p) * (log_p - log_q), 0).sum(1))
    return np.concatenate(values)


def test_a_base_file_of_the_reference(tmp_path):
    """tiny-llama-untied-f16 has a vocabulary of another kind, but the base file contains its
    tokens.
    """
    path = shared("golden/tools/eval/base.c256x2.kld")
    base = BaseFile(path)
    assert (base.n_ctx, base.n_vocab, base.n_chunks) == (256, 288, 2)
    with load_model(shared("golden/tools/gguf/tiny-llama-untied-f16.gguf")) as model:
        result = measure_perplexity(
            model, base.tokens.reshape(-1).tolist(), n_ctx=256, save_logits=tmp_path / "ours.kld"
        )
    assert result.perplexity == pytest.approx(
        397.6303, rel=1e-3
    ) and result.uncertainty == pytest.approx(23.01388, rel=1e-3)
    assert result.running[0].perplexity == pytest.approx(440.9252, rel=1e-3)
    assert result.running[0].nll_error == pytest.approx(0.077780, rel=1e-3)
    ours = BaseFile(tmp_path / "ours.kld")
    header = 20 + 4 * 512
    assert (tmp_path / "ours.kld").read_bytes()[:header] == path.read_bytes()[:header]
    assert (tmp_path / "ours.kld").stat().st_size == path.stat().st_size
    for chunk in range(2):
        # It adds up values in float16.
        assert np.abs(ours.log_probabilities(chunk) - base.log_probabilities(chunk)).max() < 0.02


def test_a_base_file_of_the_reference_with_its_attention(monkeypatch, one_thread, tmp_path):
    use_reference_attention(monkeypatch)
    base = BaseFile(shared("golden/tools/eval/base.c256x2.kld"))
    tokens = base.tokens.reshape(-1).tolist()
    with load_model(shared("golden/tools/gguf/tiny-llama-untied-f16.gguf")) as model:
        result = measure_perplexity(model, tokens, n_ctx=256, save_logits=tmp_path / "ours.kld")
    assert result.perplexity == pytest.approx(397.6303, rel=3e-5)
    ours = BaseFile(tmp_path / "ours.kld")
    for chunk in range(2):
        # A step of its codes is 9e-5.
        assert np.abs(ours.log_probabilities(chunk) - base.log_probabilities(chunk)).max() < 2e-3


def divergence_tables(path) -> tuple[Divergence, list[str], list[str]]:
    """Return the divergence of a model, its table as it is printed, and that of the reference."""
    lines = [report.TABLE_HEADER]
    with load_model(path) as model:
        result = measure_divergence(
            model,
            shared("golden/tools/eval/base.c256x2.kld"),
            on_chunk=lambda chunk, s: lines.append(report.table_row(chunk, s)),
        )
    lines += ["", *report.summary(result.statistics)]
    expected = shared("golden/tools/eval/kld_output.txt").read_text()
    return result, lines, expected.strip("\n").splitlines()


def test_a_divergence_table_of_the_reference(tmp_path):
    """Lines and columns are the same, and numbers are as close as a reference that rounds
    activations to 8 bits allows.
    """
    from gguf import GGMLQuantizationType, quants

    with open_gguf(shared("golden/tools/gguf/tiny-llama-untied.Q4_K_M.imatrix.gguf")) as source:
        targets = [t.with_type(TYPES["F32"]) for t in source.tensors]
        with GGUFWriter(tmp_path / "f32.gguf", source.metadata, targets) as writer:
            for t, target in zip(source.tensors, targets):
                rows = source.read_rows(t, 0, t.n_rows)
                writer.write(
                    target,
                    quants.dequantize(rows, GGMLQuantizationType(t.type.id)).astype(np.float32),
                )
    result, lines, expected = divergence_tables(tmp_path / "f32.gguf")

    def shape(line: str) -> str:
        return re.sub(r"[-\d]", " ", line) if re.search(r"[:±]", line) else line

    assert [shape(line) for line in lines] == [shape(line) for line in expected]
    s = result.statistics
    # From the base file alone.
    assert s.ppl_base == pytest.approx((397.630761, 23.013926), abs=2e-6)
    assert s.ppl[0] == pytest.approx(388.786680, rel=3e-3) and s.mean_kld[0] == pytest.approx(
        0.002860, rel=0.03
    )
    assert s.same_top == pytest.approx(
        (0.85039, 0.02242), abs=1e-5
    ) and s.correlation == pytest.approx(0.9952, abs=2e-4)
    assert s.rms_delta_p[0] == pytest.approx(0.00038, rel=0.05) and s.kld_quantiles(0.5)[
        0
    ] == pytest.approx(0.002722, rel=0.03)


def test_a_divergence_table_of_the_reference_with_its_arithmetic(monkeypatch, one_thread):
    """Every number as printed; of perplexities, which we compute in float64, seven digits."""
    path = shared("golden/tools/gguf/tiny-llama-untied.Q4_K_M.imatrix.gguf")
    use_reference_attention(monkeypatch)
    use_reference_products(monkeypatch, path)
    _, lines, expected = divergence_tables(path)
    for line, wanted in zip(lines, expected, strict=True):
        if not wanted.startswith("Mean PPL"):
            assert line == wanted
            continue
        (name, *ours), (expected_name, *theirs) = (re.split("[:±]", x) for x in (line, wanted))
        assert name == expected_name
        assert [float(x) for x in ours] == pytest.approx([float(x) for x in theirs], rel=1e-6)


def test_a_divergence_with_the_roundings_of_the_reference():
    """With activations in 8 bits and caches in f16, as the reference has them: closer than in
    float32. Each way of rounding to 8 bits gives another divergence of so small a model.
    """
    tiles = pytest.importorskip("iqforge.runtime.simd.tiles")
    if not tiles.available():
        pytest.skip("this processor does not multiply many rows in 8 bits")
    f16 = CacheSettings("f16", "f16")
    path = shared("golden/tools/gguf/tiny-llama-untied.Q4_K_M.imatrix.gguf")
    with load_model(path, precision="int8", cache=f16) as model:
        s = measure_divergence(model, shared("golden/tools/eval/base.c256x2.kld")).statistics
    assert s.ppl == pytest.approx((388.786680, 22.158508), rel=3e-3)
    assert s.ppl[0] == pytest.approx(388.786680, rel=1e-3)
    assert s.mean_kld[0] == pytest.approx(0.002860, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, expected",
    [
        pytest.param("mini-llama", 21.5628, marks=pytest.mark.full),
        ("mini-qwen3moe", 22.1714),
    ],
)
def test_trained_models(name, expected, tmp_path):
    path = iqforge.convert_model(shared(f"models/{name}"), tmp_path / "model.gguf", "bf16")
    result = iqforge.measure_perplexity(path, shared("text/wiki.test.txt"), chunks=60)
    assert result.perplexity == pytest.approx(expected, abs=0.02) and result.n_scored == 60 * 255


def test_command_prints_what_scripts_read(tiny, tmp_path, capsys):
    words = ["perplexity", "--device", "cpu", "-m", str(tiny / "f32.gguf"), "-c", str(N_CTX)]
    with_text = [*words, "-f", str(tiny / "text.txt"), "--chunks", "8"]
    assert (
        main([*with_text, "--kl-divergence-base", str(tmp_path / "b.kld"), "-ngl", "99", "-fa"])
        == 0
    )
    out, err = capsys.readouterr()
    assert re.fullmatch(
        r"(\[\d\]\d+\.\d{4},){8}\nFinal estimate: PPL = \d+\.\d{4} \+/- \d+\.\d{5}\n", out
    )
    assert "-ngl changes nothing here" in err and "tokens/s" in err
    assert main([*with_text, "--ppl-output-type", "1"]) == 0
    assert re.match(r" +0  \d+\.\d{4}  \d\.\d{6}  \d\.\d{6}\n +32  ", capsys.readouterr().out)
    assert main([*words, "--kl-divergence-base", str(tmp_path / "b.kld"), "--kl-divergence"]) == 0
    assert "Mean    KLD:" in capsys.readouterr().out
    assert main([*words, "--kl-divergence"]) == 1 and main(words) == 1
    assert main([*with_text, "--kl-divergence-base", str(tiny / "f32.gguf")]) == 1
    assert "error" in capsys.readouterr().err


def test_a_text_on_the_command_line_counts_like_its_file(tiny, tmp_path, capsys):
    model = str(tiny / "f32.gguf")
    words = ["perplexity", "--device", "cpu", "-m", model, "-c", str(N_CTX)]
    typed = PROSE.replace("\n", "\\n")
    (tmp_path / "prose.txt").write_text(PROSE + "\n")
    (tmp_path / "typed.txt").write_text(typed)
    printed = []
    for given in (
        ["-f", str(tmp_path / "prose.txt")],
        ["-p", typed],
        ["-p", PROSE, "--no-escape"],
        ["-f", str(tmp_path / "typed.txt")],
        ["-p", typed, "--no-escape"],
    ):
        assert main([*words, *given]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2] != printed[3] == printed[4]
    base = ["--kl-divergence-base", str(tmp_path / "b.kld")]
    assert main([*words, "-p", typed, *base]) == 0
    assert main([*words, "-p", typed, *base, "--kl-divergence"]) == 0
    assert "holds another text" not in capsys.readouterr().err
    assert main([*words, "-p", "other", *base, "--kl-divergence"]) == 0
    assert f"note: -p changes nothing here: {base[1]} holds another" in capsys.readouterr().err
    assert main([*words, "-p", typed, "--kl-divergence-against", model]) == 0
    for wrong, said in (
        (["-p", typed, "-f", str(tmp_path / "prose.txt")], "-f TEXT or -p TEXT, not both"),
        (["-p", "too short"], "the text has"),
        (["-p", "\\xff"], "the text is not UTF-8 at byte 0"),
        (["-p", typed, "--hellaswag"], "--hellaswag needs one file of tasks"),
        ([], "-f TEXT or -p TEXT is needed"),
    ):
        capsys.readouterr()
        assert main([*words, *wrong]) == 1 and said in capsys.readouterr().err
    for wrong in ({"text": PROSE, "prompt": PROSE}, {"text": None, "prompt": 3}, {"text": None}):
        with pytest.raises(UsageError):
            iqforge.measure_perplexity(model, **wrong)


def test_flags_that_change_nothing_in_a_comparison_or_in_tasks_are_said(tiny, tmp_path, capsys):
    words = ["perplexity", "--device", "cpu", "-m", str(tiny / "f32.gguf")]
    file = tmp_path / "b.kld"
    base = ["--kl-divergence-base", str(file)]
    text = ["-f", str(tiny / "text.txt"), "-c", str(N_CTX), "--chunks", "2"]
    assert main([*words, *text, *base]) == 0 and "changes nothing" not in capsys.readouterr().err
    unused = ["-c", str(2 * N_CTX), "--ppl-output-type", "1"]
    assert main([*words, *base, "--kl-divergence", *unused]) == 0
    err = capsys.readouterr().err
    assert (
        f"note: -c changes nothing here: {tmp_path / 'b.kld'} has chunks of {N_CTX} tokens" in err
    )
    assert "note: --ppl-output-type changes nothing here" in err
    for own in ([], ["-c", str(N_CTX)]):
        assert main([*words, *base, "--kl-divergence", *own]) == 0
        assert "changes nothing" not in capsys.readouterr().err
    tasks = tmp_path / "tasks.txt"
    tasks.write_text("a context\n1\none\ntwo\nthree\nfour\n")
    assert main([*words, "-f", str(tasks), "--hellaswag", "--chunks", "1"]) == 0
    assert "note: --chunks changes nothing here" in capsys.readouterr().err
    assert main([*words, *base, "--kl-divergence", "--ppl-stride", "4"]) == 1
    assert "--kl-divergence and --ppl-stride cannot" in capsys.readouterr().err
    assert main([*words, *text, "--kl-divergence-against", ""]) == 1
    assert "--kl-divergence-against is empty" in capsys.readouterr().err


def test_what_holds_for_both_models_of_a_comparison_is_said_once(tiny, capsys):
    words = ["perplexity", "-m", str(tiny / "q8.gguf"), "-f", str(tiny / "text.txt"), "-fmoe"]
    words += ["-c", str(N_CTX), "--chunks", "1", "--kl-divergence-against", str(tiny / "f32.gguf")]
    assert main([*words, "--device", "auto"]) == 0
    err = capsys.readouterr().err
    assert err.count("device: ") == 1 and err.count("note: -fmoe changes nothing here") == 1


def test_tables_have_no_headings_before_errors_of_the_input(tiny, tmp_path, capsys):
    words = ["perplexity", "--device", "cpu", "-m", str(tiny / "f32.gguf"), "-c", str(N_CTX)]
    text = tmp_path / "text.txt"
    text.write_text("too short")
    assert main([*words, "-f", str(text), "--kl-divergence-against", str(tiny / "q8.gguf")]) == 1
    text.write_text("a context\n4\none\ntwo\nthree\nfour\n")
    assert main([*words, "-f", str(text), "--hellaswag"]) == 1
    text.write_text("a context\n1\none\ntwo\nthree\nfour\n")
    assert main([*words, "-f", str(text), "--hellaswag", "-c", "3"]) == 1
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("error:") == 3
    assert main([*words, "-f", str(text), "--hellaswag"]) == 0
    assert capsys.readouterr().out.startswith(report.TASK_HEADER)


def test_windows_of_a_stride_are_said(tiny, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(PROSE * 4)
    words = ["perplexity", "--device", "cpu", "-m", str(tiny / "f32.gguf"), "-f", str(text)]
    words += ["-c", "64", "-b", "128", "--chunks", "2"]
    assert main([*words, "--ppl-stride", "16"]) == 0
    windows = "windows of 256 tokens, one every 16; the last 16 of each are scored"
    assert windows in capsys.readouterr().err
    assert main(words) == 0 and "windows" not in capsys.readouterr().err


def test_texts_that_cannot_be_evaluated(tiny, tmp_path):
    with load_model(tiny / "f32.gguf") as model:
        with pytest.raises(EvaluationError, match="at least 4096"):
            measure_perplexity(model, "too short", n_ctx=2048)
        with pytest.raises(EvaluationError, match="context size is 2"):
            measure_perplexity(model, PROSE, n_ctx=2)
        with pytest.raises(UsageError, match="n_ctx is 0, expected 4 or more"):
            iqforge.measure_perplexity(model, PROSE, n_ctx=0)
    with pytest.raises(NotFoundError):
        read_text(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(EvaluationError, match="byte 3.*UTF-8"):
        read_text(tmp_path / "latin.txt")
    (tmp_path / "crlf.txt").write_bytes(b"a\r\nb\n\n")
    assert read_text(tmp_path / "crlf.txt") == "a\r\nb\n"


@pytest.mark.parametrize("stride", [0, 8])
def test_a_text_that_is_too_short_is_named(tiny, tmp_path, stride):
    (tmp_path / "empty.txt").write_text("")
    flags = {"ppl_stride": stride}
    with load_model(tiny / "f32.gguf") as model:
        with pytest.raises(EvaluationError, match=r"empty\.txt: the text has 1 token, "):
            iqforge.measure_perplexity(model, tmp_path / "empty.txt", n_ctx=16, **flags)
        with pytest.raises(EvaluationError, match="^the text has"):
            iqforge.measure_perplexity(model, None, prompt="a", n_ctx=16, **flags)
        if not stride:
            with pytest.raises(EvaluationError, match=r"empty\.txt: the text has"):
                iqforge.measure_perplexity(model, tmp_path / "empty.txt", against=model, n_ctx=16)


def test_models_that_cannot_be_evaluated(tiny, tmp_path):
    with open_gguf(tiny / "f32.gguf") as source:
        path = write_gguf(
            tmp_path / "eos.gguf", source, metadata={"tokenizer.ggml.add_eos_token": boolean(True)}
        )
        with load_model(path) as model, pytest.raises(EvaluationError, match="EOS"):
            measure_perplexity(model, PROSE, n_ctx=N_CTX)
        _, start = source.location("blk.1.ffn_up.weight")
    data = bytearray((tiny / "f32.gguf").read_bytes())
    data[start : start + 4] = struct.pack("<f", math.nan)
    (tmp_path / "nan.gguf").write_bytes(data)
    with (
        load_model(tmp_path / "nan.gguf") as model,
        pytest.raises(NonFiniteError, match="blk.1.ffn_up.weight.*not a number"),
    ):
        measure_perplexity(model, PROSE, n_ctx=N_CTX, save_logits=tmp_path / "nan.kld")
    assert not list(tmp_path.glob("nan.kld*"))


@pytest.mark.parametrize(
    "damage, error, message",
    [
        (lambda b: b"", MalformedFileError, "not a base file"),
        (lambda b: b"GGUF" + b[4:], MalformedFileError, "GGUF"),
        (lambda b: b[:13], TruncatedFileError, "13 bytes"),
        (lambda b: b[:-1], TruncatedFileError, "take"),
        (
            lambda b: b[:16] + struct.pack("<i", 2**31 - 1) + b[20:],
            TruncatedFileError,
            "2147483647 chunks",
        ),
        (lambda b: b[:8] + struct.pack("<i", -5) + b[12:], MalformedFileError, "n_ctx is -5"),
        (lambda b: b[:12] + struct.pack("<i", 0) + b[16:], MalformedFileError, "n_vocab is 0"),
        (
            lambda b: b[:24] + struct.pack("<i", 320) + b[28:],
            MalformedFileError,
            "byte 24.*token 320",
        ),
    ],
)
def test_damaged_base_files(tiny, tmp_path, damage, error, message):
    good = tmp_path / "good.kld"
    with load_model(tiny / "f32.gguf") as model:
        measure_perplexity(model, PROSE, n_ctx=N_CTX, chunks=2, save_logits=good)
    (tmp_path / "bad.kld").write_bytes(damage(good.read_bytes()))
    with pytest.raises(error, match=message):
        BaseFile(tmp_path / "bad.kld")


def test_base_files_that_do_not_fit(tiny, tmp_path, caplog):
    with pytest.raises(NotFoundError):
        BaseFile(tmp_path / "none.kld")
    with CheckpointSource(open_checkpoint(make_tiny_llama(tmp_path / "hf", n_vocab=352))) as source:
        write_gguf(tmp_path / "larger.gguf", source)
    with load_model(tiny / "f32.gguf") as model:
        measure_perplexity(model, PROSE, n_ctx=N_CTX, chunks=2, save_logits=tmp_path / "base.kld")
    with load_model(tmp_path / "larger.gguf") as model, caplog.at_level(logging.WARNING):
        measure_divergence(model, tmp_path / "base.kld")
    assert "320" in caplog.text and "352" in caplog.text
    data = bytearray((tmp_path / "base.kld").read_bytes())
    at = 20 + 4 * 2 * N_CTX
    data[at : at + 4] = struct.pack("<f", math.inf)
    (tmp_path / "inf.kld").write_bytes(data)
    with (
        load_model(tiny / "f32.gguf") as model,
        pytest.raises(IqforgeError, match="record 0.*not finite"),
    ):
        measure_divergence(model, tmp_path / "inf.kld")
    shutil.rmtree(tmp_path / "hf")
