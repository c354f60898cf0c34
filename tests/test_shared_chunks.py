"""Ranks with the whole model that share the chunks of a text (`-sm data`): results do not depend on
how many there are.
"""

from __future__ import annotations

from pathlib import Path

import iqforge
import pytest
from iqforge.api import collect_imatrix
from iqforge.cli import main
from iqforge.errors import UsageError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.imatrix.similarity import LayerSimilarity
from iqforge.runtime.evaluate.perplexity import measure_perplexity
from iqforge.runtime.evaluate.turns import in_turns
from iqforge.runtime.model import Model

from .shared import shared
from .thread_ranks import on_ranks
from .torch_threads import torch_threads

CHUNKS = 7  # no multiple of the ranks
OPTIONS = {"n_ctx": 32, "batch_tokens": 64}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Ranks are threads here, which share the cores, and the last bits of a product of torch depend
    on how many threads it gets. Ranks of a program are processes.
    """
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    out = tmp_path_factory.mktemp("chunks") / "model.gguf"
    return iqforge.convert_model(shared("models/mini-qwen3moe"), out, "f32")


@pytest.fixture(scope="module")
def text():
    return shared("text/wiki.valid.txt").read_text(encoding="utf-8")[:6000]


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_perplexity_is_that_of_one_process(path, text, n_ranks):
    def work(rank, meeting):
        with Model(open_gguf(path), peers=meeting) as model:
            return measure_perplexity(model, text, chunks=CHUNKS, **OPTIONS)

    with Model(open_gguf(path)) as model:
        expected = measure_perplexity(model, text, chunks=CHUNKS, **OPTIONS)
    for found in on_ranks(n_ranks, work):
        assert found.running == expected.running
        assert (found.perplexity, found.n_scored) == (expected.perplexity, expected.n_scored)


@pytest.mark.parametrize("cold", ["prior", "all-experts"])
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_an_imatrix_has_the_same_bytes(path, text, tmp_path, n_ranks, cold):
    options = {"chunks": CHUNKS, "process_output": True, "cold_experts": cold, **OPTIONS}

    def work(rank, meeting):
        with Model(open_gguf(path), peers=meeting) as model:
            collect_imatrix(model, text, tmp_path / "several.gguf", dataset="text", **options)

    with Model(open_gguf(path)) as model:
        collect_imatrix(model, text, tmp_path / "one.gguf", dataset="text", **options)
    on_ranks(n_ranks, work)
    assert (tmp_path / "several.gguf").read_bytes() == (tmp_path / "one.gguf").read_bytes()


def test_passes_are_dealt_out_in_turn():
    seen = [[], []]

    def work(rank, meeting):
        return list(in_turns("abcde", lambda one: seen[rank].append(one) or one.upper(), meeting))

    expected = list(zip("abcde", "ABCDE", strict=True))
    assert on_ranks(2, work) == [expected, expected]
    assert seen == [["a", "c", "e"], ["b", "d"]]


def test_what_needs_all_chunks_is_refused(path, text, tmp_path):
    def work(rank, meeting):
        with Model(open_gguf(path), peers=meeting) as model:
            with pytest.raises(UsageError, match="-sm data"):
                measure_perplexity(model, text, save_logits=tmp_path / "base", **OPTIONS)
            with pytest.raises(UsageError, match="-sm data"):
                collect_imatrix(model, text, similarity=LayerSimilarity(2), dataset="", **OPTIONS)

    on_ranks(2, work)


def test_other_commands_refuse_it(capsys):
    assert main(["bench", "--synthetic", "llama-8b:IQ4_K", "-sm", "data", "-ts", "1,1"]) != 0
    assert "shares the chunks of a text, and bench has none" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["imatrix", pytest.param("perplexity", marks=pytest.mark.full)])
def test_commands_start_their_processes(path, text, tmp_path, capfd, monkeypatch, command):
    file = tmp_path / "text.txt"
    file.write_text(text)
    words = [command, "-m", str(path), "-f", str(file), "-c", "32", "-b", "64", "--chunks", "6"]
    words += ["--device", "cpu"]
    found = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for split in ([], ["-sm", "data", "-ts", "1,1"]):
        out = ["-o", str(tmp_path / f"{len(split)}.gguf")] if command == "imatrix" else []
        assert main([*words, *out, *split]) == 0
        lines = [line for line in capfd.readouterr().out.splitlines() if "PPL" in line]
        found.append((lines, *(Path(name).read_bytes() for name in out[1:])))
    assert found[0] == found[1] and found[0][0]
