"""Flash attention of prompts without a GPU, compiled by g++: products read their factors where
descriptors say, and warpgroups wait for each other as they would on one.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from iqforge.cuda_kernels.prompt import flash, flash_plan
from iqforge.cuda_kernels.prompt.flash_plan import Plan
from torch.nn import functional

from .flash_reference import LIMIT, expected, operands
from .kernels_on_host import library, pointer

CPU = torch.device("cpu")
BF16, F16 = torch.bfloat16, torch.float16
HEADER = Path(__file__).parent / "flash_on_host.hpp"
RUN = """
extern "C" void run(PROBLEM, int blocks) {
    launch_on_host(blocks, 1, CONSUMERS + PRODUCERS, [&] {
        flash_attention(q, k, v, out, q_token, k_token, v_token, out_token, n, total, group, heads,
                        sequences, section, parts, partial, window, scale, cap, sinks, gates,
                        gate_token, gate_head, gate_step, none);
    });
    if (parts > 1)
        launch_on_host((sequences * n * heads * group + 3) / 4, 1, 128, [&] {
            flash_join(q, k, v, out, q_token, k_token, v_token, out_token, n, total, group, heads,
                       sequences, section, parts, partial, window, scale, cap, sinks, gates,
                       gate_token, gate_head, gate_step, none);
        });
}
"""


class Launched:
    """`launch` that runs the kernels of a spec on the CPU, by so many blocks."""

    def __init__(self, folder: Path, blocks: int):
        self.folder, self.blocks, self.libraries = folder, blocks, {}

    def __call__(self, kernel, grid, threads, *arguments, shared=0, pdl=False):
        spec, name = kernel
        if name == "flash_join":  # `run` has done it
            return
        if spec not in self.libraries:
            # The header for the CPU has one already.
            before = f'#include "{HEADER}"\n#define warp_sum prompt_warp_sum\n'
            folder = self.folder / spec.name
            folder.mkdir()
            self.libraries[spec] = library(folder, spec, RUN, before)
        values = [
            pointer(x) if x is None or isinstance(x, torch.Tensor) else to_c(x) for x in arguments
        ]
        self.libraries[spec].run(*values, min(grid, self.blocks))


def to_c(x):
    kinds = {"int64": ctypes.c_int64, "int32": ctypes.c_int32, "float32": ctypes.c_float}
    return kinds.get(x.dtype.name, ctypes.c_uint32)(x)


@pytest.fixture
def on_host(tmp_path, monkeypatch):
    """Let `flash_attention` take tensors of the CPU."""
    monkeypatch.setattr(flash, "function", lambda spec, name, device: (spec, name))
    monkeypatch.setattr(flash, "launch", Launched(tmp_path, 3))
    monkeypatch.setattr(flash_plan, "multiprocessors", lambda device: 3)
    flash._work.cache_clear()
    yield
    flash._work.cache_clear()


def check(q, k, v, plan, out_dtype=BF16, parts=1, gates=None, softplus=False, **options):
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=out_dtype)
    more = {"plan": plan, "parts": parts, "gates": gates, "softplus": softplus}
    flash.flash_attention(q, k, v, out, scale=0.2, **more, **options)
    truth = expected(q, k, v, 0.2, **options)
    if gates is not None:
        gates = gates.double()
        truth *= functional.softplus(gates) if softplus else gates.sigmoid()
    error = (out.double() - truth).norm() / truth.norm()
    assert error < max(LIMIT[q.dtype], LIMIT[out_dtype])


@pytest.mark.parametrize(
    "lengths, plan",
    [((32, 32), Plan(3, 64)), ((80, 48), Plan(2, 80))],
    ids=str,
)
def test_panels_that_are_not_full(on_host, lengths, plan):
    """Three warpgroups, or two; two sequences, tiles and blocks not full."""
    check(*operands(lengths, 45, 150, 6, 2, sequences=2, device=CPU), plan)


@pytest.mark.parametrize("parts", [1, 3])
def test_what_scores_may_have(on_host, parts):
    """Windows, sinks, a cap and gates; bfloat16; parts, of which some are empty."""
    plan = Plan(2, 64)
    q, k, v = operands((32, 32), 50, 300, 4, 4, half=BF16, device=CPU)
    check(q, k, v, plan, F16, parts, window=30, sinks=torch.randn(4))
    joined = torch.randn(1, 50, 4, 64).to(BF16)
    check(q * 4, k, v, plan, BF16, parts, joined[..., 32:], softcap=3.0)
    of_heads = torch.randn(1, 50, 5).to(BF16)[..., :4, None]
    check(q, k, v, plan, BF16, parts, of_heads, softplus=True)
