"""The kernels of delta nets on a GPU, against the reference path in float32."""

from __future__ import annotations

import pytest
import torch
from iqforge.cuda_kernels.prompt.delta import DeltaKernels, delta_rule
from iqforge.cuda_kernels.step.delta import StepDelta
from iqforge.cuda_kernels.step.recurrent import StepState

from .delta_reference import PROMPTS, STEPS, delta_case, prompt_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
LARGE = (16, 32, 128, 128, 4, True, False)  # heads and lengths of Qwen3.5-35B-A3B


@pytest.mark.parametrize("case", [*STEPS, (1, 2048, *LARGE), (8, 2048, *LARGE)], ids=str)
def test_a_step(case):
    c = delta_case(case, DEVICE)
    expected, after = c.expected()
    net, s, kernel = c.net, c.shape, StepDelta(c.shape, DEVICE)
    products, z = c.products

    def run(state, *two) -> torch.Tensor:
        out = torch.full(
            (s.rows, s.heads.value_heads * s.heads.value_length), float("nan"), device=DEVICE
        )
        kernel(
            c.h,
            c.norm.weight,
            c.norm.eps,
            c.rates,
            net.dt,
            net.a,
            products,
            z,
            net.convolution,
            net.norm.weight,
            net.norm.eps,
            StepState(state.inputs, state.memory, *two),
            out,
        )
        return out

    def check(out, state) -> None:
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(state.memory, after.memory, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(state.inputs, after.inputs, rtol=1e-5, atol=1e-6)

    states = [c.copied() for _ in range(2)]
    outs = [run(state) for state in states]
    check(outs[0], states[0])
    assert torch.equal(outs[0], outs[1]) and torch.equal(states[0].memory, states[1].memory)
    positions = torch.arange(7, 7 + s.rows, dtype=torch.int32, device=DEVICE)
    for begun in (7, 6):
        main, other = c.copied(), c.copied()
        source, to = (main, other) if begun == 7 else (other, main)
        to.clear()
        start = torch.tensor([begun], dtype=torch.int32, device=DEVICE)
        check(run(main, (other.inputs, other.memory), positions, start), to)
        assert torch.equal(source.memory, c.state.memory)
        assert torch.equal(source.inputs, c.state.inputs)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*PROMPTS, (1, 500, *LARGE), (3, 130, *LARGE)], ids=str)
def test_a_prompt(case, half):
    p = prompt_case(case, half, DEVICE)
    kernels = DeltaKernels(p.heads, half, DEVICE)

    def run():
        state = p.case.copied()
        out = torch.full(p.expected.shape, float("nan"), dtype=half, device=DEVICE)
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
            lambda name, shape, dtype: torch.full(shape, float("nan"), dtype=dtype, device=DEVICE),
        )
        return out, state.memory

    (out, memory), (again, memory_again) = run(), run()
    assert torch.equal(out, again) and torch.equal(memory, memory_again)
    p.check(out, memory)
