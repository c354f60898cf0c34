"""The kernel of Kimi delta attention on a GPU, against the reference path in float32."""

from __future__ import annotations

import pytest
import torch
from iqforge.cuda_kernels.step.kimi_delta import StepKimiDelta
from iqforge.cuda_kernels.step.recurrent import StepState

from .kimi_delta_reference import STEPS, kimi_delta_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KIMI = [(rows, 32, 128, 4) for rows in (1, 3, 8)]


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
