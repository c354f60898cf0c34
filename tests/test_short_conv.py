"""Gated short convolutions: their kernels without a GPU, compiled by g++."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from iqforge.cuda_kernels.prompt import short_conv as prompt_conv
from iqforge.cuda_kernels.step.short_conv import short_conv_spec

from .kernels_on_host import library, pointer
from .prompt_on_cpu import short_conv as prompt_reference
from .step_recurrent_on_cpu import short_conv as step_reference

RUN_STEP = """
extern "C" void run(const float* products, const float* taps, float* inputs, float* other,
                    const int* position, const int* begun, float* out, int rows, int channels) {
    launch_on_host((channels + THREADS - 1) / THREADS, 1, THREADS, [&] {
        short_conv(products, taps, inputs, other, position, begun, out, rows, channels);
    });
}
"""
RUN_PROMPT = """
extern "C" void run(const uint4* products, const float* past, const float* taps, uint4* out,
                    int tokens, int units, int sequences) {
    const int pieces = (tokens + TOKENS - 1) / TOKENS;
    launch_on_host((units + THREADS - 1) / THREADS, pieces * sequences, THREADS, [&] {
        short_conv(products, past, taps, out, tokens, units, pieces);
    });
}
"""


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows, taps", [(1, 3), (5, 4)])
@pytest.mark.parametrize("ahead", [None, 0, 1])
def test_a_step(rows, taps, ahead, tmp_path):
    """ahead: steps since the first one where states move to and fro."""
    channels = 130
    kernel = library(tmp_path, short_conv_spec(taps), RUN_STEP)
    products, weights = values(rows, 3 * channels), values(channels, taps)
    numbers = [torch.tensor([x], dtype=torch.int32) for x in (7 + (ahead or 0), 7)]
    found = []
    for run in (step_reference, None):
        inputs = values(taps - 1, channels)
        other = None if ahead is None else values(taps - 1, channels) + 1
        out = torch.full((rows, channels), float("nan"))
        if run is None:
            places = (inputs, other, *numbers, out)
            kernel.run(pointer(products), pointer(weights), *map(pointer, places), rows, channels)
        else:
            run(products, weights, inputs, other, *numbers, out)
        found.append((out, inputs, *([] if other is None else [other])))
    for expected, given in zip(*found, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens, sequences, kept", [(1, 1, True), (37, 1, True), (33, 2, False)])
def test_a_prompt(tokens, sequences, kept, tmp_path):
    channels, taps, half = 24, 3, torch.bfloat16
    spec = prompt_conv.short_conv_spec(half, taps)
    own = ("warp_sum", "prompt_warp_sum")  # the header for the CPU has one already
    kernel = library(tmp_path, replace(spec, defines=(*spec.defines, own)), RUN_PROMPT)
    products = values(tokens * sequences, 3 * channels).to(half)
    weights, past = values(channels, taps), values(taps - 1, channels) if kept else None
    expected, out = (torch.zeros(len(products), channels, dtype=half) for _ in range(2))
    prompt_reference(products, past, weights, sequences, expected)
    arguments = (*map(pointer, (products, past, weights, out)), tokens, channels // 8, sequences)
    kernel.run(*arguments)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-5)
