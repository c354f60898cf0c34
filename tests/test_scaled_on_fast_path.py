"""Files whose matrices have scales (`<name>.scale`), on the executors of a GPU, whose kernels are
plain torch: no layer is slow, and results are those of the same numbers without scales.
"""

from __future__ import annotations

import pytest
import torch
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.prompt.path import PromptPath
from iqforge.runtime.cuda.step.path import StepPath
from iqforge.runtime.model import load_model
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.weights.switches import Switches

from . import prompt_on_cpu, step_on_cpu
from .step_graphs_on_cpu import CPU
from .step_on_cpu import in_pieces
from .tiny_cases import CASES, FAST, WIDE
from .tiny_model import scaled_gguf, write_gguf
from .tiny_models import HALF, make_tiny_model

QUICK = ("qwen3_5_moe", "deepseek_v3", "gpt_oss")
SETTINGS = CacheSettings("f32", "f32")


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in FAST],
)
def files(request, tmp_path_factory):
    """(file, the same with scales, token ids) of a random model, made before anything is
    replaced.
    """
    folder = tmp_path_factory.mktemp(request.param)
    tiny = make_tiny_model(CASES[request.param], WIDE, folder / "hf", HALF)
    with CheckpointSource(open_checkpoint(tiny.folder)) as source:
        plain = write_gguf(folder / "f32.gguf", source)
        return plain, scaled_gguf(folder / "scaled.gguf", source), torch.tensor(tiny.tokens)


@pytest.fixture
def opened(monkeypatch, request, files):
    """(the model, the same with scales, token ids)."""
    plain, scaled, tokens = files
    request.param(monkeypatch)
    switches = Switches(swa_full=True)
    with load_model(plain, switches=switches) as one, load_model(scaled, switches=switches) as two:
        unused = [t.name for t in two.source.tensors if not two.weights.uses(t.name)]
        assert not [name for name in unused if name.endswith(".scale")]
        assert sum(t.name.endswith(".scale") for t in two.source.tensors) > 8
        yield one, two, tokens


@pytest.mark.parametrize("opened", [step_on_cpu.install], ids=["steps"], indirect=True)
def test_steps(opened):
    plain, scaled, tokens = opened
    expected = plain.extend(tokens, plain.new_state(64, SETTINGS), all_logits=True)
    steps = StepPath(scaled.network, context := Context(CPU))
    assert not context.slow and steps.captures
    found = in_pieces(steps, tokens, scaled.new_state(64, SETTINGS))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("opened", [prompt_on_cpu.install], ids=["prompts"], indirect=True)
def test_prompts(opened):
    plain, scaled, tokens = opened
    expected = plain.hidden(tokens[None])[0]
    path = PromptPath(scaled.network, context := Context(CPU, torch.float16, None, ubatch=64))
    # Of experts: that this device decodes them first.
    assert {kind for kind, *_ in context.slow} <= {"MoE"}
    assert all("decoded" in why or "one after" in why for _, why, _ in context.slow)
    found = scaled.network.output_norm(path.run(tokens[None], 0))
    off = (found - expected).abs().amax(1) / expected.abs().max()
    assert off.max() < 0.05, off
