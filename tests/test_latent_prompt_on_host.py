"""Kernels of latent attention in prompts without a GPU: compiled by g++, called as on a GPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.prompt import mla as prompt_mla
from iqforge.runtime.layers.rope import Rope

from . import prompt_on_cpu
from .kernels_on_host import RUN_LATENT_PROMPT, library

NOPE, ROPE, RANK, HEADS, TOKENS, SEQUENCES = 24, 16, 72, 3, 5, 2
NAMES = {"norm_rows": "norm", "latent_rows": "rows", "latent_heads": "heads", "latent_keys": "keys"}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Replace launches by calls of the kernels on the CPU, with the same arguments."""
    loaded = {}

    def function(spec, name, device):
        if spec.name not in loaded:
            folder = tmp_path / spec.name
            folder.mkdir()
            # The header for the CPU has a warp_sum already.
            defines = (*spec.defines, ("warp_sum", "prompt_warp_sum"))
            spec_ = prompt_mla.KernelSpec(spec.name, spec.sources, defines, spec.functions)
            loaded[spec.name] = library(folder, spec_, RUN_LATENT_PROMPT)
        return getattr(loaded[spec.name], NAMES[name])

    def launch(kernel, grid, block, *arguments, pdl):
        types = {np.int32: ctypes.c_int, np.int64: ctypes.c_longlong, np.float32: ctypes.c_float}
        kernel(
            *(
                ctypes.c_void_p(None if x is None else x.data_ptr())
                if x is None or isinstance(x, torch.Tensor)
                else types[type(x)](x)
                for x in arguments
            )
        )

    monkeypatch.setattr(prompt_mla, "function", function)
    monkeypatch.setattr(prompt_mla, "launch", launch)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels(compiled, half, stored):
    g = torch.Generator().manual_seed(0)
    random = lambda *size: torch.randn(*size, generator=g)  # noqa: E731
    total, width = SEQUENCES * TOKENS, RANK + ROPE
    cos, sin = Rope("norm", ROPE, 10000.0).angles(torch.arange(7, 7 + TOKENS))
    weight, factors = 1 + 0.1 * random(RANK), 1 + random(TOKENS).abs()
    joined = random(total, HEADS * (NOPE + ROPE) + width).to(half)
    q, kv = joined.split([HEADS * (NOPE + ROPE), width], 1)
    empty = lambda *size, dtype=stored: torch.full(size, float("nan"), dtype=dtype)  # noqa: E731

    def both(name, out, *arguments, at=None):
        """Compare with plain torch, within one rounding."""
        found, expected = out, out.clone()
        for module, to in ((prompt_mla, found), (prompt_on_cpu, expected)):
            place = list(arguments)
            place.insert(len(place) if at is None else at, to)
            getattr(module, name)(*place)
        close = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[out.dtype]
        torch.testing.assert_close(found, expected, rtol=close, atol=1e-5, equal_nan=True)
        return found

    both("norm_rows", empty(total, RANK, dtype=half), kv[:, :RANK], weight, 1e-6)
    for neox in (True, False):
        rows = both(
            "latent_rows", empty(total + 9, width), kv, weight, 1e-6, cos, sin, 4, neox, at=5
        )
        assert rows[4 : 4 + total].isfinite().all()
        assert rows[:4].isnan().all() and rows[4 + total :].isnan().all()
        for given in (None, factors):
            heads = empty(total, HEADS, NOPE + ROPE)
            assert both("latent_heads", heads, q, cos, sin, given, neox, at=4).isfinite().all()
    if stored != torch.float32:
        keys = both("latent_keys", empty(total, HEADS, NOPE + ROPE), rows[4 : 4 + total], ROPE)
        assert keys[..., :NOPE].isnan().all() and keys[..., NOPE:].isfinite().all()
