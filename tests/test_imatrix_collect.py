"""Collecting importance matrices: several texts, resuming, and the reference's numbers per
expert.
"""

from __future__ import annotations

import re

import iqforge
import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import EvaluationError, UsageError
from iqforge.imatrix.collecting import collect
from iqforge.imatrix.files.load import load_imatrix
from iqforge.imatrix.similarity import LayerSimilarity
from iqforge.imatrix.texts import Text
from iqforge.runtime.layers.block import Block
from iqforge.runtime.model import load_model

from .shared import shared
from .tiny_checkpoint import PROSE, make_tiny_qwen3moe
from .tiny_model import write_gguf

N_CTX = 32
EXPERTS, DENSE = "blk.0.ffn_up_exps.weight", "blk.0.attn_q.weight"
OTHER = " ".join(reversed(PROSE.split()))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collect")
    make_tiny_qwen3moe(folder / "hf", n_experts=16, n_layers=1)
    with CheckpointSource(open_checkpoint(folder / "hf")) as source:
        write_gguf(folder / "moe.gguf", source)
    iqforge.merge_gate_up(folder / "moe.gguf", folder / "merged.gguf")
    (folder / "a.txt").write_text(PROSE * 2)
    (folder / "b.txt").write_text(OTHER * 2)
    return folder


def tokens_by_score(model, text: str) -> list[int]:
    """Return the tokens of a vocabulary with scores: of all neighbours that make a known piece,
    those with the best score are joined, repeatedly.
    """
    tokens, scores = (
        model.source.metadata[f"tokenizer.ggml.{key}"].data for key in ("tokens", "scores")
    )
    known, result = {piece: token for token, piece in enumerate(tokens)}, [1]
    for word in ("\u2581" + text.replace(" ", "\u2581")).split("\u2581")[1:]:
        pieces = ["\u2581", *word]
        while pairs := [
            (scores[known[a + b]], -i)
            for i, (a, b) in enumerate(zip(pieces, pieces[1:]))
            if a + b in known
        ]:
            at = -max(pairs)[1]
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        result += [
            known[piece if piece in known else f"<0x{ord(piece[0]):02X}>"] for piece in pieces
        ]
    return result


def test_numbers_per_expert_are_those_of_the_reference(monkeypatch):
    """The numbers are those of the reference's unfused path, which keeps keys and values in 16
    bits.

    In blocks with experts of architecture llama, ik_llama.cpp (8337e4c) adds the normalised input
    of the experts to what they give, where Mixtral adds the input itself (`build_llama` passes the
    one to `llm_build_moe_ffn` with `add_input`). Ours does as Mixtral, as tests/test_runtime.py has
    it; here the same is done as there, so that the second layer can be compared.
    """

    def as_the_reference(block: Block, h: torch.Tensor, batch) -> torch.Tensor:
        mixer, ffn = block.branches
        h = h + mixer(h, batch)
        x = h if ffn.norm is None else ffn.norm(h)
        return x + ffn.module(x)

    monkeypatch.setattr(Block, "__call__", as_the_reference)
    theirs = load_imatrix(shared("golden/tools/imatrix/tiny-moe.c256x3.dat"))
    text = shared("golden/tools/eval/text.txt").read_text()
    text = text.removesuffix("\n")
    with load_model(shared("golden/tools/gguf/tiny-moe-f16.gguf")) as model:
        ours = collect(model, [Text(tokens_by_score(model, text))], n_ctx=256, chunks=3)
    assert set(ours.entries) == set(theirs.entries) and ours.chunk_count == theirs.chunk_count == 3
    for name, entry in ours.entries.items():
        shape = (4, 64, 64) if "_exps" in name else (64, 64)
        assert entry.counts.sum() == (3 * 256 * 2 if "_exps" in name else 3 * 256)
        np.testing.assert_allclose(
            ours.importance(name, shape),
            theirs.importance(name, shape),
            rtol=3e-3 if "attn_output" in name else 2e-3,
            err_msg=name,
        )


def test_a_vocabulary_with_scores_is_cut_as_the_reference_cuts_it():
    from iqforge.runtime.evaluate.base_file import BaseFile

    tokens = BaseFile(shared("golden/tools/eval/base.c256x2.kld")).tokens.reshape(-1).tolist()
    with load_model(shared("golden/tools/gguf/tiny-moe-f16.gguf")) as model:
        assert (
            tokens_by_score(model, shared("golden/tools/eval/text.txt").read_text())[: len(tokens)]
            == tokens
        )


def test_several_texts_each_in_its_own_chunks(moe):
    with load_model(moe / "moe.gguf") as model:
        a, b = (collect(model, text, n_ctx=N_CTX, chunks=3) for text in (PROSE, OTHER))
        both = collect(model, [Text(PROSE, "a"), Text(OTHER, "b")], n_ctx=N_CTX, chunks=3)
        doubled = collect(
            model, [Text(PROSE, "a", 2), Text(OTHER, "b", 0.25)], n_ctx=N_CTX, chunks=3
        )
        with pytest.raises(EvaluationError):
            collect(model, [Text(PROSE), Text("short")], n_ctx=N_CTX)
    assert (both.chunk_count, both.datasets) == (6, ("a", "b"))
    for name, entry in both.entries.items():
        x, y, weighted = a.entries[name], b.entries[name], doubled.entries[name]
        assert (entry.counts == x.counts + y.counts).all() and (x.sums != y.sums).any()
        np.testing.assert_allclose(entry.sums, x.sums + y.sums, rtol=1e-6)
        counts = 2 * x.counts + 0.25 * y.counts
        assert ((weighted.counts > 0) == (counts > 0)).all() and np.abs(
            weighted.counts - counts
        ).max() <= 1
        seen = counts > 0
        np.testing.assert_allclose(
            weighted.means[seen],
            ((2 * x.sums + 0.25 * y.sums) / counts.clip(0.25)[:, None])[seen],
            rtol=1e-6,
        )


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_weights_that_are_none(weight):
    with pytest.raises(UsageError, match="positive"):
        Text(PROSE, weight=weight)


def test_resuming_where_a_run_stopped(moe):
    """The run stops within the second of two texts, with a weight that makes counts fractional. The
    sums are those of a run that was not stopped, to the bit.
    """
    texts, kept, seen = [Text(PROSE, "a"), Text(OTHER, "b", 0.3)], [], []
    options = {
        "n_ctx": N_CTX,
        "chunks": 5,
        "batch_tokens": 2 * N_CTX,
        "on_perplexity": lambda p: seen.append(p.perplexity),
    }
    with load_model(moe / "moe.gguf") as model:
        whole = collect(model, texts, **options, on_pass=lambda done, take: kept.append(take()))
        # No pass has chunks of both texts.
        assert [snapshot.imatrix.chunk_count for snapshot in kept] == [
            2,
            4,
            5,
            7,
            9,
        ]
        for start in kept:
            rest = collect(model, texts, **options, start=start)
            assert rest.chunk_count == 10
            for name, entry in whole.entries.items():
                assert np.array_equal(rest.entries[name].sums, entry.sums), name
                assert np.array_equal(rest.entries[name].counts, entry.counts)
    assert len(seen) == 6 and len(set(seen)) == 1


def test_command_with_several_texts(moe, tmp_path, capsys):
    words = [
        "imatrix",
        "--device",
        "cpu",
        "-m",
        str(moe / "moe.gguf"),
        "-c",
        str(N_CTX),
        "--chunks",
        "2",
    ]
    a, b, out = str(moe / "a.txt"), str(moe / "b.txt"), str(tmp_path / "x.gguf")
    assert main([*words, "-f", a, "-f", b, "--text-weight", "2", "-o", out]) == 0
    printed, told = capsys.readouterr()
    assert re.search(
        r"\[4\]\d+\.\d{4},\nFinal estimate: PPL = \d+\.\d{4} \+/- \d+\.\d{5}\n", printed
    )
    assert re.search(r"\d+ tokens/s\n\d+\.\d\d MiB, \d+\.\d s in all\n", told)
    written = load_imatrix(out)
    assert (
        written.datasets == (a, b)
        and written.chunk_count == 4
        and written.entries[DENSE].counts.tolist() == [6 * N_CTX]
    )
    again = iqforge.collect_imatrix(
        moe / "moe.gguf", [a, b], text_weights=[1, 2], n_ctx=N_CTX, chunks=2
    )
    assert again.entries[DENSE].counts.tolist() == [6 * N_CTX]
    for fused in ("-fmoe", "-no-fmoe", "-muge"):
        assert main([*words, "-f", a, "-o", str(tmp_path / f"{fused}.gguf"), fused]) == 0
    plain = load_imatrix(tmp_path / "-fmoe.gguf")
    for fused in ("-no-fmoe", "-muge"):
        for name, entry in load_imatrix(tmp_path / f"{fused}.gguf").entries.items():
            np.testing.assert_allclose(entry.sums, plain.entries[name].sums, rtol=1e-5)
    with pytest.raises(SystemExit):
        main([*words, "--text-weight", "2", "-f", a, "-o", out])
    assert "must come after its -f TEXT" in capsys.readouterr().err
    with pytest.raises(UsageError, match="1 weights"):
        iqforge.collect_imatrix(moe / "moe.gguf", [a, b], text_weights=[1])


def test_layer_similarity_is_the_reference_s(moe):
    with load_model(shared("golden/tools/gguf/tiny-llama-untied-f16.gguf")) as model:
        similarity = LayerSimilarity(2)
        tokens = tokens_by_score(model, shared("golden/tools/eval/text.txt").read_text())
        collect(model, tokens, n_ctx=256, chunks=3, similarity=similarity)
    assert similarity.rows.tolist() == [768, 768]
    for kind, values in (
        ("layer", (0.820307, 0.827809)),
        ("attention", (0.93692, 0.939119)),
        ("ffn", (0.875105, 0.88896)),
    ):
        assert sorted(similarity.means(kind)) == pytest.approx(values, abs=1e-3), kind


def test_layer_similarity_is_the_mean_cosine(moe):
    """It is so for passes of two chunks, and for a run that resumes in the middle."""
    seen, kept = {}, []

    def note(name, x, experts):
        seen.setdefault(name, []).append(x.clone().double())

    with load_model(moe / "moe.gguf") as model:
        similarity, resumed = LayerSimilarity(1), LayerSimilarity(1)
        options = {"n_ctx": N_CTX, "chunks": 4, "batch_tokens": 2 * N_CTX}
        with model.observe(note):
            collect(
                model,
                PROSE,
                **options,
                similarity=similarity,
                process_output=True,
                on_pass=lambda done, take: kept.append(take()),
            )
        collect(model, PROSE, **options, similarity=resumed, process_output=True, start=kept[0])
    before, between, after = (
        torch.cat(seen[name]) for name in (DENSE, "blk.0.ffn_gate_inp.weight", "output.weight")
    )
    for kind, a, b in (
        ("layer", before, after),
        ("attention", before, between),
        ("ffn", between, after),
    ):
        assert similarity.means(kind)[0] == pytest.approx(
            float(torch.cosine_similarity(a, b).mean()), abs=1e-6
        )
        assert resumed.means(kind)[0] == similarity.means(kind)[0]
    assert similarity.lines()[:2] == ["", "======================== sorted layer importances"]
    assert (
        re.fullmatch(r"  0: Layer   0, <cos_sim> = -?\d\.\d+", similarity.lines()[2])
        and len(similarity.lines()) == 9
    )


@pytest.mark.parametrize("merged", [False, True])
def test_every_token_with_every_expert(moe, merged):
    """The model's results do not change, and the sums are those of all experts applied to all
    rows.
    """
    seen = {}
    names = (
        ["ffn_gate_up_exps", "ffn_down_exps"]
        if merged
        else ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]
    )

    def note(name, x, experts):
        if experts is None:
            seen.setdefault(name, []).append(x.double())

    with load_model(moe / ("merged.gguf" if merged else "moe.gguf")) as model:
        options, kept = {"n_ctx": N_CTX, "chunks": 4, "batch_tokens": 2 * N_CTX}, []
        plain = collect(model, PROSE, **options, on_perplexity=kept.append)
        with model.observe(note):
            wide = collect(
                model, PROSE, **options, cold_experts="all-experts", on_perplexity=kept.append
            )
        experts = model.network.blocks[0].branches[1].module.experts
        matrices = [experts.gate_up] if merged else [experts.gate, experts.up]
        rows = torch.cat(seen["blk.0.ffn_gate_inp.weight"])
        for expert in range(16):
            gate_up = torch.cat([next(m.matrices[expert].parts())[1].double() for m in matrices])
            gate, up = (rows @ gate_up.T).chunk(2, dim=-1)
            inner = torch.nn.functional.silu(gate) * up
            for name in names:
                expected = (inner if "down" in name else rows).square().sum(0).numpy()
                np.testing.assert_allclose(
                    wide.entries[f"blk.0.{name}.weight"].sums[expert],
                    expected,
                    rtol=1e-4,
                    atol=1e-9,
                )
    assert kept[0].mean_nll == kept[1].mean_nll and set(plain.entries) == set(wide.entries)
    for name, entry in plain.entries.items():
        if "_exps" in name:
            assert (
                entry.counts.max() < 4 * N_CTX
                and wide.entries[name].counts.tolist() == [4 * N_CTX] * 16
            )
        else:
            assert np.array_equal(entry.sums, wide.entries[name].sums)
