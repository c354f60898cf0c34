"""The kernels of state-space layers without a GPU, compiled by g++."""

from __future__ import annotations

import ctypes

import pytest
import torch
from iqforge.cuda_kernels.step.state_space import state_space_spec

from .kernels_on_host import RUN_STATE_SPACE, library, pointer
from .recurrent_steps import check_steps
from .state_space_reference import STEPS, state_space_case


@pytest.mark.parametrize("case", STEPS, ids=lambda case: "-".join(map(str, case)))
def test_a_step(case, tmp_path):
    c = state_space_case(case, torch.device("cpu"), bias=case[0] != 3)
    expected, after = c.expected()
    kernel, net = library(tmp_path, state_space_spec(c.shape), RUN_STATE_SPACE), c.net

    def run(state, other=None, position=0, begun=0) -> torch.Tensor:
        out = torch.full(expected.shape, float("nan"))
        numbers = [torch.tensor([x], dtype=torch.int32) for x in (position, begun)]
        kernel.run(
            *map(pointer, (c.products, net.convolution, net.bias, net.dt, net.a, net.d)),
            *map(pointer, (state.inputs, state.memory)),
            pointer(None if other is None else other.inputs),
            pointer(None if other is None else other.memory),
            *map(pointer, numbers),
            pointer(net.norm),
            ctypes.c_float(net.eps),
            pointer(out),
        )
        return out

    check_steps(run, c, expected, after)
