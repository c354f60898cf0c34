"""Kimi delta attention: the rule in chunks against the one by steps, and its kernel without a GPU,
compiled by g++.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from iqforge.cuda_kernels.step.kimi_delta import kimi_delta_spec
from iqforge.runtime.layers.recurrent import delta_rule
from iqforge.runtime.layers.recurrent.delta_rule import by_steps
from iqforge.runtime.layers.recurrent.kimi_delta_rule import by_chunks

from .kernels_on_host import RUN_KIMI_DELTA, library, pointer
from .kimi_delta_reference import STEPS, kimi_delta_case
from .recurrent_steps import check_steps


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("n, chunk", [(1, 16), (16, 16), (50, 16), (50, 8)])
def test_chunks_are_steps(n, chunk, fast):
    """Also where what is older than a token or two is forgotten, in some channels."""
    random = torch.Generator().manual_seed(n)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, n, *shape, generator=random)

    q, k = (torch.nn.functional.normalize(draw(3, 10), dim=-1) for _ in range(2))
    v, beta, memory = draw(3, 10), draw(3).sigmoid(), torch.randn(2, 3, 10, 10, generator=random)
    decay = -draw(3, 10).exp() * (30 if fast else 0.1)
    expected = by_steps(q, k, v, decay, beta, memory)
    for found, wanted in zip(by_chunks(q, k, v, decay, beta, memory, chunk), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_channels_decay_alone():
    """With the same decay in all channels it is the gated delta rule; with a large one in one, this
    one forgets.
    """
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 9, 2, 8, generator=random) for _ in range(3))
    g, beta = -torch.rand(1, 9, 2, generator=random), torch.rand(1, 9, 2, generator=random)
    memory = torch.randn(1, 2, 8, 8, generator=random)
    expected = delta_rule.by_steps(q, k / 3, v, g, beta, memory)
    decay = g[..., None].repeat(1, 1, 1, 8)
    for found, wanted in zip(by_chunks(q, k / 3, v, decay, beta, memory), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    decay[..., 5] = -100
    _, after = by_chunks(q, 0 * k, v, decay, beta, memory)
    assert (after[..., 5, :] == 0).all() and (after[..., 4, :] != 0).all()


@pytest.mark.parametrize("case", STEPS, ids=lambda case: "-".join(map(str, case)))
def test_a_step(case, tmp_path):
    c = kimi_delta_case(case, torch.device("cpu"))
    expected, after = c.expected()
    kernel, net = library(tmp_path, kimi_delta_spec(c.shape), RUN_KIMI_DELTA), c.net

    def run(state, other=None, position=0, begun=0) -> torch.Tensor:
        out = torch.full(expected.shape, float("nan"))
        numbers = [torch.tensor([x], dtype=torch.int32) for x in (position, begun)]
        kernel.run(
            *map(pointer, (*c.products, net.convolution, net.dt, net.a, net.norm.weight)),
            ctypes.c_float(net.norm.eps),
            *map(pointer, (state.inputs, state.memory)),
            pointer(None if other is None else other.inputs),
            pointer(None if other is None else other.memory),
            *map(pointer, numbers),
            pointer(out),
        )
        return out

    check_steps(run, c, expected, after)
