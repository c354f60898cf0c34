"""Attention of prompts without flash attention, with kernels in torch, against that of a CPU."""

from dataclasses import replace

import pytest
import torch
from iqforge.runtime.cuda.prompt.mixers import scores
from iqforge.runtime.layers.attend import attend_with_scores
from iqforge.runtime.layers.specs import AttentionSpec
from torch.nn import functional as F

from . import prompt_on_cpu


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(
    ("length", "softcap", "window"), [(64, 0.0, 0), (64, 30.0, 0), (320, 0.0, 5), (320, 30.0, 0)]
)
def test_attention(monkeypatch, length, softcap, window, with_sinks):
    """Of two sequences, whose last 9 of 12 positions are new."""
    prompt_on_cpu.install(monkeypatch)
    g = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(2, rows, heads, length, generator=g).half()
        for rows, heads in ((9, 4), (12, 2), (12, 2))
    )
    sinks = 3 + torch.randn(4, generator=g) if with_sinks else None
    spec = AttentionSpec(4, 2, length, length, length**-0.5, window, softcap, with_sinks)
    found = scores.attend(q, k, v, spec, sinks)
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    expected = attend_with_scores(q.float(), k.float(), v.float(), spec.scale, **options)
    assert (found.float() - expected).abs().max() < 4e-3
    # To a buffer of another half, with gates that follow each head of queries.
    gates = torch.randn(18, 4, 2, length, generator=g).bfloat16()[:, :, 1]
    soft = replace(spec, softplus_gates=True)
    for s, given in ((spec, None), (spec, gates), (soft, gates)):
        out = torch.full((18, 4 * length), torch.nan).bfloat16()
        assert scores.attend(q, k, v, s, sinks, out, given) is out
        factor = 1.0
        if given is not None:
            factor = F.softplus(given.float()) if s is soft else given.float().sigmoid()
        error = (out.float().view(gates.shape) - expected.reshape(gates.shape) * factor).abs()
        assert error.max() < 2e-2
