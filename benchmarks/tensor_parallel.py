"""Measure models on one GPU and on several, one line of JSON for each.

    python benchmarks/tensor_parallel.py measure -o out.jsonl llama-70b:IQ4_K@0+32768
    python benchmarks/tensor_parallel.py measure -o out.jsonl --ranks 2 llama-70b:IQ4_K
    python benchmarks/tensor_parallel.py measure -o out.jsonl --ranks 2 --mode layer llama-8b:IQ4_K
    python benchmarks/tensor_parallel.py table out.jsonl --predict 2 --predict 4

A model is NAME:TYPE, or NAME:TYPE@DEPTH+DEPTH with tokens in the context before what is measured:
2,048 tokens of a prompt and 64 steps. Models are measured one after the other in one process per
GPU. Every line has the speeds, the memory that was planned and taken, the seconds to load, and a
digest of the logits of one prompt and of sixteen steps.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

N_CHECKED, N_CHECKED_STEPS = 100, 16


def main() -> int:
    """Parse the command line and measure, or print the tables. Return the exit status."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast of NVLink
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure", help="measure models")
    one.add_argument("models", nargs="+", metavar="NAME:TYPE[@DEPTH+...]")
    one.add_argument("--ranks", type=int, default=1)
    one.add_argument("--mode", choices=("graph", "layer"), default="graph")
    one.add_argument("-r", "--repetitions", type=int, default=3)
    one.add_argument("--tokens", type=int, nargs=2, default=(2048, 64), help="of prompts and steps")
    one.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    one.add_argument(
        "-o", "--json", type=Path, required=True, help="the file to which lines are added"
    )
    one.add_argument("--save", type=Path, help="a folder for the logits of the checked prompt")
    one.add_argument("--commit", default="", help="of the code, for the lines")
    two = commands.add_parser("table", help="print the figures as Markdown")
    two.add_argument("lines", type=Path, nargs="+", help="files of `measure`")
    two.add_argument(
        "--predict",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="add what `plan-split --simulate` predicts for N GPUs",
    )
    args = parser.parse_args()
    if args.command == "measure":
        return start(args)
    found = [json.loads(line) for path in args.lines for line in path.read_text().splitlines()]
    print(table(found, args.predict))
    return 0


def table(lines: Sequence[dict[str, Any]], predicted: Sequence[int] = ()) -> str:
    """Return the figures as a table with a column for each number of GPUs; predicted: for these
    from an empty context.
    """
    ways = sorted({(line["gpus"], line["mode"]) for line in lines})
    names = {1: "one GPU", 2: "2 GPUs"}
    head = ["model", *(f"{names.get(n, f'{n} GPUs')}{', layer' * (m == 'layer')}" for n, m in ways)]
    head += [f"{names.get(n, f'{n} GPUs')}, predicted" for n in predicted]
    rows = [head, ["---"] * len(head)]
    for model, depth in dict.fromkeys((line["model"], line["depth"]) for line in lines):
        at = {
            (x["gpus"], x["mode"]): x for x in lines if (x["model"], x["depth"]) == (model, depth)
        }
        cells = [
            f"{at[way]['prompt']:,.0f} / {at[way]['step']:,.1f}" if way in at else "-"
            for way in ways
        ]
        cells += ["-" if depth else prediction(model, n) for n in predicted]
        rows.append([model + (f" at depth {depth:,}" if depth else ""), *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def prediction(model: str, n: int) -> str:
    """Return what `plan-split` predicts for n GPUs: tokens per second of prompts / of steps."""
    import iqforge

    report = iqforge.plan_split(model, (1,) * max(2, n), synthetic=True)
    found = report.alone if n == 1 else report.prediction
    return f"{found.prompt_rate:,.0f} / {found.step_rate:,.0f}"


def start(args: argparse.Namespace) -> int:
    """Start the ranks, or measure the models in one of them. Return the exit status, 1 if a model
    failed.
    """
    from iqforge.runtime.parallel.launch import run_ranks
    from iqforge.runtime.parallel.ranks import Ranks

    if args.ranks > 1 and Ranks.here() is None:
        return run_ranks([sys.executable, *sys.argv], args.ranks)
    status = 0
    for word in args.models:
        spec, _, depths = word.partition("@")
        try:
            measure(args, spec, [int(depth) for depth in depths.split("+")] if depths else [0])
        except Exception as error:
            if args.ranks > 1:  # the others may wait for this one
                raise
            print(f"FAILED {spec}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            status = 1
    return status


def measure(args: argparse.Namespace, spec: str, depths: Sequence[int]) -> None:
    """Measure one model at all depths, and add lines to the file in the first rank."""
    import iqforge
    import torch
    from iqforge.runtime import memory
    from iqforge.runtime.parallel.ranks import Ranks

    ranks = Ranks.here()
    rank = 0 if ranks is None else ranks.rank
    on_gpu = args.device == "cuda"
    here = torch.device("cuda", rank) if on_gpu else torch.device("cpu")

    def taken() -> int:
        """Return the bytes of the GPU that are in use."""
        if not on_gpu:
            return 0
        torch.cuda.synchronize(here)
        free, total = torch.cuda.mem_get_info(here)
        return total - free

    if on_gpu:
        torch.cuda.set_device(here)
        gc.collect()
        torch.cuda.empty_cache()
    before = taken()
    split: dict[str, Any] = {}
    if args.ranks > 1:
        split = {"split_mode": args.mode, "tensor_split": ",".join(["1"] * args.ranks)}
    begun = time.perf_counter()
    with iqforge.random_model(spec, device=args.device, ubatch=args.tokens[0], **split) as model:
        model.load()
        weights = taken() - before
        seconds = time.perf_counter() - begun
        checked = digits(model, args.save, f"{spec}.{args.ranks}.{args.mode}", rank)
        for depth in depths:
            speeds = timed(model, depth, args.repetitions, *args.tokens)
            [planned, *_] = memory.estimate(  # GPUs are first
                model.network,
                model.weights,
                capacity=depth + sum(args.tokens),
                rows=args.tokens[0],
                precision=model.precision,
            )
            line = {
                "model": spec,
                "gpus": args.ranks,
                "mode": args.mode if args.ranks > 1 else "none",
                "depth": depth,
                **speeds,
                "load_s": round(seconds, 1),
                "weights_mib": [planned.weights >> 20, weights >> 20],
                "memory_mib": [planned.total >> 20, (taken() - before) >> 20],
                **checked,
                "device": torch.cuda.get_device_name(here) if on_gpu else "CPU",
                "date": time.strftime("%Y-%m-%d"),
                "commit": args.commit,
            }
            if rank == 0:
                with args.json.open("a") as lines:
                    lines.write(json.dumps(line) + "\n")
                said = f"{time.strftime('%T')} {spec} x{args.ranks} {line['mode']} d{depth}:"
                said += f" pp {speeds['prompt']:.0f} tg {speeds['step']:.1f}"
                print(f"{said} load {seconds:.1f} s {line['memory_mib']} MiB", flush=True)


def timed(model: Any, depth: int, repetitions: int, n_prompt: int, n_steps: int) -> dict[str, Any]:
    """Return the speeds of a prompt and of steps after `depth` tokens, in tokens/s. At a depth both
    continue one context, which is filled once.
    """
    import iqforge
    import torch
    from iqforge.runtime.bench.bench import Runner, mean, short_collections

    if not depth:
        options = {"prompts": [n_prompt], "generations": [n_steps], "repetitions": repetitions}
        prompts, steps = (one.samples_ts for one in iqforge.benchmark_model(model, **options))
    else:
        state = model.new_state(depth + n_prompt)
        runner = Runner(model, state, n_prompt, torch.Generator().manual_seed(0))

        def rates(n_prompt: int, n_steps: int) -> list[float]:
            runner.warm_up(n_prompt, n_steps, depth)
            found = []
            for _ in range(repetitions):
                runner.fill(depth)
                with short_collections():
                    runner.wait()
                    begun = time.perf_counter()
                    runner.prompt(n_prompt)
                    runner.generate(n_steps)
                    runner.wait()
                    found.append((n_prompt + n_steps) / (time.perf_counter() - begun))
            return found

        prompts, steps = rates(n_prompt, 0), rates(0, n_steps)
    return {
        "prompt": round(mean(prompts), 1),
        "step": round(mean(steps), 2),
        "prompts": [round(one, 1) for one in prompts],
        "steps": [round(one, 2) for one in steps],
    }


def digits(model: Any, folder: Path | None, name: str, rank: int) -> dict[str, Any]:
    """Return a digest of the logits after a prompt and the tokens that follow; the logits go into
    a file of `folder`.
    """
    import numpy as np
    import torch
    from iqforge.runtime.network.sampling import Sampling

    tokens = torch.from_numpy(np.random.default_rng(4).integers(0, model.n_vocab, N_CHECKED))
    state = model.new_state(512)
    logits = model.extend(tokens, state).float().cpu().numpy()
    greedy = list(model.follow(7, state, N_CHECKED_STEPS, Sampling(temperature=0.0)))
    if folder is not None and rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{name.replace(':', '.')}.npy", logits)
    return {"digest": hashlib.sha256(logits.tobytes()).hexdigest()[:16], "greedy": greedy}


if __name__ == "__main__":
    sys.exit(main())
