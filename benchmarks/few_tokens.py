"""Products of few tokens with packed weights: microseconds of all matrices of a layer in the shape
of llama-8b, on random weights, beside decoding them and cuBLAS.

    python benchmarks/few_tokens.py
    python benchmarks/few_tokens.py --type Q4_K IQ3_XXS --tokens 16 32 64 128 --shapes

Columns: us of the four products of a layer, read from memory (not from L2) and in a CUDA graph; in
brackets of what decodes first. Every product is compared with float64, and with itself again. With
--shapes a row for each matrix. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import torch
from grouped import drawn_matrix, error, microseconds
from iqforge.cuda_kernels.layouts.table import packed_types
from iqforge.cuda_kernels.packed.decode import decode_matrix, dequantize_spec
from iqforge.cuda_kernels.packed.matrix import PackedMatrix
from iqforge.cuda_kernels.prompt import few
from iqforge.cuda_kernels.prompt.grouped import FLOATS
from iqforge.formats.types import GGMLType, ggml_type
from iqforge.runtime.bench.random_blocks import supported
from step_types import compile_one

SHAPES = {
    "query, key and value": ((4096, 1024, 1024), 4096),
    "attention output": ((4096,), 4096),
    "gate and up": ((14336, 14336), 4096),
    "down": ((4096,), 14336),
}
L2 = 64e6  # bytes: copies of a matrix that are multiplied in turn are larger


def copies(matrices: list[PackedMatrix]) -> list[list[PackedMatrix]]:
    """Return the matrices and as many copies of them as L2 does not hold."""
    n = int(L2 // sum(m.nbytes for m in matrices)) + 2
    return [matrices] + [
        [PackedMatrix(m.type, m.rows, m.cols, 1, m.data.clone()) for m in matrices]
        for _ in range(n - 1)
    ]


def measured(type: GGMLType, rows: tuple[int, ...], cols: int, tokens: list[int]) -> list[tuple]:
    """Return for every number of tokens: microseconds here, of decoding and cuBLAS, and the
    relative error.
    """
    found, device = [], torch.device("cuda", torch.cuda.current_device())
    matrices = [drawn_matrix(type, r, cols, 1, seed) for seed, r in enumerate(rows)]
    all_copies, space = copies(matrices), few.workspace(device)
    decoded = torch.cat([decode_matrix(m, torch.float32) for m in matrices]).double()
    weights = torch.empty(sum(rows), cols, dtype=torch.bfloat16, device=device)
    for n in tokens:
        x = torch.randn(n, cols, generator=torch.Generator("cuda").manual_seed(n), device="cuda")
        x = x.bfloat16()
        out = torch.full((n, sum(rows)), float("nan"), dtype=torch.bfloat16, device=device)

        def here() -> None:
            for matrices in all_copies:
                few.few_product(matrices, x, out, space)  # noqa: B023

        def apart() -> None:
            for matrices in all_copies:
                for m, part in zip(matrices, weights.split(list(rows)), strict=True):
                    decode_matrix(m, torch.bfloat16, out=part)
                torch.mm(x, weights.t(), out=out)  # noqa: B023

        few.few_product(matrices, x, out, space)
        off = error(out, x.double() @ decoded.T)
        first = out.clone()
        times = [microseconds(call) / len(all_copies) for call in (here, apart)]
        few.few_product(matrices, x, out, space)
        if not torch.equal(first, out):
            raise SystemExit(f"{type.name}, {n} tokens: two runs differ")
        found.append((*times, off))
    return found


def main() -> int:
    """Parse the command line and print a row per type. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--type", nargs="+")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--shapes", action="store_true", help="a row for each matrix")
    args = parser.parse_args()
    types = [
        t
        for t in map(ggml_type, args.type or packed_types())
        if supported(t) and t.name not in FLOATS
    ]
    jobs = {(dequantize_spec(type), "sm_90") for type in types} | {
        (few.spec(type, torch.bfloat16, few.plan_for(n)), "sm_90")
        for type in types
        for n in args.tokens
    }
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, jobs))
    print(f"{torch.cuda.get_device_name()}; us of a layer here (decoding and cuBLAS), error.\n")
    heads = [f"{n} tokens" for n in args.tokens]
    print("| type |", " | ".join(heads), "|\n| --- |" + " --- |" * len(heads), flush=True)
    for type in types:
        all_shapes = {
            name: measured(type, rows, cols, args.tokens) for name, (rows, cols) in SHAPES.items()
        }
        lines = {type.name: list(zip(*all_shapes.values(), strict=True))}
        if args.shapes:
            lines |= {f"{type.name}, {name}": [[x] for x in f] for name, f in all_shapes.items()}
        for name, line in lines.items():
            cells = [
                f"{sum(x[0] for x in cell):.1f} ({sum(x[1] for x in cell):.1f}),"
                f" {max(x[2] for x in cell):.4f}"
                for cell in line
            ]
            print(f"| {name} |", " | ".join(cells), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
