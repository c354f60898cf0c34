"""The kernels of state-space layers on a GPU, against the reference path in float32."""

from __future__ import annotations

import pytest
import torch
from iqforge.cuda_kernels.step.state_space import StepStateSpace

from .state_space_reference import STEPS, state_space_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NANO = [(rows, 64, 8, 64, 128, 4) for rows in (1, 3, 8)]  # Nemotron 3
GRANITE = [(1, 48, 1, 64, 128, 4)]


@pytest.mark.parametrize("case", STEPS + NANO + GRANITE, ids=lambda case: "-".join(map(str, case)))
def test_a_step(case):
    device = torch.device("cuda")
    c = state_space_case(case, device)
    expected, after = c.expected()
    step, net = StepStateSpace(c.shape, device), c.net
    for alternates in (False, True, True):  # twice: tickets are as before
        state, other = c.copied(), c.copied()
        out = torch.full_like(expected, float("nan"))
        begun = torch.zeros(1, dtype=torch.int32, device=device)
        weights = (net.convolution, net.bias, net.dt, net.a, net.d, net.norm, net.eps)
        places = (other.inputs, other.memory) if alternates else None
        step(c.products, *weights, state.inputs, state.memory, out, places, begun, begun)
        found = other if alternates else state
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.memory, after.memory, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.inputs, after.inputs, rtol=1e-5, atol=1e-5)
