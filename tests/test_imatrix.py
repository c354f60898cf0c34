"""Importance matrices: collection against sums written out and the reference's file, both layouts,
damaged files.
"""

from __future__ import annotations

import copy
import logging
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
    ImatrixError,
    IqforgeError,
    NotFoundError,
    TruncatedFileError,
    UsageError,
)
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import TYPES
from iqforge.formats.values import ValueType, array, string, u32
from iqforge.imatrix import collecting
from iqforge.imatrix.collecting import collect
from iqforge.imatrix.collector import Collector
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.imatrix.files.load import load_imatrix, save_imatrix
from iqforge.runtime.model import load_model

from .shared import shared
from .tiny_checkpoint import PROSE, make_tiny_qwen3moe
from .tiny_model import write_gguf

N_CTX = 32
EXPERTS = "blk.0.ffn_up_exps.weight"


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """Write a model with 16 experts, not all of which a short text reaches, with gate and up
    separate or merged.
    """
    folder = tmp_path_factory.mktemp("imatrix")
    make_tiny_qwen3moe(folder / "hf", n_experts=16, n_layers=1)
    for name, merge in (("moe", False), ("merged", True)):
        with CheckpointSource(open_checkpoint(folder / "hf"), merge_gate_up=merge) as source:
            write_gguf(folder / f"{name}.gguf", source)
    (folder / "text.txt").write_text(PROSE * 2)
    return folder


def small() -> Imatrix:
    random = np.random.default_rng(0)
    sums = random.random((4, 8))
    sums[2] = 0
    return Imatrix(
        {
            "blk.0.attn_q.weight": Entry(random.random((1, 8)), np.array([96])),
            EXPERTS: Entry(sums, np.array([40, 30, 0, 26])),
        },
        3,
        N_CTX,
        ("a.txt",),
    )


def test_sums_are_the_squares_of_every_input(moe):
    wanted: dict[str, list] = {}

    def note(name: str, x: torch.Tensor, experts: torch.Tensor | None) -> None:
        wanted.setdefault(name, []).append(
            (x.double().numpy(), None if experts is None else experts.numpy())
        )

    with load_model(moe / "moe.gguf") as model, model.observe(note):
        result = collect(
            model,
            PROSE,
            n_ctx=N_CTX,
            chunks=4,
            batch_tokens=2 * N_CTX,
            process_output=True,
            dataset="prose",
        )
    assert set(result.entries) == {name for name in wanted if name != "token_embd.weight"}
    assert (result.chunk_count, result.chunk_size, result.datasets) == (4, N_CTX, ("prose",))
    for name, entry in result.entries.items():
        x, experts = np.concatenate([x for x, _ in wanted[name]]), [e for _, e in wanted[name]]
        if experts[0] is None:
            assert entry.counts.tolist() == [4 * N_CTX]
            np.testing.assert_allclose(entry.sums[0], (x**2).sum(0), rtol=1e-5)
        else:
            experts = np.concatenate(experts)
            assert (
                entry.counts.tolist() == np.bincount(experts, minlength=16).tolist()
                and entry.counts.sum() == 2 * 4 * N_CTX
            )
            for e in range(16):
                np.testing.assert_allclose(
                    entry.sums[e], (x[experts == e] ** 2).sum(0), rtol=1e-5, atol=1e-12
                )


def test_collected_tensors(moe):
    with load_model(moe / "moe.gguf") as model:
        plain = collect(model, PROSE, n_ctx=N_CTX, chunks=2, compute_perplexity=False)
        again = collect(model, PROSE, n_ctx=N_CTX, chunks=2)
        seen = []
        collect(
            model,
            PROSE,
            n_ctx=N_CTX,
            chunks=4,
            batch_tokens=N_CTX,
            progress=lambda p: seen.append(p.perplexity),
        )
    assert (
        "output.weight" not in plain.entries
        and "blk.0.ffn_gate_inp.weight" in plain.entries
        and len(plain.entries) == 8
    )
    assert all(
        np.array_equal(plain.entries[name].sums, again.entries[name].sums) for name in plain.entries
    )
    assert len(seen) == 4 and all(value > 1 for value in seen)
    with load_model(moe / "merged.gguf") as model:
        merged = collect(model, PROSE, n_ctx=N_CTX, chunks=2)
    np.testing.assert_allclose(
        merged.importance(EXPERTS, (16, 256, 256)),
        plain.importance(EXPERTS, (16, 256, 256)),
        rtol=1e-5,
    )


def test_a_run_resumes_from_a_snapshot(moe):
    snapshots, whole, rest = {}, [], []

    def run(model, into, **options) -> Imatrix:
        return collecting.collect(
            model,
            PROSE * 2,
            n_ctx=N_CTX,
            chunks=7,
            from_chunk=1,
            batch_tokens=2 * N_CTX,
            process_output=True,
            progress=into.append,
            **options,
        )

    with load_model(moe / "moe.gguf") as model:
        expected = run(
            model,
            whole,
            on_pass=lambda done, take: snapshots.update({done: copy.deepcopy(take())}),
        )
        assert list(snapshots) == [2, 4, 6] and snapshots[4].imatrix.chunk_count == 4
        found = run(model, rest, start=snapshots[4])
        skipped = collect(model, PROSE * 2, n_ctx=N_CTX, chunks=7, batch_tokens=2 * N_CTX)
    assert found.chunk_count == 7 and list(found.entries) == list(expected.entries)
    for name, entry in expected.entries.items():
        assert np.array_equal(entry.sums, found.entries[name].sums) and np.array_equal(
            entry.counts, found.entries[name].counts
        )
    assert [p.chunk for p in rest] == [5, 6, 7] and [p.perplexity for p in rest] == [
        p.perplexity for p in whole[4:]
    ]
    assert rest[0].before == 4 and rest[0].tokens_per_second * rest[0].seconds == pytest.approx(
        N_CTX
    )
    assert not np.array_equal(
        skipped.entries["blk.0.attn_q.weight"].sums, expected.entries["blk.0.attn_q.weight"].sums
    )
    with (
        load_model(moe / "moe.gguf") as model,
        pytest.raises(EvaluationError, match="after 100 chunks"),
    ):
        collect(model, PROSE, n_ctx=N_CTX, from_chunk=100)


@pytest.mark.full  # test_imatrix_collect.py compares with a smaller file of the reference
def test_the_file_of_the_reference(tmp_path):
    """The file is of mini-llama over 100 chunks of 512 tokens of the validation text."""
    theirs = load_imatrix(shared("golden/tools/imatrix/mini-llama-wiki.valid-100x512.dat"))
    model = iqforge.convert_model(shared("models/mini-llama"), tmp_path / "model.gguf", "bf16")
    ours = iqforge.collect_imatrix(
        model, shared("text/wiki.valid.txt"), tmp_path / "ours.dat", chunks=100
    )
    read = load_imatrix(tmp_path / "ours.dat")
    assert (
        set(ours.entries) == set(theirs.entries) == set(read.entries)
        and read.chunk_count == theirs.chunk_count == 100
    )
    difference = []
    for name, entry in theirs.entries.items():
        assert read.entries[name].counts.tolist() == entry.counts.tolist() == [100]
        difference.append(np.abs(ours.entries[name].means / entry.means - 1).ravel())
    assert np.concatenate(difference).max() < 0.02 and np.median(np.concatenate(difference)) < 0.002


@pytest.mark.parametrize("suffix", ["dat", "gguf"])
def test_both_layouts_keep_the_means(tmp_path, suffix, caplog):
    path, original = tmp_path / f"x.{suffix}", small()
    save_imatrix(original, path)
    read = load_imatrix(path)
    assert (read.chunk_count, read.datasets) == (3, ("a.txt",)) and read.path == str(path)
    for name, shape in ((EXPERTS, (4, 2, 8)), ("blk.0.attn_q.weight", (2, 8))):
        importance = read.importance(name, shape)
        assert importance.dtype == np.float32 and importance.shape == (
            original.entries[name].sums.shape[0],
            8,
        )
        np.testing.assert_allclose(importance, original.entries[name].means, rtol=1e-6)
    assert (read.importance(EXPERTS, (4, 2, 8))[2] == 1).all()
    assert ("1 of 4 experts" in caplog.text) == (suffix == "dat")
    before = path.read_bytes()
    save_imatrix(read, path)
    assert path.read_bytes() == before  # reading loses nothing


def test_layout_of_dat(tmp_path):
    save_imatrix(
        Imatrix({"w": Entry(np.array([[2.0, 6.0]]), np.array([64]))}, 2, N_CTX, ("d",)),
        tmp_path / "x.dat",
    )
    assert (tmp_path / "x.dat").read_bytes() == struct.pack(
        "<ii1sii2fii1s", 1, 1, b"w", 2, 2, 2 * 2 / 64, 6 * 2 / 64, 2, 1, b"d"
    )


def test_entries_that_saw_nothing_are_left_out_aloud(tmp_path, caplog):
    imatrix = small()
    imatrix.entries["blk.1.ffn_up_exps.weight"] = Entry(
        np.zeros((4, 8)), np.zeros(4, dtype=np.int64)
    )
    with caplog.at_level(logging.WARNING):
        save_imatrix(imatrix, tmp_path / "x.dat")
    assert (
        "blk.1.ffn_up_exps.weight" in caplog.text
        and len(load_imatrix(tmp_path / "x.dat").entries) == 2
    )
    save_imatrix(imatrix, tmp_path / "x.gguf")
    assert (
        load_imatrix(tmp_path / "x.gguf").importance("blk.1.ffn_up_exps.weight", (4, 2, 8)) == 1
    ).all()


def test_files_of_the_reference():
    folder = shared("golden/tools/imatrix")
    legacy, handmade = (
        load_imatrix(folder / "tiny-moe.c256x3.dat"),
        load_imatrix(folder / "tiny-moe.handmade.gguf"),
    )
    assert (
        set(legacy.entries) == set(handmade.entries)
        and legacy.chunk_count == handmade.chunk_count == 3
    )
    for name in legacy.entries:
        shape = (4, 64, 64) if "_exps" in name else (64, 64)
        np.testing.assert_allclose(
            legacy.importance(name, shape), handmade.importance(name, shape), rtol=1e-5
        )
    assert load_imatrix(folder / "mergeAB_plus1chunk.dat").chunk_count == 5
    assert "output.weight" in load_imatrix(folder / "tiny-llama-untied.c256x4.dat").entries


@pytest.mark.parametrize(
    "have, asked",
    [
        ("ffn_up_exps", "ffn_gate_exps"),
        ("ffn_up_exps", "ffn_gate_up_exps"),
        ("ffn_gate_up_exps", "ffn_up_exps"),
        ("ffn_gate_up_exps", "ffn_gate_exps"),
        ("ffn_gate_exps", "ffn_up_exps"),
        ("ffn_up", "ffn_gate"),
        ("attn_kv_b", "attn_v_b"),
    ],
)
def test_statistics_of_the_same_input_stand_in(have, asked):
    imatrix = Imatrix({f"blk.3.{have}.weight": Entry(np.ones((1, 8)), np.array([2]))})
    assert (imatrix.importance(f"blk.3.{asked}.weight", (2, 8)) == 0.5).all()
    assert imatrix.importance(f"blk.2.{asked}.weight", (2, 8)) is None
    assert (
        imatrix.importance("blk.3.ffn_down.weight", (2, 8)) is None
        and imatrix.importance("output", (2, 8)) is None
    )


def test_sizes_that_do_not_fit(caplog):
    imatrix = small()
    for name, shape in (
        (EXPERTS, (4, 2, 16)),
        (EXPERTS, (2, 8)),
        (EXPERTS, (2, 4, 16)),
        ("blk.0.attn_q.weight", (2, 16)),
    ):
        with pytest.raises(ImatrixError, match="values"):
            imatrix.importance(name, shape)
    imatrix.entries["token_embd.weight"] = Entry(np.ones((1, 4)), np.array([1]))
    assert imatrix.importance("token_embd.weight", (2, 8)) is None and "not used" in caplog.text


def dat(
    name=b"w",
    name_length=None,
    ncall=1,
    n_values=None,
    values=(1.0, 2.0),
    n_entries=1,
    copies=1,
    tail=b"",
) -> bytes:
    entry = struct.pack("<i", len(name) if name_length is None else name_length) + name
    entry += (
        struct.pack("<ii", ncall, len(values) if n_values is None else n_values)
        + np.array(values, dtype="<f4").tobytes()
    )
    return struct.pack("<i", n_entries) + entry * copies + tail


@pytest.mark.parametrize(
    "content, error, message",
    [
        (b"", TruncatedFileError, "is empty"),
        (dat(n_entries=-1), ImatrixError, "number of entries would be -1"),
        (dat(n_entries=0), ImatrixError, "number of entries would be 0"),
        (b"The room was quiet.\n", ImatrixError, "not an importance matrix: .*text 'The room was"),
        ("größer als alles andere hier".encode(), ImatrixError, "begins with the text 'größer als"),
        (b"PK\x03\x04" + bytes(60), ImatrixError, "not an importance matrix: .* be 67324752"),
        (dat(n_entries=2), TruncatedFileError, "length of the name"),
        (dat(name_length=-1), ImatrixError, "length of the first name would be -1"),
        (dat(name_length=2**31 - 1), ImatrixError, "2147483647"),
        (dat(n_values=0), ImatrixError, "is 0"),
        (dat(n_values=-2), ImatrixError, "is -2"),
        (dat(n_values=2**31 - 1), TruncatedFileError, "2147483647 values"),
        (dat(ncall=-1), ImatrixError, "ncall is -1"),
        (dat(values=(1.0, np.nan)), ImatrixError, "'w'.*value 1 is not finite"),
        (dat(values=(-1.0, 1.0)), ImatrixError, "not negative"),
        (dat(n_entries=2, copies=2), ImatrixError, "twice"),
        (dat(tail=struct.pack("<ii", 1, 5) + b"ab"), TruncatedFileError, "data set"),
        (dat(tail=struct.pack("<ii", 1, 1) + b"abc"), ImatrixError, "2 bytes too many"),
    ],
)
def test_damaged_dat(tmp_path, content, error, message):
    (tmp_path / "x.dat").write_bytes(content)
    with pytest.raises(error, match=message):
        load_imatrix(tmp_path / "x.dat")


def test_odd_but_valid_dat(tmp_path):
    for content in (
        dat(),
        dat(ncall=0),
        dat(values=(0.0, 0.0)),
        dat(tail=struct.pack("<ii", 7, 0)),
    ):
        (tmp_path / "x.dat").write_bytes(content)
        assert np.isfinite(load_imatrix(tmp_path / "x.dat").importance("w", (3, 2))).all()
    with pytest.raises(NotFoundError):
        load_imatrix(tmp_path / "none.dat")


@pytest.mark.parametrize(
    "tensors, metadata, message",
    [
        ({"w.in_sum2": (2, 4)}, {}, "no matching w.counts"),
        ({"w.counts": (2, 1)}, {}, "no matching w.in_sum2"),
        ({"w.in_sum2": (2, 4), "w.counts": (3, 1)}, {}, "mismatched"),
        ({"w.in_sum2": (4, 4), "w.counts": (2, 1)}, {}, "mismatched"),
        ({"w": (2, 4)}, {}, "no entries"),
        (
            {"w.in_sum2": (2, 4), "w.counts": (2, 1)},
            {"imatrix.chunk_size": None},
            "chunk_size missing",
        ),
        ({"w.in_sum2": (2, 4), "w.counts": (2, 1)}, {"general.type": string("model")}, "'model'"),
        ({"w.in_sum2": (2, 4, "F16"), "w.counts": (2, 1)}, {}, "is F16"),
        ({"w.in_sum2": (2, 4, np.inf), "w.counts": (2, 1)}, {}, "not finite"),
        ({"w.in_sum2": (2, 4), "w.counts": (2, 1, -1)}, {}, "not negative"),
        ({"w.in_sum2": (2, 4), "w.counts": (2, 1, 1e30)}, {}, "a count is 1e\\+30"),
    ],
)
def test_damaged_gguf(tmp_path, tensors, metadata, message):
    infos, values = [], []
    for name, (rows, cols, *special) in tensors.items():
        f16 = special == ["F16"]
        infos.append(TensorInfo(name, (rows, cols), TYPES["F16" if f16 else "F32"]))
        values.append(
            np.full(
                (rows, cols), 1 if f16 or not special else special[0], dtype="<f2" if f16 else "<f4"
            )
        )
    keys = {
        "general.type": string("imatrix"),
        "imatrix.datasets": array(ValueType.STRING, ["a"]),
        "imatrix.chunk_count": u32(1),
        "imatrix.chunk_size": u32(1),
    } | metadata
    with GGUFWriter(
        tmp_path / "x.gguf", {key: value for key, value in keys.items() if value is not None}, infos
    ) as writer:
        for info, data in zip(infos, values):
            writer.write(info, data)
    with pytest.raises(ImatrixError, match=message):
        load_imatrix(tmp_path / "x.gguf")


def test_inputs_that_are_not_finite(moe):
    with (
        load_model(moe / "moe.gguf") as model,
        pytest.raises(ImatrixError, match="blk.0.attn_q.weight.*not finite"),
    ):
        Collector(model)("blk.0.attn_q.weight", torch.full((3, 4), torch.inf), None)


def test_command(moe, tmp_path, capsys):
    words = [
        "imatrix",
        "--device",
        "cpu",
        "-m",
        str(moe / "moe.gguf"),
        "-f",
        str(moe / "text.txt"),
        "-c",
        str(N_CTX),
        "--chunks",
        "3",
    ]
    assert main([*words, "-o", str(tmp_path / "a.gguf"), "--process-output"]) == 0
    out, err = capsys.readouterr()
    assert (
        out.startswith("[1]")
        and "9 entries from 3 chunks of 32 tokens" in out
        and "tokens/s" in err
    )
    assert main([*words, "-o", str(tmp_path / "b"), "--no-ppl"]) == 0
    assert "[1]" not in capsys.readouterr().out
    assert (
        load_imatrix(tmp_path / "a.gguf").chunk_size == N_CTX
        and "output.weight" not in load_imatrix(tmp_path / "b").entries
    )
    assert (
        main([*words, "-o", str(moe / "moe.gguf")]) == 1 and "same file" in capsys.readouterr().err
    )
    assert (
        main([*words[:-2], "-c", "4096", "-o", str(tmp_path / "c")]) == 1
        and "needs at least 8192" in capsys.readouterr().err
    )
    with pytest.raises(UsageError):
        save_imatrix(small(), tmp_path / "x", "csv")
    with pytest.raises(IqforgeError, match="nothing to write"):
        save_imatrix(Imatrix(), tmp_path / "x.gguf")
