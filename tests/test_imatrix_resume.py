"""Interrupted and killed collections resume to the same bytes; other settings are refused."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import time
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.errors import ImatrixError, IqforgeError, UsageError
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import TYPES
from iqforge.formats.values import ValueType, array, string, u32
from iqforge.imatrix.data import Entry, Imatrix, Snapshot
from iqforge.imatrix.files import saving
from iqforge.imatrix.files.load import load_imatrix, save_imatrix
from iqforge.imatrix.files.snapshot import load_snapshot, save_snapshot
from iqforge.imatrix.similarity import LayerSimilarity

from .imatrices import N_CTX, UP, tiny_llama_file
from .tiny_checkpoint import PROSE


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama_file(tmp_path_factory.mktemp("files"))


def settings(model: Path) -> dict:
    return {
        "model": model,
        "text": PROSE * 20,
        "n_ctx": N_CTX,
        "chunks": 60,
        "batch_tokens": 2 * N_CTX,
        "output_frequency": 4,
        "save_frequency": 25,
    }


# Text, because a new process cannot import this module from every place the tests
# may be run from.
COLLECT_SLOWLY = """
import iqforge, time
passes = 0
def slow(progress):
    global passes
    passes += 1
    # However late the signal comes, it comes before the end, if that is not near.
    time.sleep(0.005 if passes < 8 else 600)
iqforge.collect_imatrix(**options, resume=True, progress=slow)
"""


@pytest.mark.slow
def test_killed_and_gone_on(model, tmp_path):
    expected = tmp_path / "expected" / "x.gguf"
    expected.parent.mkdir()
    iqforge.collect_imatrix(**settings(model), out=expected)
    # The first pass that has 25, and 50.
    assert sorted(os.listdir(expected.parent)) == [
        "x.gguf",
        "x.gguf.at_26",
        "x.gguf.at_50",
    ]
    context, chance, out = (
        multiprocessing.get_context("forkserver"),
        random.Random(3),
        tmp_path / "x.gguf",
    )
    context.set_forkserver_preload(["iqforge.api", "iqforge.imatrix.collecting"])
    gone_on, started, options = 0, set(), settings(model) | {"out": out}
    for _ in range(8):
        process = context.Process(target=exec, args=(COLLECT_SLOWLY, {"options": options}))
        process.start()
        # Until it has written something new.
        while process.is_alive() and (not out.exists() or os.path.getmtime(out) in started):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.1))
        process.kill()  # SIGKILL
        process.join()
        started.add(os.path.getmtime(out))
        gone_on += Path(f"{out}.resume").exists()
    assert gone_on >= 3  # killed in the middle
    iqforge.collect_imatrix(**options, resume=True)
    for name in os.listdir(expected.parent):
        assert (tmp_path / name).read_bytes() == (expected.parent / name).read_bytes()
    assert not Path(f"{out}.resume").exists()


def test_another_run_does_not_go_on(model, tmp_path, caplog):
    out, options = tmp_path / "x.dat", settings(model) | {"chunks": 8}

    with pytest.raises(KeyboardInterrupt):
        iqforge.collect_imatrix(**options, out=out, progress=lambda p: interrupt(p.chunk == 7))
    assert Path(f"{out}.resume").exists() and load_imatrix(out).chunk_count == 4
    with pytest.raises(
        ImatrixError,
        match="x.dat.resume: is a snapshot of another run .* n_ctx: 32 then, 64 now;"
        " process_output: False then, True now",
    ):
        iqforge.collect_imatrix(
            **options | {"n_ctx": 64, "process_output": True}, out=out, resume=True
        )
    with pytest.raises(ImatrixError, match="text: [0-9a-f]{16} then, [0-9a-f]{16} now$"):
        iqforge.collect_imatrix(**options | {"text": PROSE}, out=out, resume=True)
    with pytest.raises(ImatrixError, match="holds 4 chunks, of which only 3 are asked for"):
        iqforge.collect_imatrix(**options | {"chunks": 3}, out=out, resume=True)
    seen = []
    # Another number of chunks is not another run, as the finished part is the same.
    with caplog.at_level("INFO"):
        iqforge.collect_imatrix(
            **options | {"chunks": 6},
            out=out,
            resume=True,
            progress=lambda p: seen.append(p.chunk),
        )
    assert seen == [5, 6] and "after 4 chunks" in caplog.text and load_imatrix(out).chunk_count == 6
    with pytest.raises(UsageError):
        iqforge.collect_imatrix(**options, resume=True)
    with pytest.raises(UsageError):
        iqforge.collect_imatrix(**options | {"save_frequency": -1}, out=out)


def test_snapshots_keep_every_bit(tmp_path):
    """They also keep fractional counts, which come from weights and do not occur in finished
    files.
    """
    sums = np.random.default_rng(1).random((2, 3)) * np.array([[1e-300], [1e300]])
    snapshot = Snapshot(
        Imatrix({UP: Entry(sums, np.array([0.7, 0]))}, 3, N_CTX, ("a", "b")),
        {"perplexity": np.array([1 / 3, 0.1])},
    )
    save_snapshot(snapshot, tmp_path / "x", {"what": "this"})
    read = load_snapshot(tmp_path / "x", {"what": "this"})
    assert np.array_equal(read.imatrix.entries[UP].sums, sums) and read.imatrix.entries[
        UP
    ].counts.tolist() == [0.7, 0]
    assert (read.imatrix.chunk_count, read.imatrix.chunk_size, read.imatrix.datasets) == (
        3,
        N_CTX,
        ("a", "b"),
    )
    assert np.array_equal(read.sums["perplexity"], snapshot.sums["perplexity"])
    whole = read.imatrix.whole().entries[UP]
    assert whole.counts.tolist() == [1, 0] and np.allclose(
        whole.means[0], sums[0] / 0.7, rtol=1e-12
    )
    with pytest.raises(
        ImatrixError, match="what: this then, nothing now; more: nothing then, that now"
    ):
        load_snapshot(tmp_path / "x", {"more": "that"})
    save_imatrix(
        Imatrix({UP: Entry(np.ones((1, 2)), np.array([1]))}, 1, N_CTX), tmp_path / "y.gguf"
    )
    with pytest.raises(ImatrixError, match="is not a snapshot of an interrupted"):
        load_snapshot(tmp_path / "y.gguf", {})


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"w.in_sum2": (2, 3, "F64")}, "no such tensor"),
        ({"w.in_sum2": (2, 3, "F64"), "w.counts": (3, 1, "F64")}, "2 rows of sums and 3 counts"),
        ({"w.in_sum2": (2, 3, "F32"), "w.counts": (2, 1, "F64")}, "is F32, expected F64"),
    ],
)
def test_damaged_snapshots(tmp_path, tensors, message):
    infos = [
        TensorInfo(name, tuple(shape), TYPES[type]) for name, (*shape, type) in tensors.items()
    ]
    keys = {
        "general.type": string("imatrix-snapshot"),
        "imatrix.datasets": array(ValueType.STRING, []),
        "imatrix.chunk_count": u32(1),
        "imatrix.chunk_size": u32(N_CTX),
    }
    with GGUFWriter(tmp_path / "x", keys, infos) as writer:
        for info in infos:
            writer.write(info, np.zeros(info.n_bytes, dtype=np.uint8))
    with pytest.raises(IqforgeError, match=message):
        load_snapshot(tmp_path / "x", {})


@pytest.mark.parametrize(
    "options, damage, message",
    [
        ({}, {"sums": {}}, "x.dat.resume: has 0 sums 'perplexity', expected 3"),
        ({}, {"sums": {"perplexity": np.zeros(2)}}, "has 2 sums 'perplexity', expected 3"),
        (
            {"similarity": LayerSimilarity(1)},
            {"sums": {"perplexity": np.zeros(3)}},
            "has 0 sums 'similarity', expected 4",
        ),
        (
            {},
            {
                "imatrix": Imatrix(
                    {"blk.0.attn_q.weight": Entry(np.ones((1, 8)), np.array([1.0]))},
                    4,
                    N_CTX,
                    ("a",),
                )
            },
            "attn_q.* has 8 values",
        ),
    ],
)
def test_snapshots_of_less_than_a_run(model, tmp_path, monkeypatch, options, damage, message):
    """Complete files of this run that are not its snapshots are refused."""
    out, options = tmp_path / "x.dat", settings(model) | {"chunks": 8} | options
    monkeypatch.setattr(
        saving,
        "save_snapshot",
        lambda snapshot, *rest: save_snapshot(dataclasses.replace(snapshot, **damage), *rest),
    )
    with pytest.raises(KeyboardInterrupt):
        iqforge.collect_imatrix(**options, out=out, progress=lambda p: interrupt(p.chunk == 7))
    with pytest.raises(ImatrixError, match=message):
        iqforge.collect_imatrix(**options, out=out, resume=True)


def test_several_texts_go_on(model, tmp_path):
    options = settings(model) | {
        "text": [PROSE * 3, PROSE[50:] * 4],
        "text_weights": [0.3, 2],
        "chunks": 9,
        "output_frequency": 2,
    }
    iqforge.collect_imatrix(**options, out=tmp_path / "expected.gguf")
    for chunk in (7, 13, 16):  # in the first text, in the second, and again
        with pytest.raises(KeyboardInterrupt):
            iqforge.collect_imatrix(
                **options,
                out=tmp_path / "x.gguf",
                resume=True,
                progress=lambda p: interrupt(p.chunk == chunk),
            )
    with pytest.raises(ImatrixError, match="chunks: 9 then, 10 now"):
        iqforge.collect_imatrix(**options | {"chunks": 10}, out=tmp_path / "x.gguf", resume=True)
    iqforge.collect_imatrix(**options, out=tmp_path / "x.gguf", resume=True)
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "expected.gguf").read_bytes()


def interrupt(now: bool) -> None:
    if now:
        raise KeyboardInterrupt
