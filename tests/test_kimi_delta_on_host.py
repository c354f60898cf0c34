"""The kernels of Kimi delta attention over many tokens without a GPU, compiled by g++."""

from __future__ import annotations

import pytest
import torch
from iqforge.cuda_kernels.common.delta_heads import DeltaHeads
from iqforge.cuda_kernels.prompt.kimi_delta import (
    fitting_stages,
    kimi_delta_rule,
    kimi_delta_spec,
    shared_bytes,
)

from .chunks_on_host import HostChunkKernels, nans
from .kernels_on_host import RUN_PROMPT_KIMI_DELTA, library, pointer
from .kimi_delta_reference import PROMPTS, prompt_case

CPU = torch.device("cpu")


class HostKernels(HostChunkKernels):
    """`KimiDeltaKernels` compiled by g++."""

    def __init__(self, folder, heads, half, stages, bound):
        spec = kimi_delta_spec(heads, half, stages, bound)
        super().__init__(heads, library(folder, spec, RUN_PROMPT_KIMI_DELTA))

    def solve(self, decay, rates, tokens, dt, a, b, whole):
        n_heads, n_chunks = whole.shape[:2]
        self.library.run_solve(
            pointer(decay),
            decay.stride(0),
            *map(pointer, (rates, dt, a)),
            tokens,
            *map(pointer, (b.q, b.k, b.v, b.values, b.keys, b.qk, whole)),
            n_chunks,
            n_heads,
        )


@pytest.mark.parametrize("decay", [0.02, 1, 40])
@pytest.mark.parametrize(
    "case, half, stages",
    [
        (PROMPTS[0], torch.float16, 2),
        (PROMPTS[1], torch.float16, 1),
        (PROMPTS[2], torch.bfloat16, 1),
        (PROMPTS[3], torch.bfloat16, 2),
    ],
    ids=str,
)
def test_a_prompt(case, half, stages, decay, tmp_path):
    """Also where next to nothing is forgotten in a chunk, and where a token forgets all before."""
    p = prompt_case(case, half, CPU, decay)
    kernels = HostKernels(tmp_path, p.heads, half, stages, p.case.shape.bound)
    out = torch.full(p.expected.shape, float("nan"), dtype=half)
    state = p.case.copied()
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
        nans,
    )
    p.check(out, state.memory)
    found = torch.zeros(3, dtype=torch.int32)
    kernels.library.shared_floats(pointer(found))
    assert tuple(4 * found) == shared_bytes(p.heads, stages)


@pytest.mark.parametrize(
    "kib, length, stages", [(99, 128, 1), (99, 256, 0), (163, 128, 2), (227, 256, 2)]
)
def test_chunks_that_fit_a_device(kib, length, stages):
    """As Kimi Linear has them: on sm_86, sm_89 and sm_120, on sm_80, and on sm_90."""
    heads = DeltaHeads(32, 32, length, length, 4, True, False)
    assert fitting_stages(heads, kib * 1024) == stages
