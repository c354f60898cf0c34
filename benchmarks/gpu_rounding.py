"""Compare and time rounding with second moments on a GPU.

    python benchmarks/gpu_rounding.py bytes                      # every type: bytes of GPU and CPU
    python benchmarks/gpu_rounding.py shapes [--type IQ3_K ...]  # matrices of Llama 8B
    python benchmarks/gpu_rounding.py whole [--layers 4] [--shape llama-8b] [--type IQ3_K]

`shapes` prints seconds for factoring, error feedback, and each refinement. `whole` collects the
second moments of random tokens layer by layer, chooses and rounds every matrix as `quantize
--calibrate` does; reading and writing files are left out, and all layers of a shape cost the same.
Figures without --layers are of the whole model.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from iqforge.api import plan_quantization
from iqforge.formats.codecs.codec import decode
from iqforge.formats.tensor_names import TensorName
from iqforge.formats.types import ggml_type
from iqforge.imatrix.moments.layers import LayerMoments
from iqforge.imatrix.moments.lookup import moments_of
from iqforge.imatrix.moments.options import HessianOptions
from iqforge.imatrix.texts import Text
from iqforge.quantize.plan.plan import PlannedTensor
from iqforge.quantize.rounding.cuda.factor import Wanted, factored_there
from iqforge.quantize.rounding.cuda.memory import Memory
from iqforge.quantize.rounding.cuda.place import rounder_there
from iqforge.quantize.rounding.cuda.rounders import DeviceRounders
from iqforge.quantize.rounding.late import Late, LateRounding
from iqforge.quantize.rounding.layouts.codes import SCALES
from iqforge.quantize.rounding.layouts.vectors import VECTORS
from iqforge.quantize.rounding.layouts.words import TABLES
from iqforge.quantize.rounding.methods import ON_CPU, Encoder
from iqforge.quantize.rounding.rows import RowMetrics
from iqforge.quantize.rounding.tensor_moments import MatrixMoments, SumsOnDevice
from iqforge.quantize.rounding.ternary_rounder import TWINS
from iqforge.quantize.run.cuda_device import CudaDevice
from iqforge.quantize.run.piece import ROUNDED_ELEMENTS
from iqforge.quantize.search.trellis.tree import CODEBOOKS
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.model import Model
from iqforge.runtime.tokenizer import SpecialTokens

SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))  # rows, columns
TYPES = ["IQ2_K", "IQ3_K", "IQ4_K", "IQ4_KS", "Q4_K", "Q6_K", "Q4_0", "MXFP4"]


class Given:
    """`TensorMoments` of correlated random vectors, one matrix."""

    def __init__(self, n: int):
        torch.manual_seed(n)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x = torch.randn(2 * n, n, device=device)
        x += torch.randn(2 * n, 8, device=device) @ torch.randn(8, n, device=device)
        self.h = (x.T @ x / (2 * n)).cpu().numpy().astype(np.float64)

    def fit(self, index: int) -> np.ndarray:
        """Return the second moments that rounding uses: float64[n, n]."""
        return self.h

    def hold(self, index: int) -> np.ndarray:
        """Return the held-out second moments, here the same: float64[n, n]."""
        return self.h

    def tokens(self, index: int) -> int:
        """Return how many tokens the moments are of, here 2^20."""
        return 1 << 20

    def origin(self, index: int) -> str:
        """Return where the moments come from, for reports."""
        return "its own"

    def on_device(self, index: int, hold: bool) -> SumsOnDevice | None:
        """Return None: the moments are on the host."""
        return None


def weights(rows: int, n: int) -> np.ndarray:
    """Return random weights float32[rows, n] with standard deviation 0.02, the same for the same
    `rows`.
    """
    return np.random.default_rng(rows).normal(0, 0.02, (rows, n)).astype(np.float32)


def compare(args: argparse.Namespace) -> None:
    """Print for every type whether the bytes of the GPU are the CPU's."""
    n, given = 768, MatrixMoments(Given(768), 0)
    gpu, x = DeviceRounders([CudaDevice(0)]), weights(100, 768)
    wrong = []
    for name in args.type or [*SCALES, *VECTORS, *TABLES, "IQ4_KSS", *CODEBOOKS, *TWINS]:
        type = ggml_type(name)
        made = [list(on.rounder(type, n, given, 0.25, 2, name).stages(x)) for on in (ON_CPU, gpu)]
        same = [bool((a == b).all()) for a, b in zip(*made, strict=True)]
        importance = np.random.default_rng(0).gamma(1, 1, n)
        found = [np.empty((len(x), type.row_bytes(n)), dtype=np.uint8) for _ in range(2)]
        if name not in TWINS:
            for on, out in zip((ON_CPU, gpu), found, strict=True):
                on.search(type, n, importance)(x, out)
            same.append(bool((found[0] == found[1]).all()))
        print(f"{name:10s} {'same' if all(same) else f'DIFFERENT {same}'}", flush=True)
        wrong += [] if all(same) else [name]
    print("all types: the CPU's bytes" if not wrong else f"different: {', '.join(wrong)}")


def shapes(args: argparse.Namespace) -> None:
    """Print seconds for matrices of Llama 8B."""
    device = CudaDevice(0)
    with device.context():
        memory, stream = Memory(device), device.stream()
        for rows, n in SHAPES:
            given, x = MatrixMoments(Given(n), 0), weights(rows, n)
            for turn in range(2):  # the first one compiles
                started = time.perf_counter()
                factor = factored_there([Wanted(given, 0.25, "x")], 0, memory, stream)
                if turn:
                    print(f"{rows} x {n}: factored in {time.perf_counter() - started:.3f} s")
            for name in args.type or TYPES:
                type = ggml_type(name)
                make = rounder_there(type)
                if make is None:
                    raise SystemExit(f"{name} is not rounded with second moments")
                rounder = make(type, n, factor, 2, memory, stream)
                list(rounder.stages([x[:256]]))
                seconds, started = [], time.perf_counter()
                for _ in rounder.stages([x]):
                    seconds.append(time.perf_counter() - started)
                    started = time.perf_counter()
                said = ", ".join(f"{one:.3f}" for one in seconds)
                rate = rows * n / sum(seconds) / 1e6
                print(f"{rows} x {n} {name:7s} {said} s ({rate:.0f} M weights/s)", flush=True)


def whole(args: argparse.Namespace) -> None:
    """Print how long collecting, choosing and rounding of the first layers take."""
    source = SyntheticSource(f"{args.shape}:BF16")
    rounders = DeviceRounders([CudaDevice(0)])
    rows = None if args.no_couple_rows else RowMetrics(source)
    type = (args.type or ["IQ3_K"])[0]
    planned = [p for p in plan_quantization(source, type, pure=True) if not p.kept]
    with Model(source, "cuda", precision="f16") as model:
        model.special_tokens = SpecialTokens()
        model.load()
        n_tokens = 512 * args.chunks
        tokens = np.random.default_rng(0).integers(0, model.n_vocab, n_tokens).tolist()
        options = HessianOptions(n_ctx=512, batch_tokens=8192)
        layers = LayerMoments(model, [Text(tokens)], options, tempfile.gettempdir())
        count = args.layers or len(model.network.blocks)
        every, total = [], time.perf_counter()
        with ThreadPoolExecutor(args.threads) as pool:
            for number in range(count):
                own = [p for p in planned if TensorName.parse(p.source.name).layer == number]
                started = time.perf_counter()
                layers.wanted.add(number)
                layers.needed[number] = len(own)
                store = layers.layer(number)
                torch.cuda.synchronize()
                collected = time.perf_counter() - started

                def find(plan: PlannedTensor, store: object = store) -> Callable[[], Late]:
                    def late() -> Late:
                        found = moments_of(store, plan.source.name, plan.source.shape)  # pyright: ignore[reportArgumentType] # None without moments
                        diagonal = layers.entries[plan.source.name]
                        mean = diagonal.sums / np.maximum(diagonal.counts, 1)[:, None]
                        return Late(found, mean)

                    return late

                made = [
                    LateRounding(
                        source,
                        p,
                        find(p),
                        lambda: None,
                        threads=args.threads,
                        rounders=rounders,
                        rows=rows,
                    )
                    for p in own
                ]
                work = [piece for one in made for piece in pieces(source, one)]
                list(pool.map(lambda piece: piece(), work))
                for _ in own:
                    layers.done(number)
                seconds = time.perf_counter() - started
                every.append(seconds)
                errors = [one.choice.error for one in made if one.choice and one.choice.error]
                print(
                    f"layer {number}: collected in {collected:.2f} s, all in {seconds:.2f} s,"
                    f" held-out errors {np.round(errors, 3)}",
                    flush=True,
                )
        layers.close()
    print(
        f"{args.shape} to {type}, {args.chunks} chunks: {count} layers in"
        f" {time.perf_counter() - total:.0f} s, {np.median(every):.2f} s per layer; host"
        f" {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB at most"
    )


def pieces(source: SyntheticSource, one: LateRounding) -> Iterator[Callable[[], None]]:
    """Yield what rounds the pieces of a tensor, in order, as a run cuts them."""
    info, type = one.plan.source, one.plan.target.type
    rows = info.n_rows // info.n_matrices
    step = max(1, ROUNDED_ELEMENTS // info.n_cols)
    for index in range(info.n_matrices):
        run = one.encoder(type, info.n_cols, index)
        first = index * rows
        for start in range(first, first + rows, step):
            yield partial(rounded, source, one, run, start, min(start + step, first + rows))


def rounded(
    source: SyntheticSource, one: LateRounding, run: Encoder, start: int, stop: int
) -> None:
    """Round rows of a tensor."""
    info = one.plan.source
    x = decode(info.type, source.read_rows(info, start, stop), info.n_cols)
    out = np.empty((len(x), one.plan.target.type.row_bytes(info.n_cols)), dtype=np.uint8)
    run(x, out)


def main() -> None:
    """Parse the command line and run the comparison `bytes`, `shapes` or `whole`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["bytes", "shapes", "whole"])
    parser.add_argument("--type", nargs="+")
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--chunks", type=int, default=512)
    parser.add_argument("--layers", type=int, default=0, help="of `whole` (default: all)")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--no-couple-rows", action="store_true", help="of `whole`")
    args = parser.parse_args()
    {"bytes": compare, "shapes": shapes, "whole": whole}[args.what](args)


if __name__ == "__main__":
    main()
