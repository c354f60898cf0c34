"""The kernels of state-space layers on a GPU, against the reference path in float32."""

from __future__ import annotations

import pytest
import torch
from iqforge.cuda_kernels.prompt.state_space import StateSpaceKernels, state_space
from iqforge.cuda_kernels.step.recurrent import StepState
from iqforge.cuda_kernels.step.state_space import StepStateSpace

from .state_space_reference import PROMPTS, STEPS, prompt_case, state_space_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NANO = [(rows, 64, 8, 64, 128, 4) for rows in (1, 3, 8)]  # Nemotron 3
GRANITE = [(1, 48, 1, 64, 128, 4)]


@pytest.mark.parametrize("case", STEPS + NANO + GRANITE, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("norm", [True, False])
def test_a_step(case, norm):
    device = torch.device("cuda")
    c = state_space_case(case, device, norm=norm)
    expected, after = c.expected()
    step, net = StepStateSpace(c.shape, device), c.net
    for alternates in (False, True, True):  # twice: tickets are as before
        state, other = c.copied(), c.copied()
        out = torch.full_like(expected, float("nan"))
        begun = torch.zeros(1, dtype=torch.int32, device=device)
        weights = (net.convolution, net.bias, net.dt, net.a, net.d, net.norm, net.eps)
        places = (other.inputs, other.memory) if alternates else None
        held = StepState(state.inputs, state.memory, places, begun, begun)
        step(c.products, *weights, held, out)
        found = other if alternates else state
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.memory, after.memory, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.inputs, after.inputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [*PROMPTS, (1, 500, *NANO[0][1:]), (3, 130, *GRANITE[0][1:]), (1, 200, 32, 1, 128, 256, 4)],
    ids=str,
)
@pytest.mark.parametrize("norm", [True, False])
def test_a_prompt(case, half, norm):
    p = prompt_case(case, half, torch.device("cuda"), norm=norm)
    kernels = StateSpaceKernels(p.case.shape, half, torch.device("cuda"))
    first, again = (p.run(state_space, kernels) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    p.check(*first)
