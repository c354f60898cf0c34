"""Products of 1 to 8 rows of activations, as steps of several tokens have them: microseconds of the
four products of a layer in the shape of llama-8b.

    python benchmarks/several_rows.py
    python benchmarks/several_rows.py --type Q4_K IQ3_XXS --rows 1 2 4 8 --shapes

Columns: us of the products, with weights from memory (not from L2) and in a CUDA graph; in brackets
without tensor cores, as one row is multiplied. Results are compared with those of one row at a
time, and with themselves again. With --shapes a row for each product. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
from few_tokens import SHAPES, copies
from grouped import drawn_matrix, microseconds
from iqforge.cuda_kernels.layouts.table import packed_types
from iqforge.cuda_kernels.matvec import products, several
from iqforge.cuda_kernels.matvec.plan import GATE_UP, MATVEC_ADD, NORM_MATVEC, limits
from iqforge.cuda_kernels.matvec.specs import product_spec
from iqforge.cuda_kernels.packed.matrix import PackedMatrix
from iqforge.formats.types import GGMLType, ggml_type
from iqforge.runtime.bench.random_blocks import supported
from step_types import compile_one

EPS, NEVER = 1e-5, 99
KINDS = dict(zip(SHAPES, (NORM_MATVEC, MATVEC_ADD, GATE_UP, MATVEC_ADD), strict=True))


def specs_of(type: GGMLType, n: int) -> list:
    """Return the kernels of the products, with tensor cores and without."""
    here, found = limits(torch.cuda.current_device()), []
    for name, (rows, cols) in SHAPES.items():
        kind, half = KINDS[name], name in ("gate and up", "down") and not type.is_float
        matrices = len(rows) if kind == NORM_MATVEC else 1
        if several.takes(type, cols, n):
            cut = products.planned(here, type, cols, n, kind, rows)
            found.append(several.several_spec(type, cols, n, kind, cut, matrices, half))
            x_half = half and name == "down"
            found.append(several.round_spec(type, cols, n, x_half))
        plan = here.plan(type, cols, n, kind, rows)
        found.append(product_spec(type, cols, n, kind, plan, matrices, half))
    return found


def product(name: str, x: torch.Tensor, outs: list[torch.Tensor]) -> Callable:
    """Return a function of the matrices of a product that launches it."""
    if name == "query, key and value":
        weight = torch.linspace(0.5, 1.5, x.shape[1], device="cuda")
        return lambda matrices: products.norm_matvec(x, weight, EPS, matrices, outs)
    if name == "gate and up":
        return lambda matrices: products.gate_up(x, None, EPS, matrices[0], matrices[1], outs[0])
    return lambda matrices: products.matvec_set(x, matrices[0], outs[0])


def measured(type: GGMLType, name: str, all_rows: list[int]) -> list[tuple[float, float]]:
    """Return for every number of rows of activations: microseconds with tensor cores and
    without.
    """
    (rows, cols), found = SHAPES[name], []
    all_copies = copies([drawn_matrix(type, r, cols, 1, seed) for seed, r in enumerate(rows)])
    half = torch.float32 if type.is_float else torch.bfloat16
    for n in all_rows:
        x = torch.randn(n, cols, generator=torch.Generator("cuda").manual_seed(n), device="cuda")
        x = x.to(half) if name == "down" else x
        outs = [torch.full((n, r), float("nan"), device="cuda") for r in rows]
        if name == "gate and up":
            outs = [outs[0].to(half)]

        def results(matrices: list[PackedMatrix], x: torch.Tensor) -> torch.Tensor:
            into = [out[: len(x)] for out in outs]  # noqa: B023
            product(name, x, into)(matrices)
            return torch.cat([out.float() for out in into], 1)

        def run() -> None:
            call = product(name, x, outs)  # noqa: B023
            for matrices in all_copies:
                call(matrices)

        here = results(all_copies[0], x)
        apart = torch.cat([results(all_copies[0], row[None]) for row in x])
        error = ((here - apart).norm() / apart.norm()).item()
        if not error < (0.005 if name == "gate and up" else 1e-5):
            raise SystemExit(f"{type.name}, {name}, {n} rows: differ by {error} from one each")
        times = [microseconds(run) / len(all_copies)]
        if not torch.equal(here, results(all_copies[0], x)):
            raise SystemExit(f"{type.name}, {name}, {n} rows: two runs differ")
        if several.takes(type, cols, n):
            several.FEWEST_ROWS, kept = NEVER, several.FEWEST_ROWS
            times.append(microseconds(run) / len(all_copies))
            several.FEWEST_ROWS = kept
        else:
            times.append(0.0)
        found.append(tuple(times))
    return found


def main() -> int:
    """Parse the command line and print a row per type. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--type", nargs="+")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--shapes", action="store_true", help="a row for each product")
    args = parser.parse_args()
    types = [t for t in map(ggml_type, args.type or packed_types()) if supported(t)]
    with several.lent(several.space(torch.device("cuda"))):
        compare(types, args.rows, args.shapes)
    return 0


def compare(types: list[GGMLType], all_rows: list[int], shapes: bool) -> None:
    """Print the table."""
    jobs = {(spec, "sm_90") for type in types for n in all_rows for spec in specs_of(type, n)}
    with ProcessPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, jobs))
    print(f"{torch.cuda.get_device_name()}; us of a layer (without tensor cores).\n")
    heads = [f"{n} rows" for n in all_rows]
    print("| type |", " | ".join(heads), "|\n| --- |" + " --- |" * len(heads), flush=True)
    for type in types:
        all_shapes = {name: measured(type, name, all_rows) for name in SHAPES}
        lines = {type.name: list(zip(*all_shapes.values(), strict=True))}
        if shapes:
            lines |= {f"{type.name}, {name}": [[x] for x in f] for name, f in all_shapes.items()}
        for name, line in lines.items():
            sums = [[sum(x[i] for x in cell) for i in (0, 1)] for cell in line]
            cells = [f"{a:.1f}" + f" ({b:.1f})" * (b > 0) for a, b in sums]
            print(f"| {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    sys.exit(main())
