"""The kernels of Kimi delta attention on a GPU, against the reference path in float32."""

from __future__ import annotations

import pytest
import torch
from iqforge.cuda_kernels.prompt.kimi_delta import KimiDeltaKernels, kimi_delta_rule
from iqforge.cuda_kernels.step.kimi_delta import StepKimiDelta
from iqforge.cuda_kernels.step.recurrent import StepState

from .kimi_delta_reference import PROMPTS, STEPS, kimi_delta_case, prompt_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LARGE = [
    (1, 2048, 32, 128, 4),
    (3, 500, 32, 128, 4),
    (1, 5000, 2, 64, 4),
    (1, 500, 32, 128, 4, -5.0),
]
KIMI = [(rows, 32, 128, 4, bound) for rows in (1, 3, 8) for bound in (0.0, -5.0)]


@pytest.mark.parametrize("case", STEPS + KIMI, ids=lambda case: "-".join(map(str, case)))
def test_a_step(case):
    device = torch.device("cuda")
    c = kimi_delta_case(case, device)
    expected, after = c.expected()
    step, net = StepKimiDelta(c.shape, device), c.net
    for alternates in (False, True):
        state, other = c.copied(), c.copied()
        out = torch.full_like(expected, float("nan"))
        begun = torch.zeros(1, dtype=torch.int32, device=device)
        weights = (net.convolution, net.dt, net.a, net.norm.weight, net.norm.eps)
        places = (other.inputs, other.memory) if alternates else None
        held = StepState(state.inputs, state.memory, places, begun, begun)
        step(*c.products, *weights, held, out)
        found = other if alternates else state
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.memory, after.memory, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.inputs, after.inputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decay", [0.02, 1, 40])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*PROMPTS, *LARGE], ids=str)
def test_a_prompt(case, half, decay):
    """Twice, from the state that one sequence kept, or from none."""
    device = torch.device("cuda", 0)
    p = prompt_case(case, half, device, decay)
    kernels = KimiDeltaKernels(p.heads, half, device, p.case.shape.bound)
    outs, memories = [], []
    for _ in range(2):
        state = p.case.copied()
        out = torch.full(p.expected.shape, float("nan"), dtype=half, device=device)
        kept = (state.inputs, state.memory, state.memory)
        kimi_delta_rule(
            kernels,
            p.weights,
            p.products,
            p.decay,
            p.gate,
            p.beta,
            p.n_sequences,
            *(kept if p.n_sequences == 1 else (None, None, None)),
            out,
            lambda name, shape, dtype: torch.full(shape, float("nan"), dtype=dtype, device=device),
        )
        p.check(out, state.memory)
        outs.append(out)
        memories.append(state.memory)
    assert torch.equal(*outs) and torch.equal(*memories)
