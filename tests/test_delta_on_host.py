"""The kernels of delta nets without a GPU, compiled by g++."""

from __future__ import annotations

import ctypes

import pytest
import torch
from iqforge.cuda_kernels.common.delta_heads import DeltaHeads
from iqforge.cuda_kernels.prompt import delta as prompt_delta
from iqforge.cuda_kernels.prompt import recurrent
from iqforge.cuda_kernels.prompt.delta import delta_rule, fitting_stages
from iqforge.cuda_kernels.prompt.delta_chunks import SharedBytes
from iqforge.cuda_kernels.step.delta import delta_spec

from .chunks_on_host import HostChunkKernels, nans
from .delta_reference import PROMPTS, STEPS, delta_case, prompt_case
from .kernels_on_host import RUN_DELTA, RUN_PROMPT_DELTA, library, pointer
from .recurrent_steps import check_steps

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", STEPS, ids=lambda case: "-".join(map(str, case)))
def test_a_step(case, tmp_path):
    c = delta_case(case, CPU)
    expected, after = c.expected()
    kernel, net, s = library(tmp_path, delta_spec(c.shape), RUN_DELTA), c.net, c.shape
    products, z = c.products

    def run(state, other=None, position=0, begun=0) -> torch.Tensor:
        out = torch.full((s.rows, s.heads.value_heads * s.heads.value_length), float("nan"))
        numbers = [torch.tensor([x], dtype=torch.int32) for x in (position, begun)]
        kernel.run(
            pointer(c.h),
            pointer(c.norm.weight),
            ctypes.c_float(c.norm.eps),
            *map(pointer, (c.rates, net.dt, net.a, products, z, net.convolution)),
            pointer(net.norm.weight),
            ctypes.c_float(net.norm.eps),
            pointer(state.inputs),
            pointer(state.memory),
            pointer(None if other is None else other.inputs),
            pointer(None if other is None else other.memory),
            *map(pointer, numbers),
            pointer(out),
        )
        return out

    check_steps(run, c, expected, after)


class HostKernels(HostChunkKernels):
    """`DeltaKernels` compiled by g++."""

    def __init__(self, folder, heads, half, stages):
        spec = prompt_delta.delta_spec(heads, half, stages)
        super().__init__(heads, library(folder, spec, RUN_PROMPT_DELTA))

    def solve(self, rates, tokens, dt, a, *tensors):
        n_heads, n_chunks = tensors[5].shape[:2]
        self.library.run_solve(
            *map(pointer, (rates, dt, a)), tokens, *map(pointer, tensors), n_chunks, n_heads
        )


@pytest.mark.parametrize(
    "case, half, stages",
    [
        (PROMPTS[0], torch.float16, 2),
        (PROMPTS[1], torch.float16, 1),
        (PROMPTS[2], torch.bfloat16, 1),
    ],
    ids=str,
)
def test_a_prompt(case, half, stages, tmp_path):
    p = prompt_case(case, half, CPU)
    kernels = HostKernels(tmp_path, p.heads, half, stages)
    out = torch.full(p.expected.shape, float("nan"), dtype=half)
    state = p.case.copied()

    kept = (state.inputs, state.memory, state.memory)
    delta_rule(
        kernels,
        p.weights,
        p.products,
        p.z,
        p.rates,
        p.n_sequences,
        *(kept if p.n_sequences == 1 else (None, None, None)),
        out,
        nans,
    )
    p.check(out, state.memory)
    found = torch.zeros(3, dtype=torch.int32)
    kernels.library.shared_floats(pointer(found))
    assert tuple(4 * found) == SharedBytes.of(p.heads, stages)


def test_many_sequences_are_launched_apart(tmp_path, monkeypatch):
    """Two of 8 blocks each, where a grid has 15 in its second direction."""
    monkeypatch.setattr(recurrent, "_MOST_BLOCKS", 15)
    assert [n for n, *_ in recurrent.launched_apart(2, 8, 64)] == [1, 1]
    test_a_prompt(PROMPTS[1], torch.float16, 1, tmp_path)


@pytest.mark.parametrize(
    "kib, length, stages", [(99, 128, 1), (99, 256, 0), (163, 128, 2), (163, 256, 1), (227, 256, 2)]
)
def test_chunks_that_fit_a_device(kib, length, stages):
    """As qwen3.5 has them: on sm_86, sm_89 and sm_120, on sm_80, and on sm_90."""
    heads = DeltaHeads(16, 32, length, length, 4, True, False)
    assert fitting_stages(heads, kib * 1024) == stages
