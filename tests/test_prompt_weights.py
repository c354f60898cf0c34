"""Weights of prompts on the CPU (prompt_on_cpu.py): those that are not decoded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from iqforge.runtime.bench.shape import QKV
from iqforge.runtime.bench.shapes import SHAPES

from . import prompt_models
from .prompt_models import PRECISION, TOKENS, normed

opened = prompt_models.opened  # a fixture


@pytest.mark.parametrize("type, copied", [("F16", False), ("BF16", True)])
def test_weights_of_the_dtype_of_activations_are_read_where_they_are(
    monkeypatch, opened, type, copied
):
    """Also below each other, with biases, and of the last rows alone."""
    biased = replace(SHAPES["llama-tiny"], architecture="qwen2", biases=QKV)
    monkeypatch.setitem(SHAPES, "biased", biased)
    model, context, path = opened(f"biased:{type}")
    tokens = TOKENS[:1, :9]
    expected = model.hidden(tokens)[0]
    found = normed(model, path.run(tokens, 0)).clone()
    torch.testing.assert_close(found, expected, **PRECISION)
    last = normed(model, path.run(tokens, 0, last=True))
    torch.testing.assert_close(last, expected[-1:], **PRECISION)
    logits = path.logits(found)
    torch.testing.assert_close(logits, model.logits(expected), rtol=0.01, atol=0.03)
    assert ("weights" in context._buffers) == copied
