"""Products of few tokens without a GPU, compiled by g++: steps of tiles divided among blocks, x
where copies and descriptors say, and parts that blocks add up.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.compile.spec import expand
from iqforge.cuda_kernels.packed.matrix import PackedMatrix
from iqforge.cuda_kernels.prompt import few, flash_plan
from iqforge.cuda_kernels.prompt.few import Plan
from iqforge.formats.types import ggml_type

from .few_products import error, expected, packed
from .host_library import host_library
from .permuted_columns import permutation

HEADER = Path(__file__).parent / "few_on_host.hpp"
BLOCKS = 7
RUN = """
extern "C" bool run(int blocks, const uint8_t* first, const uint8_t* second, const uint8_t* third,
                    int r0, int r1, int r2, int t0, int t1, int t2, float s0, float s1, float s2,
                    int from, int cols, const uint4* x, int tokens, const uint16_t* bias,
                    uint16_t* out, int stride, float4* parts, uint32_t* arrived) {
  memory_begin[0] = (const uint8_t*)x;
  memory_end[0] = memory_begin[0] + tokens * (cols + 127) / 128 * 256;
  gridDim = {blocks, 1};
  blockDim = {CONSUMING + PRODUCERS, 1};
  const Launch launch;
  for (int joins = 0; joins < 2; ++joins) {
    MULTIPLIES = !joins, JOINS = joins;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
      memset(shared_memory, 0xFF, sizeof shared_memory);
      memset(named_arrivals, 0, sizeof named_arrivals);
      if (!run_block(CONSUMING + PRODUCERS, [=] {
            few_product(first, second, third, r0, r1, r2, t0, t1, t2, s0, s1, s2, from, cols, x,
                        tokens, bias, out, stride, parts, arrived);
          })) return false;
    }
  }
  return true;
}
"""


@pytest.fixture
def on_host(tmp_path, monkeypatch):
    """Let `few_product` take tensors of the CPU, as if it had 7 multiprocessors."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed: the kernels are not tried on the CPU")

    def launch(kernel, grid, threads, *arguments, shared=0, pdl=False):
        spec, name = kernel
        if name == "permute_rows":
            x, rows, cols, stride, out = arguments
            assert stride == x.stride(0) and grid * threads >= rows * -(-cols // 128) * 4
            wide = torch.nn.functional.pad(x, (0, -cols % 128))
            out[: wide.numel()].view(wide.dtype).view_as(wide).copy_(
                wide[:, permutation(wide.shape[1])]
            )
            return
        source = "".join(f"#define {k} {v}\n" for k, v in spec.defines) + expand(spec.sources)
        source = source.replace("__shared__ uint64_t barriers", "static uint64_t barriers")
        half = dict(spec.defines)["HALF"]
        program = f'#define HALF {half}\n#include "{HEADER}"\n{source}{RUN}'
        library = host_library(tmp_path / "few", program)
        library.run.restype = ctypes.c_bool
        assert grid <= BLOCKS and shared <= 227 << 10
        assert library.run(grid, *(_to_c(x) for x in arguments)), "threads wait forever"

    monkeypatch.setattr(few, "function", lambda spec, name, device: (spec, name))
    monkeypatch.setattr(few, "launch", launch)
    monkeypatch.setattr(flash_plan, "multiprocessors", lambda device: BLOCKS)
    monkeypatch.setattr(few, "blocks_for", lambda tiles, steps, n: min(n, tiles * steps))


def _to_c(value):
    if value is None or isinstance(value, torch.Tensor):
        return ctypes.c_void_p(None if value is None else value.data_ptr())
    return ctypes.c_float(value) if value.dtype == np.float32 else ctypes.c_int(value)


def product(matrices: list[PackedMatrix], x: torch.Tensor, bias=None, part=None) -> torch.Tensor:
    rows = sum(m.rows for m in matrices) if part is None else part.stop - part.start
    space = few.workspace(torch.device("cpu"))
    out = torch.full((len(x), rows + 8), torch.nan, dtype=x.dtype)
    few.few_product(matrices, x, out[:, :rows], space, bias, part)
    assert not space.arrived.any() and out[:, rows:].isnan().all()
    return out[:, :rows]


def test_parts_of_tiles(on_host):
    """Tiles of three matrices, whole ones and parts of two to four blocks; a column past groups of
    128; bfloat16 with a bias.
    """
    matrices = [packed("Q8_0", rows, 416, rows, "cpu") for rows in (264, 72, 200)]
    x, bias = torch.randn(11, 416).bfloat16(), torch.randn(536).bfloat16()
    assert error(product(matrices, x, bias), expected(matrices, x, bias)) < 5e-3


def test_a_part_of_a_matrix_in_half_precision(on_host):
    m = packed("Q8_0", 400, 128, 1, "cpu")
    m = PackedMatrix(m.type, m.rows, m.cols, 1, m.data, 0.5)
    x = torch.randn(40, 128).half()
    assert error(product([m], x, part=slice(104, 392)), expected([m], x)[:, 104:392]) < 2e-3


def test_large_tiles(on_host, monkeypatch):
    monkeypatch.setattr(few, "PLANS", (Plan(128, 4, 3, 1),))
    m, x = packed("Q8_0", 192, 256, 1, "cpu"), torch.randn(70, 256).bfloat16()
    assert few.plan_for(70) == few.plan_for(9) and m.type == ggml_type("Q8_0")
    assert error(product([m], x), expected([m], x)) < 5e-3
