"""Matrices that have scales (`<name>.scale`), on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.cuda_kernels.layouts.table import packed_types
from iqforge.cuda_kernels.matvec import products as matvec
from iqforge.cuda_kernels.packed.decode import decode_matrix, decode_rows
from iqforge.cuda_kernels.prompt import rounded as prompt_rounded
from iqforge.formats.types import ggml_type
from iqforge.runtime.layers.ffn import gated
from iqforge.runtime.layers.specs import FFNSpec
from iqforge.runtime.model import load_model

from . import matvec_reference as reference
from .matvec_reference import EPS, normed, rounded, weights
from .tiny_cases import CASES, FAST, WIDE
from .tiny_model import scaled_gguf, write_gguf
from .tiny_models import HALF, make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


matrix, draw = partial(reference.matrix, device="cuda"), partial(reference.draw, device="cuda")
assert_close = partial(reference.assert_close, most=1e-4)


def poison(*shape):
    return torch.full(shape, float("nan"), device="cuda")


def scaled(name, rows, cols, seed, scale):
    return replace(matrix(name, rows, cols, seed=seed), scale=scale)


@pytest.mark.parametrize("name", packed_types())
def test_decoded(name):
    m, bare = scaled(name, 48, 768, 0, 0.3), matrix(name, 48, 768)
    exact = decode_matrix(bare, torch.float32) * 0.3
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(decode_matrix(m, dtype), exact.to(dtype))
    ids = torch.tensor([5, 0, 39], device="cuda")
    assert torch.equal(decode_rows(m, ids, torch.float32), exact[ids])
    if not m.type.is_float:
        codes, scales = torch.empty(48, 768, dtype=torch.int8, device="cuda"), poison(48)
        prompt_rounded.rounded_weights(bare, 0, codes, scales)
        again, times = torch.empty_like(codes), poison(48)
        prompt_rounded.rounded_weights(m, 0, again, times)
        assert torch.equal(codes, again) and torch.equal(times, scales * 0.3)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", packed_types())
def test_products(name, n):
    type, cols = ggml_type(name), 1024
    h, w = draw(n, cols), draw(cols, seed=2)
    ms = [scaled(name, rows, cols, i, by) for i, (rows, by) in enumerate(((64, 0.25), (32, -3.0)))]
    outs = [poison(n, m.rows) for m in ms]
    matvec.norm_matvec(h, w, EPS, ms, outs)
    products = [normed(h, w, type) @ weights(m)[0].T for m in ms]
    for out, product in zip(outs, products, strict=True):
        assert_close(out, product)
    gate, up = scaled(name, 64, cols, 0, 0.25), scaled(name, 64, cols, 3, 2.0)
    out, x = poison(n, 64), normed(h, w, type)
    matvec.gate_up(h, w, EPS, gate, up, out)
    assert_close(out, gated(FFNSpec(), x @ weights(gate)[0].T, x @ weights(up)[0].T))
    to = draw(n, 64, seed=4)
    expected = to.double() + rounded(h, type) @ weights(gate)[0].T
    matvec.matvec_add(h, gate, to)
    assert_close(to, expected)


@pytest.mark.parametrize("name", FAST)
def test_models(tmp_path, name):
    """Files with scales beside all matrices give what the same numbers without scales give."""
    tiny = make_tiny_model(CASES[name], WIDE, tmp_path / "hf", HALF)
    with CheckpointSource(open_checkpoint(tiny.folder)) as source:
        plain = write_gguf(tmp_path / "f32.gguf", source)
        with_scales = scaled_gguf(tmp_path / "scaled.gguf", source)
    tokens, told = torch.tensor(tiny.tokens), []
    with load_model(plain, "cuda", precision="f32") as model:
        expected = model.forward(tokens).float().cpu()
    with load_model(with_scales, "cuda", precision="f16", verbose=told.append) as model:
        state, logits = model.new_state(64), []
        logits.append(model.extend(tokens[:20], state, all_logits=True))
        logits += [model.extend(one, state, all_logits=True) for one in tokens[20:].split(1)]
        found = torch.cat(logits).float().cpu()
    # Of experts of floats: that all are decoded first.
    slow = [line for line in told if line.startswith("slow path")]
    assert all("MoE" in line and "decoded" in line for line in slow), slow
    off = (found - expected).abs().amax(1) / expected.std()
    assert off.median() < 0.03, off  # rounding may change which experts some tokens use
