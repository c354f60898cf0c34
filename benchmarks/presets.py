"""Measure every preset on one model: size, perplexity, and whether types and sizes are those of the
reference's tool.

    python benchmarks/presets.py MODEL.gguf --imatrix F --text wiki.test.txt [--chunks 8] \\
        [--reference llama-quantize] [--preset P ...]

--reference takes the path of ik_llama.cpp's llama-quantize. Its `--dry-run` is run for every preset
that it has, and the type of each tensor is compared; the size of the tensor data in our file must
match these types to the byte. A preset that gives the same types as an earlier one is not measured
again. --preset and --rules choose rows.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import tempfile
import time

import iqforge
from iqforge.api import plan_quantization
from iqforge.formats.ftypes import FILE_TYPES
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.types import ggml_type
from iqforge.imatrix.files.load import load_imatrix
from iqforge.quantize.plan.mainline import MAINLINE, ONLY_MAINLINE
from iqforge.quantize.plan.recipe import Recipe

_LINE = re.compile(
    r"^\[ *\d+/ *\d+\]\s+(\S+) - \[.*?\], type = +[^,]+,(?s:(?!^\[).)*?(?:converting to"
    r" (\w+)|size =)",
    re.M,
)


def planned_by(tool: str, model: str, preset: str, imatrix: str | None) -> dict[str, str | None]:
    """Return type names by tensor, as the reference's dry run prints them; None for tensors that it
    keeps.
    """
    command = [
        tool,
        "--dry-run",
        *(["--imatrix", imatrix] if imatrix else []),
        model,
        "/dev/null",
        preset,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stdout[-800:]}")
    return {found[1]: found[2] for found in _LINE.finditer(done.stdout)}


def compared(tool: str, model: str, preset: str, imatrix: str | None, out: str) -> str:
    """Say whether the file `out` has the types and the bytes of the reference's plan."""
    plan = planned_by(tool, model, preset, imatrix)
    with open_gguf(model) as source, open_gguf(out) as result:
        wanted = {
            t.name: t.with_type(ggml_type(kind) if (kind := plan[t.name]) else t.type)
            for t in source.tensors
        }
        apart = [t.name for t in result.tensors if wanted[t.name] != t]
        n_bytes, ours = (
            sum(t.n_bytes for t in wanted.values()),
            sum(t.n_bytes for t in result.tensors),
        )
    return "yes" if not apart and ours == n_bytes else f"NO: {apart}, {n_bytes} bytes"


def main() -> None:
    """Measure every preset and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--imatrix")
    parser.add_argument("--text", required=True)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--reference", help="llama-quantize of ik_llama.cpp")
    parser.add_argument("--preset", action="append", dest="presets")
    parser.add_argument("--rules", choices=("ik", "mainline"))
    args = parser.parse_args()
    imatrix = load_imatrix(args.imatrix) if args.imatrix else None
    every = [(name, "mainline" if name in ONLY_MAINLINE else "ik") for name in FILE_TYPES]
    every += [
        (name, "mainline")
        for name in FILE_TYPES
        if name in (MAINLINE.presets or set()) - ONLY_MAINLINE
    ]
    first: dict[tuple, tuple[str, str]] = {}
    with open_gguf(args.model) as source:
        plans = {
            run: plan_quantization(source, Recipe(run[0], rules=run[1]), imatrix) for run in every
        }
    keys = {run: tuple(plan.target.type.name for plan in planned) for run, planned in plans.items()}
    for run in every:
        first.setdefault(keys[run], run)
    print("| preset | rules | bytes of tensors | bpw | PPL | as the reference plans | quantize s |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "q.gguf")
        for name, rules in every:
            if (args.presets and name not in args.presets) or (args.rules and rules != args.rules):
                continue
            like = first[keys[name, rules]]
            if like != (name, rules) and rules == "mainline":
                print(f"| {name} | {rules} | | | as {' '.join(like)} | | |", flush=True)
                continue
            started = time.monotonic()
            report = iqforge.quantize_model(args.model, out, name, args.imatrix, rules=rules)
            seconds = time.monotonic() - started
            verdict = (
                compared(args.reference, args.model, name, args.imatrix, out)
                if args.reference and rules == "ik"
                else "-"
            )
            perplexity = f"as {' '.join(like)}"
            if like == (name, rules):
                result = iqforge.measure_perplexity(out, args.text, chunks=args.chunks)
                assert math.isfinite(result.perplexity), name
                perplexity = f"{result.perplexity:.3f}"
            row = (
                name,
                rules,
                report.target_bytes,
                f"{report.bits_per_weight:.3f}",
                perplexity,
                verdict,
                f"{seconds:.1f}",
            )
            print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
