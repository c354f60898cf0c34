"""Random tiny models of every class on a GPU: float32 against the CPU, and the fast path against
float32.
"""

from __future__ import annotations

import iqforge
import pytest
import torch
from iqforge.quantize.plan.recipe import Recipe
from iqforge.runtime.architectures import architectures
from iqforge.runtime.cuda.registry import DELTA_KERNELS, LATENT_KERNELS
from iqforge.runtime.model import load_model
from iqforge.runtime.state.cache import CacheSettings

from .tiny_cases import CASES, WIDE
from .tiny_models import make_tiny_model

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(scope="module", params=list(CASES))
def made(request, tmp_path_factory):
    """(case, Q8_0 file, token ids, logits on the CPU)."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("transformers")
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    tiny = make_tiny_model(case, WIDE, folder / "hf")
    iqforge.convert_model(tiny.folder, folder / "f32.gguf", "f32")
    iqforge.quantize_model(folder / "f32.gguf", folder / "q.gguf", Recipe("Q8_0", pure=True))
    with load_model(folder / "q.gguf") as model:
        return case, folder / "q.gguf", tiny.tokens, model.forward(tiny.tokens)


def test_float32_is_the_cpu_s(made):
    _, file, tokens, expected = made
    with load_model(file, device=DEVICE, precision="f32") as model:
        first, second = model.forward(tokens).cpu(), model.forward(tokens).cpu()
    assert torch.equal(first, second)
    assert (first - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_the_fast_path_is_near_float32(made, precision, monkeypatch):
    """At once, in pieces of a kept sequence and token by token; and no layer is slow of which
    kernels are said to evaluate everything.
    """
    case, file, tokens, expected = made
    for variable in (DELTA_KERNELS, LATENT_KERNELS):
        monkeypatch.setenv(variable, "1")
    slow: list[str] = []
    with load_model(file, device=DEVICE, precision=precision, verbose=slow.append) as model:
        once, again = model.forward(tokens).cpu(), model.forward(tokens).cpu()
        state, rows = model.new_state(64, CacheSettings()), []
        for piece in torch.tensor(tokens).split([20, 8, 1, 1, 1, 1, 8]):
            rows.append(model.extend(piece, state, all_logits=True).cpu())
    assert torch.equal(once, again)
    if architectures()[case.architecture].gpu:
        assert not slow
    # A router that chooses between nearly equal experts may decide otherwise in half precision.
    for found in (once, torch.cat(rows)):
        off = (found - expected).square().mean(1).sqrt() / expected.std()
        assert off.median() < 0.03, (case.name, off)
