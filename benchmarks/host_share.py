"""Time what the host takes to start short passes of a prompt, from position 0 and after others.

    python benchmarks/host_share.py deepseek-v2-lite:IQ4_K qwen3-30b-a3b:IQ4_K
    python benchmarks/host_share.py -ctk q8_0 -ctv q8_0 --profile 20 qwen3-30b-a3b:IQ4_K

A row for each model: milliseconds until `Model.extend` returns, which does not wait for the device;
the median of 20 passes of full size. With --profile the functions that take longest follow.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from statistics import median

import iqforge
import torch

WARM, TIMED = 5, 20  # passes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="NAME:TYPE")
    parser.add_argument("--tokens", type=int, default=64, help="of a pass")
    parser.add_argument("-ctk", "--cache-type-k", default="f16")
    parser.add_argument("-ctv", "--cache-type-v", default="f16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="show N functions")
    args = parser.parse_args()
    print(f"| model | from position 0, ms | after {args.tokens} tokens, ms |\n|---|---|---|")
    for spec in args.models:
        options = {"cache_type_k": args.cache_type_k, "cache_type_v": args.cache_type_v}
        with iqforge.random_model(spec, device=args.device, ubatch=args.tokens, **options) as model:
            model.load()
            first, later = (1e3 * median(samples) for samples in timed(model, args.tokens))
            print(f"| {spec} | {first:.2f} | {later:.2f} |", flush=True)
            if args.profile:
                with cProfile.Profile() as profile:
                    timed(model, args.tokens)
                pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)


def timed(model: iqforge.Model, n: int) -> tuple[list[float], list[float]]:
    """Return the seconds of passes of n tokens from position 0, and of those after them."""
    tokens = torch.randint(0, model.n_vocab, (n,), generator=torch.Generator().manual_seed(0))
    first, later = [], []
    for _ in range(WARM + TIMED):
        state = model.new_state(2 * n)
        for samples in (first, later):
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            begun = time.perf_counter()
            model.extend(tokens, state)
            samples.append(time.perf_counter() - begun)
    return first[WARM:], later[WARM:]


if __name__ == "__main__":
    main()
