"""Embeddings: pooled hidden states, norms, and what the command prints."""

from __future__ import annotations

import json
from pathlib import Path

import iqforge
import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.errors import EvaluationError, UsageError
from iqforge.runtime.evaluate.embedding import normalized, pooling_of, similarity

DEMO = Path(iqforge.__file__).parent / "demo" / "model"
TEXTS = ["The function returns a list", "A list of functions"]


@pytest.fixture(scope="module")
def model():
    with iqforge.load_model(DEMO) as opened:
        yield opened


def test_pooling(model):
    tokens = model.tokenizer.encode(TEXTS[0], add_special=True)
    hidden = model.hidden(torch.tensor([tokens]))[0].numpy()
    for pooling, expected in (
        ("none", hidden),
        ("mean", hidden.mean(axis=0)),
        ("cls", hidden[0]),
        ("last", hidden[-1]),
    ):
        [found] = iqforge.embed(model, TEXTS[0], pooling=pooling, normalize=-1)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    # The head turns the last hidden state into logits.
    logits = model.logits(torch.from_numpy(iqforge.embed(model, TEXTS[0], normalize=-1)[0]))
    np.testing.assert_allclose(logits, model.forward(tokens), rtol=1e-4, atol=1e-4)
    assert [len(x) for x in iqforge.embed(str(DEMO), TEXTS, pooling="last")] == [len(hidden[0])] * 2


def test_norms():
    x = np.array([[3.0, -4.0], [0.0, 0.0]])
    for how, expected in (
        (-1, [3, -4]),
        (0, [24570, -32760]),
        (1, [3 / 7, -4 / 7]),
        (2, [0.6, -0.8]),
        (3, [3 / 91 ** (1 / 3), -4 / 91 ** (1 / 3)]),
    ):
        np.testing.assert_allclose(normalized(x, how), [expected, [0, 0]], rtol=1e-6)
    assert np.isfinite(normalized(np.full(4, 1e30), 9)).all()


def test_cosines():
    a, b, zero = np.array([1.0, 0]), np.array([1.0, 1]), np.zeros(2)
    assert similarity(a, b) == pytest.approx(0.5**0.5)
    assert (similarity(a, a), similarity(a, zero), similarity(zero, zero)) == (1, 0, 1)


def test_the_pooling_of_a_file(model, monkeypatch):
    assert pooling_of(model, None) == "none" and pooling_of(model, "cls") == "cls"
    for stored, expected in ((1, "mean"), (2, "cls"), (3, "last")):
        monkeypatch.setattr(model.hyperparameters, "integer", lambda *_, value=stored: value)
        assert pooling_of(model, None) == expected
    monkeypatch.setattr(model.hyperparameters, "integer", lambda *_: 4)
    with pytest.raises(UsageError, match="pooling is rank"):
        pooling_of(model, None)


def test_refusals(model, monkeypatch):
    with pytest.raises(UsageError, match="pooling"):
        iqforge.embed(model, "x", pooling="sum")
    monkeypatch.setattr(model.tokenizer, "encode", lambda *_, **__: [])
    with pytest.raises(EvaluationError, match="no tokens"):
        iqforge.embed(model, "")


def test_a_file_without_text_is_named(capsys, tmp_path):
    (tmp_path / "blank.txt").write_text("\n\n")
    assert main(["embedding", "-m", str(DEMO), "-f", str(tmp_path / "blank.txt")]) == 1
    assert "blank.txt: there is no text" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["embedding", "generate", "tokenize", "perplexity"])
def test_a_prompt_that_is_not_utf8(command, capsys):
    assert main([command, "-m", str(DEMO), "-p", "hi \udcff"]) == 1  # what Python makes of 0xff
    assert "error: -p is not UTF-8 after 3 characters\n" in capsys.readouterr().err


def run(capsys, *words: str) -> str:
    assert main(["embedding", "-m", str(DEMO), "--device", "cpu", *words]) == 0
    return capsys.readouterr().out


def test_command(model, capsys, tmp_path):
    expected = iqforge.embed(model, TEXTS, pooling="last")
    two = ["-p", "\\n".join(TEXTS), "--pooling", "last"]
    for form in ("array", "json", "json+"):
        found = json.loads(run(capsys, *two, "--embd-output-format", form))
        if form != "array":
            cosines = found.get("cosineSimilarity")
            assert (cosines is not None) == (form == "json+")
            found = [one["embedding"] for one in found["data"]]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    raw = run(capsys, *two, "--embd-output-format", "raw").splitlines()
    np.testing.assert_allclose([list(map(float, row.split())) for row in raw], expected, rtol=1e-5)
    assert cosines is not None and cosines[0][0] == 1
    assert cosines[0][1] == pytest.approx(similarity(*expected), abs=1e-6)
    shown = run(capsys, *two)
    assert f"{cosines[0][1]:6.2f}" in shown and shown.startswith("embedding 0: ")
    assert len(run(capsys, "-p", TEXTS[0], "--pooling", "last").split()) == 2 + len(expected[0])
    (tmp_path / "texts.txt").write_text("|".join(TEXTS))
    words = ["-f", str(tmp_path / "texts.txt"), "--embd-separator", "|", "--pooling", "last"]
    assert run(capsys, *words) == shown
    n = len(model.tokenizer.encode(TEXTS[0], add_special=True))
    assert run(capsys, "-p", TEXTS[0]).count(", token ") == n
    integers = run(capsys, "-p", TEXTS[0], "--pooling", "mean", "--embd-normalize", "0")
    assert max(abs(int(word)) for word in integers.split()[2:]) == 32760
    assert main(["embedding", "-m", str(DEMO), "-p", ""]) == 1
