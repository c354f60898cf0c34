"""Products of one to eight rows with a matrix of every type on the CPU, in microseconds.

    python benchmarks/cpu_rows.py
    python benchmarks/cpu_rows.py --type IQ4_K Q4_K --threads 1 --rows 4096 --columns 4096 --f32

The matrix is multiplied as layers do it: as it is stored with up to four rows (up to sixteen with
--large), and in 8 bits, or decoded to float32 (--f32), with more. Prints Markdown: the least time
of several rounds, in which all numbers of rows have their turn.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from iqforge.formats.source import Source, TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.runtime.bench.random_blocks import random_rows, supported
from iqforge.runtime.simd.units import UNITS
from iqforge.runtime.weights.encoded import DEFAULT_CACHE_BYTES, DecodeCache, Matrix
from iqforge.runtime.weights.matrix import product
from iqforge.runtime.weights.placement import CPU, Placement
from iqforge.runtime.weights.store import TensorStore

LARGE = "as in a model whose matrices in 8 bits do not stay in memory"


class OneMatrix(Source):
    """A model of one random matrix; a large one has another one, which nobody reads."""

    path, files, metadata = "random", (), {}

    def __init__(self, type: str, rows: int, columns: int, *, large: bool):
        self.tensors = (TensorInfo("output.weight", (rows, columns), ggml_type(type)),)
        if large:
            size = (DEFAULT_CACHE_BYTES // 256, 256)
            self.tensors += (TensorInfo("blk.0.ffn_up.weight", size, ggml_type("Q8_0")),)
        self._stored = random_rows(type, rows, columns, 0.02, np.random.default_rng(0))

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return rows as they are stored."""
        return self._stored[start:stop]


def matrix_of(type: str, rows: int, columns: int, *, rounds: bool, large: bool) -> Matrix:
    """Return a matrix; rounds: with products in 8 bits."""
    source = OneMatrix(type, rows, columns, large=large)
    store = TensorStore(source, Placement(CPU, 0), DecodeCache())
    store.rounds = rounds
    return Matrix(store, source.tensors[0])


def least_times(matrix: Matrix, counts: range, seconds: float) -> list[float]:
    """Return the shortest time of a product with so many rows, in seconds."""
    xs = [torch.randn(n, matrix.cols) for n in counts]
    found = [float("inf")] * len(xs)
    for x in xs:
        product(matrix, x)  # compiles
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        for i, x in enumerate(xs):
            for _ in range(3):
                began = time.perf_counter()
                product(matrix, x)
                found[i] = min(found[i], time.perf_counter() - began)
    return found


def main() -> None:
    """Parse the command line, time every type and print a row of Markdown for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--type", nargs="+", default=[n for n in UNITS if supported(n)])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--most", type=int, default=8, help="rows that are multiplied")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each type")
    parser.add_argument("--f32", action="store_true", help="products in float32")
    parser.add_argument("--large", action="store_true", help=LARGE)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    counts = range(1, args.most + 1)
    print(f"{args.rows} x {args.columns}, {args.threads} threads, microseconds\n")
    print(f"| type | {' | '.join(map(str, counts))} |\n| --- |{' --- |' * len(counts)}")
    for name in args.type:
        matrix = matrix_of(name, args.rows, args.columns, rounds=not args.f32, large=args.large)
        times = least_times(matrix, counts, args.seconds)
        print(f"| {name} | {' | '.join(f'{1e6 * t:.0f}' for t in times)} |", flush=True)


if __name__ == "__main__":
    main()
