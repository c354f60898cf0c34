"""Scales are multiplied by a little more than 1 after rounding."""

from __future__ import annotations

import json

import iqforge
import numpy as np
import pytest
from iqforge.errors import UsageError
from iqforge.formats.codecs.codec import decode, decode_plain
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.types import TYPES, ggml_type
from iqforge.imatrix.moments.lookup import moments_of
from iqforge.quantize.plan.recipe import Recipe
from iqforge.quantize.rounding.choice import plan_rounding
from iqforge.quantize.rounding.methods import guides
from iqforge.quantize.rounding.stretch import SHARE, factor_for, scales_of, stretch
from iqforge.runtime.bench.random_blocks import random_rows

from .imatrices import N_CTX, tiny_llama_file
from .tiny_checkpoint import PROSE

GUIDED = [t.name for t in TYPES.values() if t.base is None and guides(t)]
COARSE = ("MXFP4", "NVFP4")  # no scale that could be a few percent larger
N = 512


@pytest.mark.parametrize("name", GUIDED)
def test_all_values_of_a_row_grow_by_the_factor(name):
    type = ggml_type(name)
    assert bool(scales_of(type)) == (name not in COARSE)
    wide = np.zeros((8, 2 * type.row_bytes(N)), dtype=np.uint8)
    rows = wide[:, : type.row_bytes(N)]  # with gaps between them
    rows[:] = random_rows(type, 8, N, 1.0, np.random.default_rng(0))
    before = decode_plain(type, np.ascontiguousarray(rows), N)
    stretch(type, rows, 1.0625)
    after = decode_plain(type, np.ascontiguousarray(rows), N)
    expected = before * (1.0 if name in COARSE else 1.0625)
    assert np.abs(after - expected).max() <= 2e-3 * np.abs(before).max()
    assert not wide[:, type.row_bytes(N) :].any()


def test_scales_stay_finite():
    type = ggml_type("Q4_0")
    rows = np.zeros((1, type.row_bytes(32)), dtype=np.uint8)
    [scale] = scales_of(type)
    scale.write(rows[:, None], 65000.0)
    stretch(type, rows, 1.1)
    assert scale.read(rows[:, None]) == np.float16(65000.0)
    for least in (0.0, 2.0**-24):  # of half precision
        scale.write(rows[:, None], least)
        stretch(type, rows, 1.1)
        assert scale.read(rows[:, None]) == least


def test_the_factor_is_a_share_of_what_is_missing():
    type = ggml_type("IQ2_K")
    assert factor_for(type, [0.04, 0.06]) == pytest.approx(1 + SHARE * 0.05, abs=1 / 1024)
    assert factor_for(type, [0.04 + 1e-9, 0.06]) == factor_for(type, [0.04, 0.06])
    assert factor_for(type, [-0.01]) == factor_for(type, []) == 1
    assert factor_for(ggml_type("MXFP4"), [0.05]) == 1


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stretch")
    texts = [PROSE * 40, PROSE[::-1] * 20]
    path, out = tiny_llama_file(folder), folder / "h.safetensors"
    return path, iqforge.collect_hessian(path, texts, out, n_ctx=N_CTX, process_output=True)


def test_products_come_closer_to_those_of_the_weights(llama, tmp_path):
    """Q2_K loses some percent of them; the codes are the same with and without."""
    path, made = llama
    missing = {}
    for stretched in (True, False):
        out = tmp_path / f"{stretched}.gguf"
        iqforge.quantize_model(
            path, out, Recipe("Q2_K", pure=True), hessian=made, stretch=stretched
        )
        with open_gguf(path) as full, open_gguf(out) as file:
            said = json.loads(file.metadata["quantize.hessian.rounding"].data)
            factors = {one[0]: one[-1] for one in said if one[2] is not None}
            assert all(isinstance(x, float) and x > 1.005 for x in factors.values()) == stretched
            for tensor in file.tensors:
                found = moments_of(made, tensor.name, tensor.shape)
                if tensor.type.name == "Q2_K" and found is not None:
                    x, q = (values(one, tensor.name) for one in (full, file))
                    whole = np.einsum("ij,jk,ik->", x, found.hold(0), x, optimize=True)
                    kept = np.einsum("ij,jk,ik->", q, found.hold(0), x, optimize=True)
                    missing.setdefault(tensor.name, []).append(1 - kept / whole)
    assert len(missing) >= 7
    for with_it, without in missing.values():
        assert without > 0.01 and 0.2 * without < with_it < 0.6 * without


def values(file, name: str) -> np.ndarray:
    t = file.tensor(name)
    return decode(t.type, np.array(file.read_rows(t, 0, t.n_rows)), t.n_cols).astype(np.float64)


def test_options_need_second_moments(llama, tmp_path):
    path, _ = llama
    with pytest.raises(UsageError, match="--no-stretch"):
        iqforge.quantize_model(path, tmp_path / "out.gguf", "Q2_K", stretch=False)


def test_one_text_says_too_little_for_one_bit(llama):
    path, made = llama
    with open_gguf(path) as source:
        plans = iqforge.api.plan_quantization(source, Recipe("Q1_0", pure=True))
        plan = plan_rounding(source, plans, lambda *of: moments_of(made, *of), None, one_text=True)
    [choice] = [one for one in plan.choices if one.role == "ffn_up"]
    assert choice.shrink is None and "one text says too little for 1.125 bits" in choice.line()
