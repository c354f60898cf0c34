"""The table of docs/benchmarks/cuda.md: prompts of 2048 tokens (-ub 2048) and 128 tokens of generation on random weights of real shapes.

    python tests/measure_cuda.py                                     # all rows; about a minute on one H200 with compiled kernels
    python tests/measure_cuda.py --shape llama-8b --type IQ4_K -r 5  # these rows only
    python tests/measure_cuda.py --apart                             # a process per row: one that fails does not touch the others

Prints markdown: the reference's figures, what must be reached, the goal, and ours with its share of the limit of the device.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """pp2048 / tg128 in tokens/s. `reference`: ik_llama.cpp of August 2026 and llama.cpp of October 2026 on one H200, flash attention on.
    `limit`: generation at 4.3 TB/s, what a large copy reaches there."""

    shape: str
    type: str
    reference: tuple[str, str]
    limit: int
    must: tuple[int, int]
    goal: tuple[int, int]


ROWS = [
    Row("llama-8b", "IQ4_K", ("8,517 / 201", "-"), 986, (20000, 350), (35000, 600)),
    Row("llama-8b", "IQ4_KS", ("11,924 / 302", "-"), 1040, (20000, 400), (35000, 620)),
    Row("llama-8b", "Q4_K", ("10,505 / 283", "10,035 / 293"), 986, (20000, 400), (35000, 650)),
    Row("llama-8b", "IQ2_K", ("9,859 / 316", "-"), 1720, (20000, 450), (35000, 800)),
    Row("llama-8b", "Q8_0", ("12,244 / 267", "11,460 / 254"), 540, (22000, 350), (38000, 450)),
    Row("qwen3-30b-a3b", "IQ4_K", ("6,838 / 181", "-"), 2410, (20000, 350), (40000, 600)),
    Row("qwen3-30b-a3b", "Q4_K", ("6,760 / 229", "12,164 / 296"), 2410, (20000, 400), (40000, 650)),
    Row("llama-70b", "IQ4_K", ("994 / 29.4", "1,231 / 48.0 (Q4_K)"), 109, (3000, 60), (5000, 85)),
]
HEADER = ("| shape, type | ik_llama.cpp | llama.cpp | limit tg | must | goal | ours | share of FLOP rate / bandwidth | reached |",
          "| --- | --- | --- | --- | --- | --- | --- | --- | --- |")


def measure(row: Row, args: argparse.Namespace) -> str:
    """One line of the table."""
    from iqforge.runtime.bench import Test, deviation, run_test
    from iqforge.runtime.bench_command import chosen_device, open_model
    from iqforge.runtime.bench_options import OPTIONS
    from iqforge.runtime.cuda.device_facts import device_facts

    device = chosen_device(args.device)
    setting = {option.field: option.default for option in OPTIONS} | {"precision": args.precision, "n_ubatch": 2048}
    begin = time.time()
    with open_model(f"{row.shape}:{row.type}", True, device, setting, context=max(args.n_prompt, args.n_gen),
                    verbose=True) as model:
        say(f"{row.shape}:{row.type} loaded in {time.time() - begin:.1f} s")
        results = []
        for test in (Test(n_prompt=args.n_prompt), Test(n_gen=args.n_gen)):
            begin = time.time()
            results.append(run_test(model, test, repetitions=args.repetitions))
            speeds = results[-1].samples_ts
            say(f"{row.shape}:{row.type} {test.label}: {', '.join(f'{x:.1f}' for x in speeds)} t/s, {time.time() - begin:.1f} s in all")
    pp, tg = (result.avg_ts for result in results)
    ours = " / ".join(f"{x:,.{digits}f} ± {deviation(r.samples_ts):.{digits}f}" for r in results
                      for x, digits in [(r.avg_ts, 0 if r.avg_ts >= 1000 else 1)])
    shares = "-"
    if device.type == "cuda":
        facts = device_facts(device)
        parts = ((results[0].flop_per_second, facts.bf16_rate), (results[1].bytes_per_second, facts.bandwidth))
        shares = " / ".join(f"{100 * reached / limit:.0f} %" if limit else "-" for reached, limit in parts)
    verdict = " / ".join("goal" if x >= goal else "must" if x >= must else f"{100 * x / must:.0f} % of must"
                         for x, must, goal in zip((pp, tg), row.must, row.goal))
    pair = " / ".join
    return (f"| {row.shape} {row.type} | {row.reference[0]} | {row.reference[1]} | {row.limit:,} | {pair(f'{x:,}' for x in row.must)} | "
            f"{pair(f'{x:,}' for x in row.goal)} | {ours} | {shares} | {verdict} |")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="rows of this shape")
    parser.add_argument("--type", action="append", help="rows of this type")
    parser.add_argument("--apart", action="store_true", help="a process per row")
    parser.add_argument("--no-header", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("-p", "--n-prompt", type=int, default=2048)
    parser.add_argument("-n", "--n-gen", type=int, default=128)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    args = parser.parse_args()
    rows = [row for row in ROWS if (not args.shape or row.shape in args.shape) and (not args.type or row.type in args.type)]
    if not args.no_header:
        print("\n".join(HEADER), flush=True)
    failed = 0
    for row in rows:
        if args.apart:
            words = [word for word in sys.argv[1:] if word != "--apart"]  # of a flag given twice both are meant, so the row's come alone
            words = _without(_without(words, "--shape"), "--type") + ["--shape", row.shape, "--type", row.type, "--no-header"]
            failed += subprocess.run([sys.executable, __file__, *words]).returncode != 0
            continue
        try:
            print(measure(row, args), flush=True)
        except Exception:  # the other rows are worth having
            failed += 1
            traceback.print_exc()
            print(f"| {row.shape} {row.type} | failed |", flush=True)
        gc.collect()
        if args.device != "cpu":
            torch.cuda.empty_cache()
    return 1 if failed else 0


def _without(words: list[str], flag: str) -> list[str]:
    return [word for i, word in enumerate(words) if word != flag and (i == 0 or words[i - 1] != flag)]


if __name__ == "__main__":
    sys.exit(main())
