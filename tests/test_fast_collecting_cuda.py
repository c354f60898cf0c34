"""Statistics of inputs that kernels read, against those of the reference path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from iqforge.imatrix.collector import collect
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.model import Model
from iqforge.runtime.tokenizer import SpecialTokens

from .loud_source import LoudSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPECS = ["llama-tiny:Q8_0", "qwen3moe-tiny:Q8_0", "qwen3moe-tiny:IQ4_K", "qwen35-tiny:Q8_0"]
TOKENS = np.random.default_rng(0).integers(0, 200, 4096).tolist()


@pytest.mark.parametrize("spec", SPECS)
def test_sums_are_those_of_the_reference_path(spec):
    made = []
    for precision in ("bf16", "f16", "bf16", "f32"):
        with Model(SyntheticSource(spec), "cuda", precision=precision) as model:
            model.special_tokens = SpecialTokens()
            made.append(collect(model, TOKENS, n_ctx=256, compute_perplexity=False))
    for fast in made[:3]:
        assert fast.entries.keys() == made[3].entries.keys()
        for name, entry in made[3].entries.items():
            found = fast.entries[name]
            assert found.counts.sum() == entry.counts.sum()
            total = entry.sums.sum(0)
            np.testing.assert_allclose(found.sums.sum(0), total, rtol=0.05, err_msg=name)
    for name, entry in made[0].entries.items():
        assert np.array_equal(entry.sums, made[2].entries[name].sums), name


def test_activations_beyond_half_are_collected_in_bfloat16(caplog):
    made = []
    for precision in ("f16", "bf16"):
        with Model(LoudSource("llama-tiny:BF16"), "cuda", precision=precision) as model:
            model.special_tokens = SpecialTokens()
            made.append(collect(model, TOKENS, n_ctx=256, compute_perplexity=False))
            assert model.precision == "bf16"
    assert caplog.text.count("range of float16") == 1
    for name, entry in made[0].entries.items():
        assert np.array_equal(entry.sums, made[1].entries[name].sums), name
