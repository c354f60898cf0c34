"""Files of importance matrices: the reference's bytes, adding up, statistics, comparing, the
commands.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import ImatrixError, OutputError, UsageError
from iqforge.imatrix.collecting import collect
from iqforge.imatrix.data import Entry
from iqforge.imatrix.experts import with_experts
from iqforge.imatrix.files.load import load_imatrix, save_imatrix
from iqforge.imatrix.merge import as_tokens, merge_imatrices
from iqforge.imatrix.statistics import layer_statistics, tensor_statistics
from iqforge.runtime.evaluate.base_file import BaseFile
from iqforge.runtime.model import load_model

from .imatrices import N_CTX, ROUTER, UP, tiny_llama_file, tokens, write_dat
from .shared import shared
from .tiny_checkpoint import PROSE


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama_file(tmp_path_factory.mktemp("files"))


def contents(path: Path) -> tuple[dict[str, bytes], bytes]:
    """Return the contents of a .dat file regardless of the order of its entries: the bytes after
    each name, and the tail.
    """
    data, at, entries = path.read_bytes(), 4, {}
    for _ in range(struct.unpack_from("<i", data)[0]):
        (length,) = struct.unpack_from("<i", data, at)
        name, at = data[at + 4 : at + 4 + length].decode(), at + 4 + length
        stop = at + 8 + 4 * struct.unpack_from("<i", data, at + 4)[0]
        entries[name], at = data[at:stop], stop
    return entries, data[at:]


# The files of the reference.


@pytest.mark.parametrize(
    "name",
    [
        "mergeA.dat",
        "mergeB.dat",
        "mergeAB_plus1chunk.dat",
        "mini-llama-wiki.valid-100x512.dat",
        "tiny-llama-untied.c128x2.dat",
        "tiny-llama-untied.c256x4.dat",
        "tiny-moe.c256x3.dat",
        "tiny-moe.handmade.gguf",
    ],
)
def test_a_file_that_was_read_is_written_with_the_same_bytes(tmp_path, name):
    path, out = shared("golden/tools/imatrix") / name, tmp_path / f"out.{name[-4:]}"
    save_imatrix(load_imatrix(path), out, "gguf" if name.endswith("gguf") else "dat")
    assert out.read_bytes() == path.read_bytes()


def test_there_and_back_again(tmp_path):
    path = shared("golden/tools/imatrix/tiny-moe.c256x3.dat")
    to_gguf = iqforge.convert_imatrix(path, tmp_path / "x.gguf", chunk_size=256)
    assert to_gguf.entries[UP].counts.tolist() == [768] * 4 and to_gguf.chunk_count == 3
    iqforge.convert_imatrix(tmp_path / "x.gguf", tmp_path / "x.dat")
    assert contents(tmp_path / "x.dat") == contents(path)
    # The means of a file with counts per expert stay.
    handmade = shared("golden/tools/imatrix/tiny-moe.handmade.gguf")
    iqforge.convert_imatrix(handmade, tmp_path / "y.dat")
    # ceil(404 / 256), as llama.cpp writes.
    assert load_imatrix(tmp_path / "y.dat").entries[UP].counts.tolist() == [2]
    assert load_imatrix(tmp_path / "y.dat").entries[ROUTER].counts.tolist() == [3]
    comparison = iqforge.compare_imatrices(handmade, tmp_path / "y.dat")
    assert len(comparison.tensors) == 16 and max(t.difference for t in comparison.tensors) < 1e-6


def test_merged_as_the_reference_merges(tmp_path):
    """Two files and a new chunk are added. The sums of the new chunk come from our runtime and
    differ from the reference's in the last bits.
    """
    folder, tokens = (
        shared("golden/tools"),
        BaseFile(shared("golden/tools/eval/base.c256x2.kld")).tokens.reshape(-1),
    )
    files = [folder / "imatrix/mergeA.dat", folder / "imatrix/mergeB.dat"]
    with load_model(folder / "gguf/tiny-llama-untied-f16.gguf") as loaded:
        fresh = collect(loaded, tokens, n_ctx=256, chunks=1)
    expected = load_imatrix(folder / "imatrix/mergeAB_plus1chunk.dat")
    merged = iqforge.merge_imatrices([*files, fresh], tmp_path / "calls.dat", weighting="calls")
    read = load_imatrix(tmp_path / "calls.dat")
    assert read.chunk_count == expected.chunk_count == 5 and merged.entries[
        "blk.0.attn_q.weight"
    ].counts.tolist() == [2 + 2 + 256]
    for name, entry in expected.entries.items():
        assert read.entries[name].counts.tolist() == entry.counts.tolist() == [5]
        np.testing.assert_allclose(read.entries[name].sums, entry.sums, rtol=4e-3)
    # As every token counts the same, the new chunk has a fifth of the mean.
    even = iqforge.merge_imatrices([*files, fresh])
    assert (even.chunk_count, even.chunk_size) == (5, 256)
    for name, entry in even.entries.items():
        parts = [load_imatrix(path).entries[name].means for path in files]
        np.testing.assert_allclose(
            entry.means, (2 * parts[0] + 2 * parts[1] + fresh.entries[name].means) / 5, rtol=1e-12
        )


def test_calls_of_files_alone_add_up_exactly(tmp_path):
    folder = shared("golden/tools/imatrix")
    for weighting in ("tokens", "calls"):
        iqforge.merge_imatrices(
            [folder / "mergeA.dat", folder / "mergeB.dat"], tmp_path / "x.dat", weighting=weighting
        )
        found, a, b = (
            load_imatrix(path)
            for path in (tmp_path / "x.dat", folder / "mergeA.dat", folder / "mergeB.dat")
        )
        assert found.chunk_count == 4 and list(found.entries) == sorted(a.entries)
        for name, entry in found.entries.items():
            # As the reference adds.
            expected = a.entries[name].sums.astype(np.float32) + b.entries[name].sums.astype(
                np.float32
            )
            assert entry.counts.tolist() == [4] and np.array_equal(
                entry.sums.astype(np.float32), expected
            )


# Adding up.


def test_sums_and_counts_add_up():
    a, b = tokens([[2, 4], [0, 0]], [10, 0]), tokens([[1, 1], [3, 9]], [5, 3])
    merged = merge_imatrices([a, b])
    assert merged.entries[UP].sums.tolist() == [[3, 5], [3, 9]] and merged.entries[
        UP
    ].counts.tolist() == [15, 3]
    assert merged.datasets == ("t", "t")
    # A single count is that of every expert.
    merged = merge_imatrices([a, tokens([[1, 2, 3, 4]], [7])])
    assert merged.entries[UP].sums.tolist() == [[3, 6], [3, 4]] and merged.entries[
        UP
    ].counts.tolist() == [17, 7]
    # Weights: counts stay whole, and means what they are, also of an expert that saw little.
    merged = merge_imatrices([a, b], [1, 0.2])
    assert merged.entries[UP].counts.tolist() == [11, 1]  # 10 + 1.0, and 0.6
    np.testing.assert_allclose(merged.entries[UP].means[1], [1, 3])
    assert merge_imatrices([a, b], [2, 3]).entries[UP].sums.tolist() == [[7, 11], [9, 27]]


def test_calls_become_tokens_beside_tokens(tmp_path):
    path = write_dat(tmp_path / "x.dat", {UP: (3, [3, 3, 6, 9]), ROUTER: (4, [4, 8])}, 4)
    calls = load_imatrix(path)
    assert calls.counts_calls and calls.entries[UP].counts.tolist() == [3]
    # The first expert's means are 1, so it saw nothing. The length of the router's row shows where
    # it ends.
    assert with_experts(calls).entries[UP].counts.tolist() == [0, 3]
    fresh = tokens([[0.5, 0.5], [0, 0]], [8, 0])
    fresh.entries[ROUTER] = Entry(np.ones((1, 2)), np.array([N_CTX]))
    merged = merge_imatrices([calls, fresh])
    # An expert saw 4 of 32 tokens in the part that counts tokens, so it is assumed to have seen an
    # eighth of the file's 3 * 32.
    assert (
        merged.entries[UP].counts.tolist() == [8, 12]
        and merged.chunk_size == N_CTX
        and merged.chunk_count == 5
    )
    np.testing.assert_array_equal(merged.entries[UP].means, [[0.0625, 0.0625], [2, 3]])
    assert merged.entries[ROUTER].counts.tolist() == [5 * N_CTX]
    as_ik = merge_imatrices([calls, fresh], weighting="calls")
    assert as_ik.entries[UP].counts.tolist() == [11, 3] and (
        as_ik.entries[UP].calls,
        as_ik.chunk_count,
    ) == (4, 5)
    assert as_ik.entries[UP].sums.tolist() == [[3.5, 3.5], [6, 9]]
    # Fractions of calls are those of tokens.
    half = merge_imatrices([calls, calls], [0.5, 1])
    assert (
        half.chunk_size == 512
        and half.entries[ROUTER].counts.tolist() == [6 * 512]
        and half.chunk_count == 6
    )
    assert as_tokens(fresh, 99) is fresh


def test_files_that_do_not_add_up(tmp_path):
    a = tokens([[1, 2], [3, 4]], [1, 1], path="a.gguf")
    for other in (
        tokens([[1, 2, 3]], [1], path="b.gguf"),
        tokens([[1], [2], [3], [4]], [1] * 4, path="b.gguf"),
    ):
        for action in (
            lambda: merge_imatrices([a, other]),
            lambda: iqforge.compare_imatrices(a, other),
        ):
            with pytest.raises(
                ImatrixError,
                match=(
                    rf"b.gguf, tensor '{UP}': has {other.entries[UP].sums.size} values.*a.gguf it"
                    r" has 4"
                ),
            ):
                action()
    for options in (
        {"weights": [1]},
        {"weights": [1, 0]},
        {"weights": [1, np.inf]},
        {"weighting": "both"},
        {"chunk_size": 1},
        {"weighting": "calls", "weights": [1, 0.5]},
    ):
        with pytest.raises(UsageError):
            merge_imatrices([a, a], **options)
    with pytest.raises(UsageError):
        merge_imatrices([])
    save_imatrix(a, tmp_path / "a.gguf")
    with pytest.raises(OutputError, match="same file"):
        iqforge.merge_imatrices([tmp_path / "a.gguf"], tmp_path / "a.gguf")
    with pytest.raises(UsageError, match="chunks of 32 tokens"):
        iqforge.convert_imatrix(tmp_path / "a.gguf", tmp_path / "a.dat", chunk_size=64)


# Statistics and comparing.


def test_statistics():
    imatrix = tokens([[5, 10, 0, 25], [0, 0, 0, 0]], [5, 0])
    imatrix.entries["blk.1.ffn_up_exps.weight"] = Entry(
        np.array([[0.0, 0, 0, 8], [8, 0, 0, 0]]), np.array([1, 1])
    )
    imatrix.entries["blk.1.attn_q.weight"] = Entry(np.array([[1.0, 1.0]]), np.array([1]))
    imatrix.entries["output.weight"] = Entry(np.array([[3.0]]), np.array([3]))
    q, second, first, output = tensor_statistics(imatrix)
    assert [s.tensor for s in (q, second, first, output)] == [
        "attn_q",
        "ffn_up_exps",
        "ffn_up_exps",
        "output",
    ]
    # By falling total within a kind.
    assert (first.layer, second.layer, output.layer) == (
        0,
        1,
        None,
    )
    a = np.array([1.0, 2, 0, 5])
    assert (first.total, first.minimum, first.maximum, first.mean, first.n, first.active) == (
        8,
        0,
        5,
        2,
        4,
        75,
    )
    assert first.deviation == pytest.approx(a.std()) and first.zd == 25 and first.similarity == 0
    p = np.array([1, 2, 5]) / 8
    assert first.entropy == pytest.approx(
        -(p * np.log2(p)).sum()
    ) and first.normed_entropy == pytest.approx(first.entropy * 50)
    assert (
        second.similarity == pytest.approx(25 * 8 / (np.linalg.norm([5, 10, 25]) * 8 * 2**0.5))
        and second.n == 8
        and second.entropy == 1
    )
    assert (q.deviation, q.zd, q.entropy, q.normed_entropy) == (
        0,
        0,
        1,
        100,
    ) and output.normed_entropy == 0
    zero, one = layer_statistics([q, second, first, output])
    assert (zero.layer, zero.total, one.total) == (0, 8, (2 * 2 + 16 * 8) / 10)


def test_comparison(tmp_path, capsys):
    a = tokens([[1, 0], [0, 1], [1, 1]], [1, 1, 0], path="a")
    b = tokens([[2, 0], [1, 1], [1, 1]], [2, 1, 1], path="b")
    a.entries |= {
        "same": Entry(np.array([[1.0, 2.0]]), np.array([1])),
        "mine": Entry(np.array([[1.0]]), np.array([1])),
    }
    b.entries |= {
        "same": Entry(np.array([[10.0, 20.0]]), np.array([10])),
        "yours": Entry(np.array([[1.0]]), np.array([1])),
    }
    comparison = iqforge.compare_imatrices(a, b)
    worst, same = comparison.tensors
    assert (worst.name, worst.compared, worst.matrices) == (
        UP,
        2,
        3,
    ) and worst.lowest == pytest.approx(0.5**0.5)
    assert worst.cosine == pytest.approx((1 + 0.5**0.5) / 2) and worst.difference == pytest.approx(
        1 / 2**0.5
    )
    assert (same.lowest, same.difference) == (pytest.approx(1), 0)
    assert (comparison.only_in_a, comparison.only_in_b) == (("mine",), ("yours",))
    save_imatrix(a, tmp_path / "a.gguf")
    save_imatrix(b, tmp_path / "b.gguf")
    assert (
        main(
            ["imatrix-compare", str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf"), "--limit", "1"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "2 of 3" in out
        and "1 tensors that are closer" in out
        and "only in" in out
        and "lowest 0.707107" in out
    )
    assert (
        main(["imatrix-compare", str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf"), "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["tensors"][0]["name"] == UP


# The commands.


def test_commands(model, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(PROSE * 3)
    words = [
        "imatrix",
        "--device",
        "cpu",
        "-m",
        str(model),
        "-f",
        str(tmp_path / "text.txt"),
        "-c",
        str(N_CTX),
        "-b",
        "64",
        "--no-ppl",
    ]
    a, b, out = (str(tmp_path / name) for name in ("a.dat", "b.gguf", "out.gguf"))
    assert (
        main([*words, "-o", a, "--chunks", "3"])
        == main([*words, "-o", b, "--chunk", "3", "--chunks", "2", "--process-output"])
        == 0
    )
    assert main([*words, "-o", out, "--chunks", "5", "--verbosity", "2"]) == 0
    whole = load_imatrix(out)
    assert "blk.0.attn_q.weight: 1 x 256, 160 tokens" in capsys.readouterr().out
    # Three chunks of one file and two of the other are the five of one run, whichever is collected,
    # and without a text as well.
    assert main(["imatrix", "--in-file", a, "--in-file", b, "-o", out]) == 0
    together = load_imatrix(out)
    assert main([*words, "-o", out, "--chunk", "3", "--chunks", "2", "--in-file", a]) == 0
    added = load_imatrix(out)
    assert (
        set(together.entries) == {*whole.entries, "output.weight"}
        and together.chunk_count == added.chunk_count == 5
    )
    for name, entry in whole.entries.items():
        for other in (together, added):
            assert other.entries[name].counts.tolist() == entry.counts.tolist() == [160]
            np.testing.assert_allclose(other.entries[name].sums, entry.sums, rtol=1e-5)
    assert (
        main(
            [
                "imatrix",
                "--in-file",
                a,
                "--in-file",
                b,
                "--in-weight",
                "2",
                "--in-weight",
                "1",
                "-o",
                out,
            ]
        )
        == 0
    )
    assert load_imatrix(out).entries["blk.0.attn_q.weight"].counts.tolist() == [256]
    capsys.readouterr()
    assert main(["imatrix", "--show-statistics", "--in-file", b]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == [
        "Layer",
        "Tensor",
        "Σ(Act²)",
        "Min",
        "Max",
        "μ",
        "σ",
        "%",
        "Active",
        "N",
        "Entropy",
        "E",
        "(norm)",
        "ZD",
        "CosSim",
    ]
    assert [line.split()[1] for line in lines[3:11]] == [
        "attn_k",
        "attn_output",
        "attn_q",
        "attn_v",
        "ffn_down",
        "ffn_gate",
        "ffn_up",
        "output",
    ]
    assert main(["imatrix-convert", b, str(tmp_path / "c.dat")]) == 0
    assert "8 entries from 2 chunks of 32 tokens" in capsys.readouterr().out
    for wrong, message in (
        ([], "-f TEXT or -p TEXT is needed"),
        (["-f", a, "-p", "x"], "not both"),
        (["-f", a, "-p", ""], "not both"),
        (["-f", a], "-m MODEL is needed"),
        (["-p", ""], "-m MODEL is needed"),
        (["--in-file", a, "--in-weight", "1", "--in-weight", "1"], "2 weights"),
        (["--show-statistics"], "exactly one"),
        (["--in-file", a, "-o", a], "same file"),
    ):
        assert main(["imatrix", *wrong]) == 1 and message in capsys.readouterr().err
    assert main([*words, "-o", a, "--in-file", a]) == 1 and "same file" in capsys.readouterr().err
    assert main([*words, "-b", "0"]) == 1 and "-b is 0, expected 1" in capsys.readouterr().err


def test_text_of_the_command_line_and_special_tokens(model, tmp_path, capsys):
    words = [
        "imatrix",
        "--device",
        "cpu",
        "-m",
        str(model),
        "-c",
        "4",
        "--no-ppl",
        "-o",
        str(tmp_path / "x.gguf"),
        "-p",
        "<|end_of_text|> a model of 12",
    ]
    assert main(words) == 0
    plain = load_imatrix(tmp_path / "x.gguf")
    assert main([*words, "--parse-special"]) == 0
    special = load_imatrix(tmp_path / "x.gguf")
    assert special.chunk_count < plain.chunk_count and plain.datasets == ()
    name = "token_embd.weight"
    assert (
        main([*words, "--process-output", "--output-tensor-name", name]) == 0
        and name not in load_imatrix(tmp_path / "x.gguf").entries
    )
