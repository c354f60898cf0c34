"""Speed on the CPU beside a reference: prompts of 512 tokens and 64 generated ones.

    python benchmarks/cpu_reference.py mini-llama-bf16.gguf --reference ./llama-bench
    python benchmarks/cpu_reference.py M.gguf --reference ./llama-bench --type IQ4_K Q4_K --json F
    python benchmarks/cpu_reference.py M.gguf --json F --table

--reference is a program with the flags and the JSON of llama-bench, such as those of llama.cpp and
ik_llama.cpp. For every type a file is written once to --work: the model with random rows of that
type in the place of its matrices, token embedding and output in Q8_0; BF16 is the model itself.
Both programs then read the same file with the same number of threads, one after the other, in
--rounds turns; the figures are those of the fastest repetition, as other programs disturb both.
--json appends every figure to a file as soon as it is measured and does not measure it again;
--table prints the figures of that file and measures nothing. Without --type, all types that have
random rows are measured. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.tensor_names import OUTPUT, TOKEN_EMBEDDING, TensorName
from iqforge.formats.types import TYPES, GGMLType, ggml_type
from iqforge.runtime.bench.random_blocks import random_rows, supported

PAUSE = 0.5  # seconds in which threads of the program before fall asleep
TESTS = ("pp", "tg")
HEADER = (
    "| model, type | prompt, ours | reference | ratio | generation, ours | reference | ratio |\n"
    "|---|---|---|---|---|---|---|"
)


def measurable_types() -> list[str]:
    """Return the types that a file of random weights can have."""
    return [name for name, type in TYPES.items() if supported(type)]


def type_of(tensor: TensorInfo, type: GGMLType) -> GGMLType:
    """Return the type that a tensor of the model has in the file for `type`."""
    name = TensorName.parse(tensor.name)
    if (
        len(tensor.shape) < 2
        or name.is_sensitive
        or name.suffix != "weight"
        or tensor.type.name == "F32"
    ):
        return tensor.type
    wanted = ggml_type("Q8_0") if tensor.name in (TOKEN_EMBEDDING, OUTPUT) else type
    fits = tensor.n_cols % wanted.block_size == 0 and tensor.n_rows % wanted.group_rows == 0
    return wanted if fits else ggml_type("Q8_0")


def write_random(model: str, type_name: str, path: Path) -> None:
    """Write the model with random rows of a type."""
    type, rng = ggml_type(type_name), np.random.default_rng(0)
    with open_gguf(model) as source:
        tensors = [tensor.with_type(type_of(tensor, type)) for tensor in source.tensors]
        with GGUFWriter(path, source.metadata, tensors) as writer:
            for old, new in zip(source.tensors, tensors, strict=True):
                if new.type == old.type:
                    writer.write(new, source.read_rows(old, 0, old.n_rows))
                else:
                    size = 1 / math.sqrt(new.n_cols)
                    writer.write(new, random_rows(new.type, new.n_rows, new.n_cols, size, rng))


def measure_ours(path: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the tokens per second of every repetition."""
    command = [sys.executable, "-m", "iqforge", "bench", "--device", "cpu", "-m", str(path)]
    if args.precision:
        command += ["--precision", args.precision]
    return _measured(command, args)


def measure_reference(path: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the same of the reference; nothing if it cannot read the file."""
    return _measured([args.reference, "-m", str(path), *args.flags], args)


def _measured(command: list[str], args: argparse.Namespace) -> dict[str, list[float]]:
    for flag, value in (("-t", args.threads), ("-p", args.n_prompt), ("-n", args.n_gen)):
        command += [flag, str(value)]
    command += ["-r", str(args.repetitions), "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        print(f"{command[0]}: {done.stderr.strip()[-300:]}", file=sys.stderr)
        return {}
    tests = json.loads(done.stdout[done.stdout.index("[") :])
    return {"pp" if test["n_prompt"] else "tg": test["samples_ts"] for test in tests}


def measure(path: Path, args: argparse.Namespace) -> dict[str, float]:
    """Return the highest speeds by engine and test, such as "ours pp"."""
    samples: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for engine, run in (("ours", measure_ours), ("reference", measure_reference)):
            if engine == "reference" and not args.reference:
                continue
            time.sleep(PAUSE)
            for test, found in run(path, args).items():
                samples.setdefault(f"{engine} {test}", []).extend(found)
    return {key: round(max(found), 2) for key, found in samples.items()}


def table(rows: list[dict]) -> Iterator[str]:
    """Yield the lines of the table, and the geometric means of each model."""
    yield HEADER
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        cells = []
        for test in TESTS:
            ours, other = row.get(f"ours {test}"), row.get(f"reference {test}")
            ratio = ours / other if ours and other else None
            if ratio:
                ratios.setdefault((row["model"], test), []).append(ratio)
            cells += [f"{x:,.0f}" if x else "-" for x in (ours, other)]
            cells.append(f"{ratio:.2f}" if ratio else "-")
        yield f"| {row['model']} {row['type']} | {' | '.join(cells)} |"
    for model in dict.fromkeys(model for model, _ in ratios):
        means = [statistics.geometric_mean(ratios.get((model, test), [1.0])) for test in TESTS]
        counts = len(ratios.get((model, "pp"), []))
        yield (f"| {model}, geometric mean of {counts} | | | {means[0]:.2f} | | | {means[1]:.2f} |")


def known(path: str | None) -> dict[tuple[str, str], dict]:
    """Return the rows of a file of figures."""
    if not path or not os.path.exists(path):
        return {}
    rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    return {(row["model"], row["type"]): row for row in rows}


def main() -> None:
    """Parse the command line and print tokens per second of both programs, a row per file
    and type.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="GGUF files in BF16")
    parser.add_argument("--reference", help="a program with the flags of llama-bench")
    parser.add_argument("--flags", nargs="*", default=[], help="further flags of the reference")
    parser.add_argument("--type", nargs="+", default=measurable_types())
    parser.add_argument("--precision", help="of ours")
    parser.add_argument("--work", type=Path, default=Path("cpu-reference"))
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=64)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no row after these")
    parser.add_argument("--json", help="file of figures")
    parser.add_argument("--table", action="store_true", help="print the figures of the file only")
    args = parser.parse_args()
    rows, stop = known(args.json), time.monotonic() + args.seconds
    args.work.mkdir(parents=True, exist_ok=True)
    for model in [] if args.table else args.models:
        name = Path(model).stem.lower().removesuffix("-bf16")
        for type in args.type:
            if (name, type) in rows or time.monotonic() > stop:
                continue
            path = Path(model) if type == "BF16" else args.work / f"{name}-{type}.gguf"
            if not path.exists():
                write_random(model, type, path)
            row = {"model": name, "type": type, "threads": args.threads, **measure(path, args)}
            rows[name, type] = row
            print(json.dumps(row), file=sys.stderr, flush=True)
            if args.json:
                with open(args.json, "a") as file:
                    file.write(json.dumps(row) + "\n")
    print("\n".join(table(list(rows.values()))))


if __name__ == "__main__":
    main()
