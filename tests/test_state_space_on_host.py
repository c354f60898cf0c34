"""The kernels of state-space layers without a GPU, compiled by g++."""

from __future__ import annotations

import ctypes

import pytest
import torch
from iqforge.cuda_kernels.prompt import recurrent
from iqforge.cuda_kernels.prompt import state_space as prompt_state_space
from iqforge.cuda_kernels.step.state_space import StateSpaceShape, state_space_spec

from .kernels_on_host import RUN_PROMPT_STATE_SPACE, RUN_STATE_SPACE, library, pointer
from .recurrent_steps import check_steps
from .state_space_reference import PROMPTS, STEPS, prompt_case, state_space_case


@pytest.mark.parametrize("case", STEPS, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("norm", [True, False])
def test_a_step(case, norm, tmp_path):
    c = state_space_case(case, torch.device("cpu"), bias=case[0] != 3, norm=norm)
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


class HostKernels:
    """`StateSpaceKernels` compiled by g++."""

    def __init__(self, folder, shape, half, stages):
        spec = prompt_state_space.state_space_spec(shape, half, stages)
        self.shape, self.library = shape, library(folder, spec, RUN_PROMPT_STATE_SPACE)

    def convolve(self, products, tokens, past, taps, bias, x, b, c):
        sequences, _, padded, _ = x.shape
        tensors = map(pointer, (past, taps, bias, x, b, c))
        self.library.run_convolved(pointer(products), tokens, padded, *tensors, sequences)

    def decays(self, products, dt, a, tokens, steps, until, totals):
        n_heads, padded = steps.shape
        tensors = map(pointer, (steps, until, totals))
        self.library.run_decays(
            *map(pointer, (products, dt, a)), tokens, *tensors, padded // 64, n_heads
        )

    def chunks(self, x, b, until, totals, before, after, states):
        n_heads, n_chunks = states.shape[:2]
        tensors = map(pointer, (before, after, states))
        self.library.run_chunks(*map(pointer, (x, b, until, totals)), n_chunks, *tensors, n_heads)

    def results(self, products, x, b, c, states, steps, totals, d, tokens, out):
        n_heads, n_chunks = states.shape[:2]
        tensors = map(pointer, (products, x, b, c, states, steps, totals, d))
        self.library.run_results(*tensors, tokens, pointer(out), n_chunks, n_heads)

    def norm(self, y, weight, eps, out):
        self.library.run_norm(*map(pointer, (y, weight)), ctypes.c_float(eps), pointer(out), len(y))


@pytest.mark.parametrize(
    "case, half, stages",
    [
        (PROMPTS[0], torch.float16, 2),
        (PROMPTS[1], torch.float16, 1),
        (PROMPTS[2], torch.bfloat16, 1),
        (PROMPTS[3], torch.bfloat16, 4),
    ],
    ids=str,
)
def test_a_prompt(case, half, stages, tmp_path):
    p = prompt_case(case, half, torch.device("cpu"))
    kernels = HostKernels(tmp_path, p.case.shape, half, stages)
    p.check(*p.run(prompt_state_space.state_space, kernels))
    found = torch.zeros(2, dtype=torch.int32)
    kernels.library.shared_floats(pointer(found))
    assert tuple(4 * found) == prompt_state_space.shared_bytes(p.case.shape, stages)


def test_many_sequences_are_launched_apart(tmp_path, monkeypatch):
    """A grid has no more than 65,535 blocks in its second direction."""
    p = prompt_case((5, 20, 6, 1, 12, 20, 3), torch.float16, torch.device("cpu"))
    kernels, launched = HostKernels(tmp_path, p.case.shape, torch.float16, 2), []
    decays = kernels.decays

    def counted(*arguments):
        launched.append(len(arguments[4]))
        decays(*arguments)

    monkeypatch.setattr(kernels, "decays", counted)
    whole = p.run(prompt_state_space.state_space, kernels)
    monkeypatch.setattr(recurrent, "_MOST_BLOCKS", 17)
    apart = p.run(prompt_state_space.state_space, kernels)
    assert launched == [30, 12, 12, 6] and torch.equal(apart[0], whole[0])
    p.check(*apart)


def test_a_prompt_without_a_norm(tmp_path, monkeypatch):
    p = prompt_case(PROMPTS[0], torch.float16, torch.device("cpu"), norm=False)
    monkeypatch.setattr(prompt_state_space, "converted", lambda x, out: out.copy_(x))
    kernels = HostKernels(tmp_path, p.case.shape, torch.float16, 2)
    p.check(*p.run(prompt_state_space.state_space, kernels))


@pytest.mark.parametrize(
    "kib, length, stages", [(99, 64, 1), (99, 128, 0), (163, 128, 2), (227, 128, 2)]
)
def test_chunks_that_fit_a_device(kib, length, stages):
    """As Falcon-H1 has them: on sm_86, sm_89 and sm_120, on sm_80, and on sm_90."""
    shape = StateSpaceShape(1, 32, 2, length, 256, 4)
    assert prompt_state_space.fitting_stages(shape, kib * 1024) == stages
