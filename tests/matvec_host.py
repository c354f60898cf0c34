"""Matrix-vector kernels compiled by g++ and run block by block on the CPU, for tests."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import numpy as np
import torch
from iqforge.cuda_kernels.compile.spec import expand
from iqforge.cuda_kernels.matvec import plan as mp

from .host_library import host_library

HERE = Path(__file__).parent
BLOCKS, LIMIT = 3, 227 << 10
DENSE = "const float* x, const float* norm, float eps" + "".join(
    f", const uint8_t* base{i}, float* out{i}, int rows{i}, int first{i}, int stored{i}"
    for i in range(3)
)
GATES = (
    "const float* h, const float* norm, float eps, const uint8_t* gate, const uint8_t* up, int64_t"
    " stored, int per_expert, int first_up, const int* ids, int slots, int hidden, const float*"
    " gate_bias, const float* up_bias, const float* gate_scale, const float* up_scale, const"
    " uint8_t* shared_gate, const uint8_t* shared_up, int64_t shared_stored, int shared_rows,"
    " float* shared_out, int64_t shared_pitch, int64_t pitch, float* out"
)
NO_SHARED = None, None, np.int64(0), 0, None, np.int64(0)
DOWN = (
    "const float* x, const uint8_t* down, int64_t stored, int rows, const int* ids, const float*"
    " weights, const float* bias, const float* scale, const uint8_t* shared_down, float* h"
)


def host_kernel(folder, spec, parameters):
    """Return a library with `run(blocks, tokens, parameters...)` for the spec's kernel, which
    returns false if its threads do not meet at barriers.
    """
    names = ", ".join(part.split()[-1].lstrip("*") for part in parameters.split(", "))
    threads = 32 * int(dict(spec.defines)["WARPS"])
    program = f'#include "{HERE / "block_on_host.hpp"}"\n'
    program += "".join(f"#define {k} {v}\n" for k, v in spec.defines)
    program += expand(spec.sources)
    program += f"""
extern "C" void memory(int n, const uint8_t* begin, int64_t bytes) {{
  memory_begin[n] = begin;
  memory_end[n] = begin + bytes;
}}
extern "C" bool run(int blocks, int tokens, int shared, {parameters}) {{
  memset(shared_memory, 0xFF, sizeof shared_memory);
  gridDim = {{blocks, tokens}};
  blockDim = {{{threads}, 1}};
  const Launch launch;
  for (blockIdx.y = 0; blockIdx.y < tokens; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
      if (!run_block({threads}, [=] {{ {spec.functions[0]}({names}); }})) return false;
  for (int i = shared; i < int(sizeof shared_memory); ++i)
    if (shared_memory[i] != 0xFF) return false;
  return true;
}}
"""
    return host_library(folder / spec.name, program)


def plan(type, cols, n, kind, rows=0, **changes):
    """Return a real plan with two warps, `changes`, and few slots, so that slots are reused, and
    with its shared memory computed. rows: of the matrix, where `changes` divide its slots.
    """
    cut = mp.plan(type, cols, n, kind, LIMIT)
    cut = dataclasses.replace(
        cut, **{"warps": 2, "slots": 1 if kind == mp.EXPERT_DOWN else 2, **changes}
    )
    cut = dataclasses.replace(cut, joined=cut.joined and cut.stage_steps == cut.steps)
    x = n * mp.activation_bytes(type, cut.steps, cut.spread, cut.negated)
    if kind == mp.EXPERT_DOWN and cut.stage_rows < n:
        cut = dataclasses.replace(cut, advances=False)
        x += 4 * n // cut.stage_rows * -(-rows // BLOCKS)
    stage = cut.stage_rows * mp.stage_bytes(type, cols, cut.stage_steps, cut.joined)
    return dataclasses.replace(cut, shared=x + cut.warps * cut.slots * stage)


def start(library, cut, tokens, matrices, *arguments, blocks=BLOCKS):
    for n, m in enumerate(matrices):
        library.memory(n, ctypes.c_void_p(m.data.data_ptr()), ctypes.c_int64(m.data.numel()))
    values = [
        (
            ctypes.c_void_p(a.data_ptr())
            if isinstance(a, torch.Tensor)
            else (
                ctypes.c_void_p(None)
                if a is None
                else (
                    ctypes.c_float(a)
                    if isinstance(a, float)
                    else ctypes.c_int64(a)
                    if isinstance(a, np.int64)
                    else ctypes.c_int(a)
                )
            )
        )
        for a in arguments
    ]
    library.run.restype = ctypes.c_bool
    assert library.run(blocks, tokens, cut.shared, *values)
