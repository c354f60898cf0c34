"""Second moments layer by layer on a GPU."""

from __future__ import annotations

import iqforge
import numpy as np
import pytest
import torch
from iqforge.imatrix.moments.collector import collect_moments, survey_inputs
from iqforge.imatrix.moments.layers import LayerMoments
from iqforge.imatrix.moments.options import HessianOptions
from iqforge.imatrix.texts import Text
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.model import Model
from iqforge.runtime.tokenizer import SpecialTokens

from .broken_runs import BreakAfter
from .imatrices import N_CTX
from .tiny_checkpoint import PROSE, make_tiny_qwen3moe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPECS = ["llama-tiny:Q8_0", "qwen3moe-tiny:Q8_0", "qwen35-tiny:Q8_0"]
TOKENS = np.random.default_rng(0).integers(0, 200, 4096).tolist()
OPTIONS = HessianOptions(n_ctx=256, batch_tokens=1024)


@pytest.mark.parametrize("precision", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("spec", SPECS)
def test_layers_give_what_passes_give(spec, precision, tmp_path):
    """The first two layers have the same sums whether or not the first one is collected."""
    texts = [Text(TOKENS, "a")]
    with Model(SyntheticSource(spec), "cuda", precision=precision) as model:
        model.special_tokens = SpecialTokens()
        whole = collect_moments(model, texts, OPTIONS, survey_inputs(model, OPTIONS))
        found = []
        for wanted in ({0, 1}, {1}):
            layers = LayerMoments(model, texts, OPTIONS, str(tmp_path))
            layers.wanted |= wanted
            layers.needed.update(wanted)
            found.append({n: layers.layer(n) for n in sorted(wanted)})
            layers.close()
    for name, one in whole.inputs.items():
        layer = int(name.split(".")[1])
        if layer not in found[0]:
            continue
        for fold in ("fit", "hold"):
            key = name, fold
            sums = found[0][layer]._total.sums[key]
            assert torch.equal(found[0][layer]._total.counts[key], whole.counts[key])
            assert (sums - whole.sums[key]).norm() <= 1e-5 * whole.sums[key].norm(), key
            if layer == 1:
                assert torch.equal(sums, found[1][1]._total.sums[key]), key
        assert one.n_matrices == len(whole.counts[name, "fit"])


def test_rounded_layers_are_followed_with_the_same_bytes(tmp_path):
    """For any number of threads, and after an interrupted run; experts included."""
    make_tiny_qwen3moe(tmp_path / "hf", n_experts=4, n_layers=2)
    options = {"calibrate": PROSE * 3, "calibrate_chunks": 10, "calibrate_ctx": N_CTX}
    options |= {"pure": True, "device": "cuda:0", "sequential": True, "hessian_shrink": 0.3}
    made = []
    for threads in (1, 3):
        out = tmp_path / f"{threads}.gguf"
        if threads == 3:
            with pytest.raises(KeyboardInterrupt):
                iqforge.quantize_model(
                    tmp_path / "hf", out, "IQ3_K", threads=2, progress=BreakAfter(14), **options
                )
        iqforge.quantize_model(tmp_path / "hf", out, "IQ3_K", threads=threads, **options)
        made.append(out.read_bytes())
    assert made[0] == made[1]
    plain = tmp_path / "plain.gguf"
    options |= {"sequential": False}
    iqforge.quantize_model(tmp_path / "hf", plain, "IQ3_K", **options)
    assert plain.read_bytes() != made[0]
