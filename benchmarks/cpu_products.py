"""Products of one row with a matrix of every type on the CPU, and decoding its rows.

    python benchmarks/cpu_products.py
    python benchmarks/cpu_products.py --type IQ4_K Q4_K --threads 1 --rows 4096 --columns 4096

Prints Markdown: billions of weights per second (the best of several runs), the bytes per second of
the stored matrix, and the seconds that the first use takes with an empty cache of compiled code.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from iqforge.formats.types import ggml_type
from iqforge.runtime.bench.random_blocks import random_rows, supported
from iqforge.runtime.simd.threads import Program, run
from iqforge.runtime.simd.units import UNITS
from iqforge.runtime.weights.kept import kept_rows


def best(work: Callable[[], object], seconds: float) -> float:
    """Return the shortest time of one call, in seconds."""
    found, stop = float("inf"), time.perf_counter() + seconds
    while (began := time.perf_counter()) < stop:
        work()
        found = min(found, time.perf_counter() - began)
    return found


def main() -> None:
    """Parse the command line, time every type and print a row of Markdown for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--type", nargs="+", default=[n for n in UNITS if supported(n)])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    args = parser.parse_args()
    print(f"{args.rows} x {args.columns}, {args.threads} threads\n")
    print("| type | product, Gw/s | GB/s | decode, Gw/s | first use, s |\n|---|---|---|---|---|")
    x, y = np.ones(args.columns, np.float32), np.zeros(args.rows, np.float32)
    out = np.zeros((args.rows, args.columns), np.float32)
    for name in args.type:
        type = ggml_type(name)
        stored = random_rows(type, args.rows, args.columns, 0.02, np.random.default_rng(0))
        rows = kept_rows(type, stored, args.columns)
        began = time.perf_counter()
        multiply = Program([rows.multiplication(x.ctypes.data, y.ctypes.data)])
        decode = Program([rows.decoding(out.ctypes.data)])
        first = time.perf_counter() - began
        times = [best(lambda p=p: run(p, args.threads), args.seconds) for p in (multiply, decode)]
        speeds = [out.size / seconds / 1e9 for seconds in times]
        size = stored.nbytes / times[0] / 1e9
        print(
            f"| {name} | {speeds[0]:.1f} | {size:.1f} | {speeds[1]:.1f} | {first:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
