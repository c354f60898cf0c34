"""Products of a prompt's experts with every type: microseconds of gate and up, and of down, in the
shape of qwen3-30b-a3b, on random weights and tokens.

    python benchmarks/grouped.py
    python benchmarks/grouped.py --tokens 512
    python benchmarks/grouped.py --type IQ2_S IQ1_M --plan 160,4,2 160,3,3

--plan compiles kernels with these tokens of a tile, stages of the ring and warpgroups that
multiply, instead of what is used. Every kernel is compared with float64 for the tokens of one
expert: the error is that of the norm. Prints Markdown.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from iqforge.cuda_kernels.layouts.table import packed_types
from iqforge.cuda_kernels.packed.decode import decode_matrix, dequantize_spec
from iqforge.cuda_kernels.packed.matrix import PackedMatrix
from iqforge.cuda_kernels.packed.pack import pack_matrix
from iqforge.cuda_kernels.prompt import grouped as prompt_grouped
from iqforge.formats.types import GGMLType, ggml_type
from iqforge.runtime.bench.random_blocks import random_rows, supported
from step_types import compile_one

USED, EXPERTS, WIDTH, HIDDEN = 8, 128, 2048, 768
EXPERT = 3  # whose results are compared
REPETITIONS = 10


class Tokens:
    """Rows of activations, permuted as kernels read them, and the experts that they go to."""

    def __init__(self, n: int) -> None:
        torch.manual_seed(1)
        device = torch.device("cuda", torch.cuda.current_device())
        drawn = -torch.empty(n, EXPERTS, device=device).exponential_().log()
        ids = (drawn + 0.3 * torch.randn(EXPERTS, device=device)).topk(USED).indices.flatten()
        self.sources = ids.sort(stable=True).indices.int()
        self.ends = torch.bincount(ids, minlength=EXPERTS).cumsum(0).int()
        self.part = slice(int(self.ends[EXPERT - 1]), int(self.ends[EXPERT]))
        self.x = torch.randn(n, WIDTH, device=device).bfloat16()
        self.mid = torch.randn(n * USED, HIDDEN, device=device).bfloat16()
        self.places = prompt_grouped.places(HIDDEN, device)
        self.x_permuted, self.mid_permuted = torch.empty_like(self.x), torch.empty_like(self.mid)
        self.x_permuted[:, prompt_grouped.places(WIDTH, device)] = self.x
        self.mid_permuted[:, self.places] = self.mid


def drawn_matrix(
    type: GGMLType, rows: int, cols: int, n_matrices: int = EXPERTS, seed: int = 1
) -> PackedMatrix:
    """Return so many matrices [rows, cols] of a type on the GPU, of 64 random rows repeated in
    random order.
    """
    rng = np.random.default_rng(seed)
    few = random_rows(type, 64, cols, 1.0, rng)
    if type.is_interleaved:  # their rows belong together
        chosen = np.tile(few, (n_matrices * rows // 64, 1))
    else:
        chosen = few[rng.integers(0, 64, n_matrices * rows)]
    return pack_matrix(type, [chosen], rows, cols, n_matrices, "cuda")


def microseconds(call: Callable[[], None]) -> float:
    """Return the middle of three times of a graph of launches."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPETITIONS):
            call()
    found = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / REPETITIONS * 1e3)
    return sorted(found[1:])[1]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error ||found - expected|| / ||expected|| of two tensors of one shape;
    `expected` is float64.
    """
    return float((found.double() - expected).norm() / expected.norm())


def measured(type: GGMLType, tokens: Tokens) -> str:
    """Return a row of Markdown for a type: microseconds of both products and their relative
    errors.
    """
    gate, down = drawn_matrix(type, HIDDEN, WIDTH), drawn_matrix(type, WIDTH, HIDDEN)
    up = dataclasses.replace(gate, data=gate.data.clone())
    joined = torch.full_like(tokens.mid, float("nan"))
    out = torch.full((len(joined), WIDTH), float("nan"), device="cuda").bfloat16()
    times = (
        microseconds(
            lambda: prompt_grouped.grouped_gate_up(
                [gate, up], tokens.ends, tokens.x_permuted, joined, tokens.sources, USED
            )
        ),
        microseconds(
            lambda: prompt_grouped.grouped_product(down, tokens.ends, tokens.mid_permuted, out)
        ),
    )
    weights = [
        decode_matrix(m, torch.float32, first_row=EXPERT * m.rows, n_rows=m.rows).double()
        for m in (gate, down)
    ]
    y = tokens.x[tokens.sources[tokens.part].long() // USED].double() @ weights[0].T
    errors = (
        error(joined[tokens.part][:, tokens.places], y * y.sigmoid() * y),
        error(out[tokens.part], tokens.mid[tokens.part].double() @ weights[1].T),
    )
    return f"{times[0]:.0f} / {times[1]:.0f}, {max(errors):.4f}"


def main() -> int:
    """Parse the command line and print a row per plan and type. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--type", nargs="+")
    parser.add_argument("--tokens", type=int, default=2048, help="rows of the prompt")
    parser.add_argument("--plan", nargs="+", default=["used"], metavar="TILE,RING,GROUPS")
    args = parser.parse_args()
    types = [ggml_type(t) for t in args.type or packed_types() if supported(ggml_type(t))]
    used, may_be_small = prompt_grouped.plan_of, prompt_grouped.may_be_small

    def choose(plan: str) -> None:
        """Compile with a plan from now on."""
        prompt_grouped.spec.cache_clear()
        if plan == "used":
            prompt_grouped.plan_of, prompt_grouped.may_be_small = used, may_be_small
        else:
            prompt_grouped.may_be_small = lambda *_: False
            tile, ring, groups = map(int, plan.split(","))
            prompt_grouped.plan_of = lambda *_: prompt_grouped.Plan(tile, ring, groups, False)

    jobs = {(dequantize_spec(type), "sm_90") for type in types}
    for plan in args.plan:
        choose(plan)
        jobs |= {
            (prompt_grouped.spec(type, torch.bfloat16, small=small), "sm_90")
            for type in types
            for small in (False, True)
        }
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, jobs))
    tokens = Tokens(args.tokens)
    counts = torch.diff(tokens.ends, prepend=tokens.ends.new_zeros(1))
    print(f"{torch.cuda.get_device_name()}; tokens of an expert: {int(counts.median())} in the")
    print(f"middle, {int(counts.max())} at most. Gate and up / down in us, error.\n")
    print("| type |", " | ".join(args.plan), "|\n| --- |" + " --- |" * len(args.plan), flush=True)
    for type in types:
        line = []
        for plan in args.plan:
            choose(plan)
            line.append(measured(type, tokens))
        print(f"| {type.name} |", " | ".join(line), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
