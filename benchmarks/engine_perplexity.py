"""Compare our perplexity of files rounded with second moments with that of another engine.

    iqforge hessian -m MODEL.gguf -f default -o H.safetensors
    python benchmarks/engine_perplexity.py MODEL.gguf --hessian H.safetensors \
        --engine llama-perplexity --text wiki.test.txt [--type T ...] [--chunks 60] [--json FILE]

`--engine` is the program of that name which ik_llama.cpp or llama.cpp builds. Every type is written
with `quantize --hessian --pure`, token embeddings and output at Q8_0. Prints Markdown: both
perplexities over the same chunks of 512 tokens, and how far ours is from the engine's. Where the
engine fails there is no figure, and its last lines go to stderr. --json keeps figures of both, and
what it has is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from iqforge.api import quantize_model
from iqforge.errors import IqforgeError
from iqforge.quantize.plan.recipe import Recipe
from iqforge.quantize.rounding.layouts.codes import SCALES
from iqforge.quantize.rounding.layouts.vectors import VECTORS
from iqforge.quantize.rounding.layouts.words import TABLES
from iqforge.quantize.rounding.ternary_rounder import TWINS
from iqforge.quantize.search.trellis.tree import CODEBOOKS
from rounding_quality.quantizing import PRESETS

N_CTX = 512
TYPES = [*SCALES, *VECTORS, *TABLES, "IQ4_KSS", *CODEBOOKS, *TWINS]
PERPLEXITY = re.compile(r"Final estimate: PPL.*? = ([0-9.]+)")


def perplexity(command: list[str], args: argparse.Namespace) -> float | None:
    """Run a perplexity tool: what it prints at the end, None if it fails, which is said."""
    command += ["-f", args.text, "-c", str(N_CTX), "--chunks", str(args.chunks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = PERPLEXITY.search(done.stdout + done.stderr)
    if found and done.returncode == 0:
        return float(found[1])
    last = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
    print(f"{' '.join(command)} ends with {done.returncode}:\n{last}", file=sys.stderr)
    return None


def measured(type: str, args: argparse.Namespace) -> dict[str, Any]:
    """Write a type, and run both engines on it."""
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        out = Path(folder) / f"{type}.gguf"
        recipe = Recipe(
            PRESETS.get(type, type),
            pure=True,
            token_embedding_type="Q8_0",
            output_tensor_type="Q8_0",
        )
        quantize_model(args.model, out, recipe, hessian=args.hessian, threads=args.threads)
        threads = ["-t", str(args.threads)]
        tool = [sys.executable, "-m", "iqforge", "perplexity", "--device", args.device]
        ours = perplexity([*tool, "-m", str(out), *threads], args)
        if ours is None:
            raise SystemExit(f"{type}: our perplexity fails")
        theirs = perplexity([args.engine, "-m", str(out), *threads], args)
    return {"model": Path(args.model).stem, "type": type, "ours": ours, "engine": theirs}


def row(found: dict[str, Any]) -> str:
    """Return a result as a row of Markdown: both perplexities, and how far ours is from the
    engine's in percent.
    """
    ours, theirs = found["ours"], found["engine"]
    off = "-" if theirs is None else f"{100 * (ours / theirs - 1):+.3f} %"
    return f"| {found['model']} | {found['type']} | {ours:.4f} | {theirs or '-'} | {off} |"


def main() -> None:
    """Parse the command line, make the files, and print a row per type."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="an unquantized GGUF file")
    parser.add_argument("--hessian", required=True, metavar="FILE")
    parser.add_argument("--engine", required=True, metavar="PROGRAM")
    parser.add_argument("--text", required=True)
    parser.add_argument("--type", nargs="+", default=TYPES)
    parser.add_argument("--chunks", type=int, default=60)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", help="that runs our side (default: cpu)")
    parser.add_argument("--work", metavar="DIR", help="folder of the files, which are removed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if shutil.which(args.engine) is None:
        parser.error(f"there is no program {args.engine}")
    kept = {}
    if args.json and args.json.exists():
        lines = map(json.loads, args.json.read_text().splitlines())
        kept = {(one["model"], one["type"]): one for one in lines}
    print("| model | type | iqforge | engine | difference |\n| --- | --- | --- | --- | --- |")
    for type in args.type:
        found = kept.get((Path(args.model).stem, type))
        if found is None:
            try:
                found = measured(type, args)
            except IqforgeError as error:
                raise SystemExit(f"{type}: {error}") from None
            if args.json and found["engine"] is not None:
                with args.json.open("a") as file:
                    file.write(json.dumps(found) + "\n")
        print(row(found), flush=True)


if __name__ == "__main__":
    main()
