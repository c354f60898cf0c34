"""Products of one to eight rows with a matrix of every type on the CPU, in microseconds.

    python benchmarks/cpu_rows.py
    python benchmarks/cpu_rows.py --type IQ4_K Q4_K --threads 1 --matrices 16
    python benchmarks/cpu_rows.py --type IQ4_K Q4_K --rows 4096 --columns 4096 --f32

The matrix is multiplied as layers do it: as it is stored with up to four rows (up to sixteen with
--large), and in 8 bits, or decoded to float32 (--f32), with more. Prints Markdown: the least time
of several rounds, in which all numbers of rows have their turn. One matrix may stay in a large
cache; those of a model do not, for which there is --matrices.
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


class Stack(Source):
    """A model of random matrices; a large one has another one, which nobody reads."""

    path, files, metadata = "random", (), {}

    def __init__(self, type: str, n: int, rows: int, columns: int, *, large: bool):
        self.tensors = (TensorInfo("output.weight", (n, rows, columns), ggml_type(type)),)
        if large:
            size = (DEFAULT_CACHE_BYTES // 256, 256)
            self.tensors += (TensorInfo("blk.0.ffn_up.weight", size, ggml_type("Q8_0")),)
        stored = random_rows(type, rows, columns, 0.02, np.random.default_rng(0))
        self._stored = np.tile(stored, (n, 1))

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return rows as they are stored."""
        return self._stored[start:stop]


def matrices_of(source: Stack, *, rounds: bool) -> list[Matrix]:
    """Return the matrices of a model; rounds: with products in 8 bits."""
    store = TensorStore(source, Placement(CPU, 0), DecodeCache())
    store.rounds, tensor = rounds, source.tensors[0]
    return [Matrix(store, tensor, i) for i in range(tensor.n_matrices)]


def least_times(matrices: list[Matrix], counts: range, seconds: float) -> list[float]:
    """Return the shortest time of a product with so many rows, in seconds."""
    xs = [torch.randn(n, matrices[0].cols) for n in counts]
    found = [float("inf")] * len(xs)
    for x in xs:
        product(matrices[0], x)  # compiles
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        for i, x in enumerate(xs):
            for _ in range(max(1, 3 // len(matrices))):
                began = time.perf_counter()
                for matrix in matrices:
                    product(matrix, x)
                took = (time.perf_counter() - began) / len(matrices)
                found[i] = min(found[i], took)
    return found


def main() -> None:
    """Parse the command line, time every type and print a row of Markdown for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--type", nargs="+", default=[n for n in UNITS if supported(n)])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--matrices", type=int, default=1, help="in turn, as in a model")
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
        source = Stack(name, args.matrices, args.rows, args.columns, large=args.large)
        times = least_times(matrices_of(source, rounds=not args.f32), counts, args.seconds)
        print(f"| {name} | {' | '.join(f'{1e6 * t:.0f}' for t in times)} |", flush=True)


if __name__ == "__main__":
    main()
