"""Few new tokens after many, in models with latent attention: the naive and the absorbed form.

    python benchmarks/latent_prompts.py
    python benchmarks/latent_prompts.py --shape deepseek-v3:6 --depth 16384 --tokens 32 64

Models have random weights in IQ4_K: all layers of deepseek-v2-lite, and three of deepseek-v3, which
are dense. All their layers have all queries (`all_logits`); otherwise the last one has a single
query, which is absorbed long before others are. So the vocabulary is small. Prints Markdown:
milliseconds of a prompt in both forms, which take turns, the least of several; then the faster form
and by which factor. * marks where `is_absorbed` (runtime/cuda/prompt/mixers/latent_absorbed.py)
chooses the other one; its constants follow from this.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch

WARM = 2  # passes of a form that are not measured: the first compiles, the second captures


def main() -> None:
    """Parse the command line and print a table of the times of both forms, in milliseconds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        default=["deepseek-v2-lite", "deepseek-v3:3"],
        metavar="SHAPE[:LAYERS]",
    )
    parser.add_argument("--depth", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[9, 16, 32, 48, 64, 96, 128, 256, 512]
    )
    parser.add_argument("--cache", default="f16", help="type of the cache")
    parser.add_argument("-r", "--repetitions", type=int, default=6)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device found")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cache {args.cache}\n")
    head = [f"{n} tokens" for n in args.tokens]
    print(f"| shape | before | form | {' | '.join(head)} |")
    print("|---|---|---|" + "---|" * len(head), flush=True)
    for name in args.shape:
        measure(name, args.depth, args.tokens, args.cache, args.repetitions)


def measure(spec: str, depths: list[int], counts: list[int], cache: str, repetitions: int) -> None:
    """Print three rows for each number of tokens before."""
    from iqforge.runtime.bench.shapes import SHAPES
    from iqforge.runtime.bench.synthetic import SyntheticSource
    from iqforge.runtime.model import Model
    from iqforge.runtime.state.cache import CacheSettings

    name, _, layers = spec.partition(":")
    n_layers = int(layers or SHAPES[name].n_layers)
    n_dense = min(n_layers, SHAPES[name].n_dense)
    SHAPES["short"] = replace(SHAPES[name], n_layers=n_layers, n_dense=n_dense, n_vocab=4096)
    heads, capacity = SHAPES[name].n_heads, max(depths) + max(counts)
    tokens = torch.randint(4096, (capacity,), generator=torch.Generator().manual_seed(1))
    settings = CacheSettings(cache)
    with Model(SyntheticSource("short:IQ4_K"), "cuda", cache=settings, context=capacity) as model:
        state = model.new_state(capacity)
        for depth in sorted(depths):
            model.extend(tokens[state.n_past : depth], state)
            found = [both(model, tokens, n, state, repetitions) for n in counts]
            for i, form in enumerate(("naive", "absorbed")):
                row(spec, depth, form, [f"{1e3 * times[i]:.2f}" for times in found])
            chosen = [compared(n, depth, heads, *x) for n, x in zip(counts, found, strict=True)]
            row(spec, depth, "faster", chosen)


def both(model, tokens: torch.Tensor, n: int, state, repetitions: int) -> tuple[float, float]:
    """Return the seconds of the next n tokens in the naive and in the absorbed form."""
    depth, taken = state.n_past, ([], [])
    for _ in range(WARM + repetitions):
        for form, found in enumerate(taken):
            found.append(seconds(model, tokens[depth : depth + n], state, bool(form)))
            state.truncate(depth)
    naive, absorbed = (min(found[WARM:]) for found in taken)
    return naive, absorbed


def seconds(model, tokens: torch.Tensor, state, absorbed: bool) -> float:
    """Return the time of a prompt in a form."""
    from iqforge.runtime.cuda.prompt.mixers import latent_absorbed

    latent_absorbed.forced = absorbed
    try:
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.extend(tokens, state, all_logits=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began
    finally:
        latent_absorbed.forced = None


def compared(n: int, depth: int, heads: int, naive: float, absorbed: float) -> str:
    """Return the faster form, by which factor, and * where the other one would be chosen."""
    from iqforge.runtime.cuda.prompt.mixers.latent_absorbed import is_absorbed

    wins = absorbed < naive
    name, factor = ("absorbed", naive / absorbed) if wins else ("naive", absorbed / naive)
    return f"{name} {factor:.2f}" + "*" * (wins != is_absorbed(n, depth + n, heads))


def row(spec: str, depth: int, form: str, columns: list[str]) -> None:
    """Print a row of Markdown: shape, tokens before, form, and a cell per number of new tokens."""
    print(f"| {spec} | {depth:,} | {form} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
