"""Every preset on one model: size, perplexity, and whether types and sizes are those that the reference's tool would choose.

    python tests/measure_presets.py MODEL.gguf --imatrix F --text wiki.test.txt [--chunks 8] [--reference llama-quantize] [--preset P ...]

With the path of ik_llama.cpp's llama-quantize its own `--dry-run` is asked for every preset that it has, and each tensor's type compared;
the size of tensor data in our file must be what these types take, to the byte.
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
from iqforge.imatrix.files import load_imatrix
from iqforge.quantize.mainline import MAINLINE, ONLY_MAINLINE
from iqforge.quantize.recipe import Recipe

_LINE = re.compile(r"^\[ *\d+/ *\d+\]\s+(\S+) - \[.*?\], type = +[^,]+,(?s:(?!^\[).)*?(?:converting to (\w+)|size =)", re.M)


def planned_by(tool: str, model: str, preset: str, imatrix: str | None) -> dict[str, str | None]:
    """Type names by tensor, as the reference's dry run prints them; None for what it keeps."""
    command = [tool, "--dry-run", *(["--imatrix", imatrix] if imatrix else []), model, "/dev/null", preset]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stdout[-800:]}")
    return {found[1]: found[2] for found in _LINE.finditer(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--imatrix")
    parser.add_argument("--text", required=True)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--reference", help="llama-quantize of ik_llama.cpp")
    parser.add_argument("--preset", action="append", dest="presets")
    args = parser.parse_args()
    runs = [(name, "mainline" if name in ONLY_MAINLINE else "ik") for name in args.presets or FILE_TYPES]
    runs += [(name, "mainline") for name in args.presets or FILE_TYPES if name in MAINLINE.presets - ONLY_MAINLINE]
    print("| preset | rules | bytes of tensors | bpw | PPL | as the reference plans | quantize s |")
    print("|---|---|---|---|---|---|---|")
    seen: dict[tuple, tuple[str, str]] = {}
    imatrix = load_imatrix(args.imatrix) if args.imatrix else None
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "q.gguf")
        for name, rules in runs:
            with open_gguf(args.model) as source:
                key = tuple(plan.target.type.name for plan in plan_quantization(source, Recipe(name, rules=rules), imatrix))
            if rules == "mainline" and key in seen:
                print(f"| {name} | {rules} | | | as {' '.join(seen[key])} | | |", flush=True)
                continue
            started = time.monotonic()
            report = iqforge.quantize_model(args.model, out, name, args.imatrix, rules=rules)
            seconds = time.monotonic() - started
            with open_gguf(out) as result:
                kinds = {tensor.name: tensor.type for tensor in result.tensors}
                n_bytes = sum(tensor.n_bytes for tensor in result.tensors)
                shapes = {tensor.name: tensor.shape for tensor in result.tensors}
            assert n_bytes == report.target_bytes
            verdict = "-"
            if args.reference and rules == "ik":
                plan = planned_by(args.reference, args.model, name, args.imatrix)
                with open_gguf(args.model) as source:
                    wanted = {t.name: ggml_type(plan[t.name]) if plan[t.name] else t.type for t in source.tensors}
                apart = [tensor for tensor, kind in wanted.items() if kinds[tensor] is not kind]
                size = sum(kind.tensor_bytes(shapes[tensor]) for tensor, kind in wanted.items())
                verdict = "yes" if not apart and size == n_bytes else f"NO: {apart}, {size} bytes"
            if key in seen:  # the same types of the same tensors: the same values, however they are called
                perplexity = f"as {' '.join(seen[key])}"
            else:
                result = iqforge.measure_perplexity(out, args.text, chunks=args.chunks)
                assert math.isfinite(result.perplexity), name
                perplexity, seen[key] = f"{result.perplexity:.3f}", (name, rules)
            print(f"| {name} | {rules} | {n_bytes} | {report.bits_per_weight:.3f} | {perplexity} | {verdict} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
