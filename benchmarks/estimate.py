"""Compare the time and peak memory that `iqforge quantize --dry-run` predicts with those of the
run.

    python benchmarks/estimate.py --model mini-llama-bf16.gguf --type IQ4_K Q4_K_M IQ3_KT Q8_0 \\
        --gigabytes 2 --repeat 3 --dir /tmp

For every model and type a dry run and a run take turns, each in a separate process; medians are
printed with their ratio. With --gigabytes a synthetic bf16 file (random values, as
benchmarks/memory.py writes) is measured too. A dry run before the first one compiles what is not
compiled yet and does not count. --cpu measures CPU seconds of the process on all cores instead of
the time, in the trial and in the run. Other programs on the machine hardly change them.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import types
import unittest.mock

import iqforge
from iqforge.quantize.run import estimate
from memory import write_model

_TIME = re.compile(r"^(?:quantize )?time +=\s+([\d.]+) s", re.M)
_MEMORY = re.compile(r"^peak memory =\s+([\d.]+) MiB", re.M)


def once(command: list[str]) -> tuple[str, float]:
    """Return (what the command printed, its peak resident memory in MiB)."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}\n{said}")
    return said, usage.ru_maxrss / 1024


def figure(pattern: re.Pattern[str], text: str) -> float:
    """Return the number that a line of a run's summary names."""
    found = pattern.search(text)
    if found is None:
        raise SystemExit(f"no line {pattern.pattern} in:\n{text}")
    return float(found[1])


def compare(model: str, type: str, flags: list[str], repeat: int, folder: str) -> list[float]:
    """Return [estimated seconds, seconds, estimated MiB, MiB], medians."""
    out = os.path.join(folder, "out.gguf")
    command = [sys.executable, "-m", "iqforge", "quantize", *flags, model, out, type]
    dry = [*command[:4], "--dry-run", *command[4:]]
    once(dry)
    rows = []
    for _ in range(repeat):
        said, _ = once(dry)
        run, peak = once(command)
        rows.append(
            [
                figure(_TIME, said),
                figure(_TIME, run),
                figure(_MEMORY, said),
                peak,
            ]
        )
        os.unlink(out)
    return [statistics.median(column) for column in zip(*rows)]


def compare_cpu(
    model: str, type: str, flags: list[str], repeat: int, folder: str
) -> tuple[float, float]:
    """Return (estimated, taken) seconds of the process for what follows preparing and loading,
    medians.
    """
    options = {flag.lstrip("-").replace("-", "_"): True for flag in flags}
    out, rows = os.path.join(folder, "out.gguf"), []
    for _ in range(repeat):
        with unittest.mock.patch.object(
            estimate, "time", types.SimpleNamespace(perf_counter=time.process_time)
        ):
            guess = iqforge.quantize_model(
                model, out, type, dry_run=True, estimate=True, **options
            ).estimate
        started = time.process_time()
        iqforge.quantize_model(model, out, type, provenance=False, **options)
        rows.append((guess.working, time.process_time() - started))
    return tuple(statistics.median(column) for column in zip(*rows))


def main() -> None:
    """Run trials and runs in turn, and print their medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="*", default=[], help="GGUF files")
    parser.add_argument("--type", nargs="+", default=["IQ4_K", "Q4_K_M", "Q8_0"])
    parser.add_argument(
        "--gigabytes", type=float, default=0, help="also a synthetic bf16 file of this size"
    )
    parser.add_argument(
        "--synthetic-type", nargs="+", help="types for that file (default: those of --type)"
    )
    parser.add_argument("--flags", default="", help="more flags of quantize, in one word")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="CPU seconds, without memory")
    parser.add_argument("--dir", help="where files go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        jobs = [(model, type) for model in args.model for type in args.type]
        if args.gigabytes:
            synthetic = os.path.join(folder, f"synthetic-{args.gigabytes:g}GB.gguf")
            write_model(synthetic, int(args.gigabytes * 1e9), int(args.gigabytes * 0.25e9))
            jobs += [(synthetic, type) for type in args.synthetic_type or args.type]
        if args.cpu:
            print(
                "| model | type | estimated CPU | taken | ratio |\n|---|---|---|---|---|",
                flush=True,
            )
            for model, type in jobs:
                guess, taken = compare_cpu(model, type, args.flags.split(), args.repeat, folder)
                print(
                    f"| {os.path.basename(model)} | {type} | {guess:.2f} s | {taken:.2f} s |"
                    f" {guess / taken:.2f} |",
                    flush=True,
                )
            return
        print("| model | type | estimated | taken | ratio | memory estimated | peak | ratio |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for model, type in jobs:
            guess, taken, memory, peak = compare(
                model, type, args.flags.split(), args.repeat, folder
            )
            print(
                f"| {os.path.basename(model)} | {type} | {guess:.1f} s | {taken:.1f} s |"
                f" {guess / taken:.2f} | {memory:.0f} MiB | {peak:.0f} MiB | {memory / peak:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
