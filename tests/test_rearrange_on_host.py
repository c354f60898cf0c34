"""The kernel that packs weights, compiled by g++ and run thread by thread, makes the same bytes as
torch.
"""

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.compile.spec import expand
from iqforge.cuda_kernels.packed import pack, rearrange
from iqforge.cuda_kernels.packed.pack import pack_matrix
from iqforge.runtime.bench.random_blocks import random_rows

from .host_library import host_library

HERE = Path(__file__).parent
PARAMETERS = (
    "const uint8_t* source, uint8_t* result, const uint32_t* moves, const uint16_t* starts, const"
    " uint8_t* flips, const uint8_t* segment_of, const int64_t* segments, int64_t groups, int"
    " blocks, int target_bytes, int64_t source_head, int64_t source_group_step, int source_step"
)

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    names = ", ".join(part.split()[-1].lstrip("*") for part in PARAMETERS.split(", "))
    program = f"""#include "{HERE / "block_on_host.hpp"}"
{expand(rearrange.SPEC.sources)}
extern "C" void run({PARAMETERS}) {{
  gridDim = {{3, 1}};
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < 256; ++threadIdx.x) rearrange({names});
}}
"""
    return host_library(tmp_path_factory.mktemp("rearrange") / "rearrange", program).run


# Bits inverted in a layout, and where interleaving is undone; a header for each row; fields of odd
# lengths.
@pytest.mark.parametrize("rows, cols", [(16, 512), (72, 256)])
@pytest.mark.parametrize(
    "name", ["IQ4_K", "IQ5_K", "Q4_0_4_8", "IQ4_KS", "Q6_K", "IQ3_K", "BF16", "F32"]
)
def test_packs_as_torch_does(kernel, monkeypatch, name, rows, cols):
    data = random_rows(name, rows, cols, 0.05, np.random.default_rng(3))
    expected = pack_matrix(name, [data], rows, cols, 1, "cpu").data

    def run(*arguments):
        held = rearrange._arguments(*arguments)  # until the kernel has read it
        kernel(
            *(
                (
                    ctypes.c_void_p(a.data_ptr())
                    if isinstance(a, torch.Tensor)
                    else ctypes.c_int64(a)
                    if isinstance(a, np.int64)
                    else ctypes.c_int(a)
                )
                for a in held
            )
        )

    calls = []
    monkeypatch.setattr(
        pack, "rearrange", lambda *arguments: (calls.append(arguments[0]), run(*arguments))
    )
    assert torch.equal(pack_matrix(name, [data], rows, cols, 1, "cpu").data, expected)
    assert len(calls) == (2 if name == "Q4_0_4_8" else 1)
    assert any(moves.flips.any() for moves in calls) == (name in ("IQ4_K", "IQ5_K", "Q4_0_4_8"))
