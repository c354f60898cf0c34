"""Few new tokens after many, in models with latent attention: the naive and the absorbed form.

    python benchmarks/latent_prompts.py
    python benchmarks/latent_prompts.py --shape deepseek-v2-lite --depth 2048 8192 --tokens 16 64

Models have random weights in IQ4_K and the first three layers of their shape, without experts, so
that little but attention is measured. Prints Markdown: milliseconds of a prompt in both forms, the
least of several. `MOST_QUERIES` of runtime/cuda/prompt/latent_absorbed.py follows from it.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch

LAYERS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["deepseek-v2-lite", "deepseek-v3"])
    parser.add_argument("--depth", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[9, 16, 24, 32, 48, 64, 96, 128, 256, 512]
    )
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {LAYERS} layers\n")
    head = [f"{n} tokens" for n in args.tokens]
    print(f"| shape, tokens before | form | {' | '.join(head)} |")
    print("| --- | --- |" + " --- |" * len(head))
    for name in args.shape:
        measure(name, args.depth, args.tokens, args.repetitions)


def measure(name: str, depths: list[int], counts: list[int], repetitions: int) -> None:
    """Print two rows for each number of tokens before."""
    from iqforge.runtime.bench.shapes import SHAPES
    from iqforge.runtime.bench.synthetic import SyntheticSource
    from iqforge.runtime.model import Model

    short = {"n_layers": LAYERS, "n_dense": LAYERS, "n_vocab": 4096}
    SHAPES["short"] = replace(SHAPES[name], **short)
    tokens = torch.randint(4096, (max(depths) + max(counts),))
    with Model(SyntheticSource("short:IQ4_K"), "cuda") as model:
        state = model.new_state(len(tokens))
        for depth in sorted(depths):
            model.extend(tokens[state.n_past : depth], state)
            kept = state.snapshot()
            for form in ("naive", "absorbed"):
                found = []
                for n in counts:
                    new, took = tokens[depth : depth + n], []
                    for _ in range(repetitions + 2):  # the first ones compile and capture
                        took.append(seconds(model, new, state, form == "absorbed"))
                        state.restore(kept)
                    found.append(f"{1e3 * min(took[2:]):.2f}")
                print(f"| {name}, {depth:,} | {form} | {' | '.join(found)} |", flush=True)


def seconds(model, tokens: torch.Tensor, state, absorbed: bool) -> float:
    """Return the time of a prompt in a form."""
    from iqforge.runtime.cuda.prompt import latent_absorbed

    latent_absorbed.forced = absorbed
    torch.cuda.synchronize()
    began = time.perf_counter()
    model.extend(tokens, state)
    torch.cuda.synchronize()
    latent_absorbed.forced = None
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
