"""Statistics of inputs that kernels read, against those of the reference path."""

from __future__ import annotations

import iqforge
import numpy as np
import pytest
import torch
from iqforge.imatrix.collecting import collect
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.model import Model
from iqforge.runtime.tokenizer import SpecialTokens

from .loud_source import LoudSource
from .tiny_cases import CASES, WIDE
from .tiny_models import HALF, make_tiny_model

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


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3", "glm_moe_dsa"])
def test_latent_attention_shows_its_inputs(name, tmp_path):
    """Of every head, with experts and with an indexer; the same bits again."""
    tiny = make_tiny_model(CASES[name], WIDE, tmp_path / "hf", HALF)
    file, made = iqforge.convert_model(tiny.folder, tmp_path / "f32.gguf", "f32"), []
    for precision in ("f16", "f16", "f32"):
        with iqforge.load_model(file, "cuda", precision=precision) as model:
            if precision == "f16":
                assert model.engine is not None
                assert not any(kind == "MLA" for kind, *_ in model.engine.context.slow)
            model.special_tokens = SpecialTokens()
            made.append(collect(model, TOKENS[:1024], n_ctx=64, compute_perplexity=False))
    fast, again, slow = made
    assert fast.entries.keys() == slow.entries.keys()
    for entry_name, entry in slow.entries.items():
        found = fast.entries[entry_name]
        assert found.sums.shape == entry.sums.shape and found.counts.sum() == entry.counts.sum()
        whole = entry.sums.sum(0)
        assert np.linalg.norm(found.sums.sum(0) - whole) <= 0.05 * np.linalg.norm(whole), entry_name
        assert np.array_equal(found.sums, again.entries[entry_name].sums), entry_name
