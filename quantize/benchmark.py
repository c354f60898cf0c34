"""How fast rows are quantized: `python -m iqforge.quantize.benchmark --type IQ4_K --device cuda`.

On a GPU the weights are resident and only the search is timed, by the device's own clock; on the CPU the whole call is. The
first run, which compiles, is not counted. The bytes of a GPU are compared with the CPU's on the first and last rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np

from ..errors import IqforgeError, UsageError
from ..formats.types import GGMLType, ggml_type
from .encode import encode, encodable_types, row_encoder
from .run import default_threads
from .search.trellis_tree import CODEBOOKS as TRELLIS_TYPES  # these have another algorithm on a GPU


@dataclass(frozen=True)
class Timing:
    """Elements per second of one type: of the search, and of `encode` as a whole (on a GPU with copies to and from pageable
    memory); and whether the checked bytes equal the CPU's (None: not checked)."""

    type: str
    search: float
    whole: float
    same_bytes: bool | None


def sample_rows(rows: int, n_cols: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Weights like a model's, float32[rows, n_cols] (Gaussian, some rows and elements larger), and importances float32[n_cols]."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, n_cols), dtype=np.float32)
    x *= rng.uniform(0.01, 0.05, (rows, 1)).astype(np.float32)
    x.reshape(-1)[rng.integers(0, x.size, max(1, x.size // 1000))] *= np.float32(6)
    return x, rng.gamma(0.5, 2, n_cols).astype(np.float32)


def measure(type: str | GGMLType, x: np.ndarray, importance: np.ndarray | None, device: str = "cpu", threads: int = 1,
            repeat: int = 5, check_rows: int = 64) -> Timing:
    """Time one type: the median of `repeat` runs. Errors as `encode` raises them."""
    type = ggml_type(type)
    if device == "cpu":
        encode(type, x[: type.group_rows * 8], importance)
        seconds = []
        for _ in range(repeat):
            start = time.perf_counter()
            encode(type, x, importance, threads=threads)
            seconds.append(time.perf_counter() - start)
        speed = x.size / float(np.median(seconds))
        return Timing(type.name, speed, speed, None)
    encoder = row_encoder(type, x.shape[1], importance, device)
    seconds = encoder.time_resident(x, repeat)
    ends = np.concatenate([x[:check_rows], x[-check_rows:]])
    start = time.perf_counter()
    whole = encode(type, x, importance, device)
    whole_seconds = time.perf_counter() - start
    same = None if type.name in TRELLIS_TYPES else np.array_equal(encode(type, ends, importance, threads=default_threads()),
                          np.concatenate([whole[:check_rows], whole[-check_rows:]]))
    return Timing(type.name, x.size / float(np.median(seconds)), x.size / whole_seconds, same)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m iqforge.quantize.benchmark", description=__doc__.splitlines()[0])
    parser.add_argument("--type", nargs="+", metavar="T", help="types to time (default: all that have a search)")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=14336)
    parser.add_argument("--threads", type=int, default=1, help="on the CPU (default 1)")
    parser.add_argument("--repeat", type=int, default=5, help="timed runs, of which the median counts")
    parser.add_argument("--check-rows", type=int, default=64, help="rows at either end whose bytes are compared with the CPU's")
    parser.add_argument("--no-importance", action="store_true", help="weigh all columns alike")
    args = parser.parse_args(argv)
    try:
        if min(args.rows, args.cols, args.threads, args.repeat, args.check_rows) < 1:
            raise UsageError("--rows, --cols, --threads, --repeat and --check-rows take numbers above 0")
        types = [ggml_type(t) for t in args.type or encodable_types()]
        x, importance = sample_rows(args.rows, args.cols)
        print(f"float32[{args.rows}, {args.cols}] on {args.device}, {'without' if args.no_importance else 'with'} importance")
        print(f"{'type':12s} {'M elements/s':>12s} {'whole call':>12s}  same bytes as cpu")
        wrong = 0
        for type in types:
            if type.is_float or type.is_interleaved and not args.type:
                continue
            timing = measure(type, x, None if args.no_importance else importance, args.device, args.threads, args.repeat, args.check_rows)
            shown = {None: "", True: "yes", False: "NO"}[timing.same_bytes]
            print(f"{timing.type:12s} {timing.search / 1e6:12.1f} {timing.whole / 1e6:12.1f}  {shown}", flush=True)
            wrong += timing.same_bytes is False
        return 1 if wrong else 0
    except IqforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
