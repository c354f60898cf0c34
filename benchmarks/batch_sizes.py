"""Time of a pass by its number of tokens, for every shape of `iqforge bench --synthetic`.

    python benchmarks/batch_sizes.py
    python benchmarks/batch_sizes.py --shape glm-5 qwen3.5-35b-a3b --tokens 1 8 9 16 --layers 8
    python benchmarks/batch_sizes.py --compile 8   # first compile their kernels, by 8 processes

A row for each shape, of at most --layers layers, but of enough to have every kind of layer. Columns
are the milliseconds of a prompt of so many tokens into an empty context (1: a generated token), the
fastest of -r. Prints Markdown, a row as soon as it is measured.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import traceback

import torch

TOKENS = (1, 4, 8, 9, 16, 32, 64, 128, 256, 512, 2048)


def milliseconds(name: str, tokens: list[int], repetitions: int, device: str) -> list[float]:
    """Return the times of passes of a synthetic model."""
    import iqforge.api
    from iqforge.runtime.bench.bench import Test, run_test
    from iqforge.runtime.commands.speed.flags import OPTIONS
    from iqforge.runtime.commands.speed.settings import open_model
    from iqforge.runtime.weights.devices import usable_device

    setting = {option.field: option.default for option in OPTIONS}
    setting |= {"n_ubatch": 2048, "precision": "f32" if device == "cpu" else "bf16"}
    where, context = usable_device(device), max(*tokens, 32)
    with open_model(
        iqforge.api, name, True, where, setting, context=context, verbose=False
    ) as model:
        found = []
        for n in tokens:
            test = Test(n_prompt=n) if n > 1 else Test(n_gen=32)
            result = run_test(model, test, repetitions=repetitions)
            found.append(min(result.samples_ns) / 1e6 / (32 if n == 1 else 1))
        return found


def main() -> int:
    """Measure the shapes that were asked for. Return how many of them failed."""
    from iqforge.runtime.bench.shapes import SHAPES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=SHAPES, metavar="NAME")
    parser.add_argument("--type", default="IQ4_K")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, metavar="N")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--compile", type=int, default=0, metavar="N")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-header", action="store_true")
    args = parser.parse_args()
    if args.compile:
        same = [
            "--device",
            args.device,
            "--type",
            args.type,
            "--layers",
            str(args.layers),
            "--no-header",
            "-r",
            "1",
        ]
        same += ["--tokens", *map(str, args.tokens)]
        parts = [args.shape[i :: args.compile] for i in range(args.compile)]
        running = [
            subprocess.Popen(
                [sys.executable, __file__, *same, "--shape", *part], stdout=subprocess.DEVNULL
            )
            for part in parts
            if part
        ]
        for process in running:
            process.wait()
    if not args.no_header:
        print("| shape | layers |", " | ".join(map(str, args.tokens)), "|")
        print("|", " | ".join(["---"] * (2 + len(args.tokens))), "|", flush=True)
    failed = 0
    for name in args.shape:
        shape = SHAPES[name]
        n = min(shape.n_layers, max(args.layers, shape.least_layers))
        layers = "" if n == shape.n_layers else f",layers={n}"
        try:
            found = milliseconds(
                f"{name}:{args.type}{layers}", args.tokens, args.repetitions, args.device
            )
        except Exception:  # the other shapes are still measured
            failed += 1
            traceback.print_exc()
        else:
            print(f"| {name} | {n} |", " | ".join(f"{x:.3f}" for x in found), "|", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return failed


if __name__ == "__main__":
    sys.exit(main())
