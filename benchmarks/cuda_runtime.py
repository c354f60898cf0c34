"""Measure the tables of docs/benchmarks/cuda.md: prompts of 2048 tokens (-ub 2048) and 128 tokens
of generation on random weights of real shapes.

    python benchmarks/cuda_runtime.py
    python benchmarks/cuda_runtime.py --architectures
    python benchmarks/cuda_runtime.py --shape llama-8b --type IQ4_K -r 5
    python benchmarks/cuda_runtime.py --apart
    python benchmarks/cuda_runtime.py --json cuda.jsonl
    python benchmarks/cuda_runtime.py --json cuda.jsonl --table

The first line measures all rows: about a minute on one H200 with compiled kernels. --architectures
measures other architectures instead, some of them also after 32,768 tokens. --apart runs
each row in its own process, so that a failure does not affect the others. --json appends every
figure to a file as soon as it is measured and does not measure it again; --table prints the newest
figures of that file and measures nothing.

The output is Markdown: the reference's figures, and our speed with its share of the device's limit.
Figures in the file are tied to the device and to the sources they were measured with (`code`), so
an interrupted run resumes, and figures of other kernels never enter the table.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

TESTS = ("pp", "tg")
DEEP = 32768  # tokens before those of the test "deep"


@dataclass(frozen=True)
class Row:
    """pp2048 / tg128 in tokens/s. `reference`: ik_llama.cpp of August 2026 and llama.cpp of October
    2026 on one H200, flash attention on. `limit`: generation at 4.3 TB/s, what a large copy reaches
    there. `layers`: of a shape that is larger than the device, only so many first layers.
    """

    shape: str
    type: str
    reference: tuple[str, str] = ("-", "-")
    limit: int = 0
    deep: bool = False  # measured after `DEEP` tokens, too
    layers: int = 0

    @property
    def tests(self) -> tuple[str, ...]:
        """Names of the tests of this row: those of every row, and `deep` where `deep` is set."""
        return (*TESTS, "deep") if self.deep else TESTS

    @property
    def name(self) -> str:
        """Return the shape and type as `iqforge bench --synthetic` takes them."""
        return f"{self.shape}:{self.type}" + f",layers={self.layers}" * bool(self.layers)

    @property
    def label(self) -> str:
        """Return what the table says."""
        first = f" (first {self.layers} layers)" if self.layers else ""
        return f"{self.shape}{first} {self.type}"


ROWS = [
    Row("llama-8b", "IQ4_K", ("8,517 / 201", "-"), 986),
    Row("llama-8b", "IQ4_KS", ("11,924 / 302", "-"), 1040),
    Row("llama-8b", "Q4_K", ("10,505 / 283", "10,035 / 293"), 986),
    Row("llama-8b", "IQ2_K", ("9,859 / 316", "-"), 1720),
    Row("llama-8b", "Q8_0", ("12,244 / 267", "11,460 / 254"), 540),
    Row("qwen3-30b-a3b", "IQ4_K", ("6,838 / 181", "-"), 2410),
    Row("qwen3-30b-a3b", "Q4_K", ("6,760 / 229", "12,164 / 296"), 2410),
    Row("llama-70b", "IQ4_K", ("994 / 29.4", "1,231 / 48.0 (Q4_K)"), 109),
]
ARCHITECTURES = [
    Row("deepseek-v2-lite", "IQ4_K", ("9,863 / 209", "16,356 / 320"), deep=True),
    Row("qwen3.5-35b-a3b", "IQ4_K", ("6,482 / 169", "9,216 / 248"), deep=True),
    Row("qwen3-8b", "IQ4_K", ("8,153 / 191", "9,918 / 253")),
    Row("gemma3-27b", "IQ4_K", ("2,499 / 59.9", "3,129 / 86.5"), deep=True),
    Row("gpt-oss-20b", "MXFP4", ("9,292 / 331", "11,574 / 304")),
    Row("glm-4.5-air", "IQ4_K", ("2,348 / 102", "4,525 / 147")),
    Row("qwen3.5-27b", "IQ4_K"),
    Row("qwen3-next-80b-a3b", "IQ4_K"),
    Row("qwen3-235b-a22b", "IQ4_K"),
    Row("deepseek-v3", "IQ4_K", layers=20),
    Row("glm-5", "IQ4_K", layers=22),
    Row("deepseek-v3.2", "IQ4_K", layers=20),
    Row("mistral-small-4", "IQ4_K"),
    Row("gpt-oss-120b", "MXFP4"),
    Row("gemma-2b", "IQ4_K"),
    Row("gemma-7b", "IQ4_K"),
    Row("gemma2-9b", "IQ4_K"),
    Row("gemma3n-e2b", "IQ4_K"),
    Row("gemma3n-e4b", "IQ4_K"),
    Row("gemma4", "IQ4_K"),
    Row("gemma4-31b", "IQ4_K"),
    Row("gemma4-e4b", "IQ4_K"),
    Row("phi3-mini", "IQ4_K"),
    Row("phi4", "IQ4_K"),
    Row("phi4-mini", "IQ4_K"),
    Row("starcoder2-15b", "IQ4_K"),
    Row("llama-1b", "IQ4_K"),
    Row("qwen2.5-7b", "IQ4_K"),
    Row("qwen1.5-moe-a2.7b", "IQ4_K"),
    Row("ministral3-14b", "IQ4_K"),
    Row("seed-oss-36b", "IQ4_K"),
    Row("smollm3-3b", "IQ4_K"),
    Row("nemotron-mini-4b", "IQ4_K"),
    Row("stablelm-2-1.6b", "IQ4_K"),
    Row("minicpm-2b", "IQ4_K"),
    Row("minicpm3-4b", "IQ4_K"),
    Row("mixtral-8x7b", "IQ4_K"),
    Row("phi-3.5-moe", "IQ4_K"),
    Row("kimi-k2", "IQ4_K", layers=12),
    Row("dots-llm1", "IQ4_K"),
    Row("llama-4-scout", "IQ4_K"),
    Row("llama-4-maverick", "IQ4_K", layers=20),
    Row("trinity-mini", "IQ4_K"),
    Row("trinity-large", "IQ4_K", layers=24),
    Row("mimo-v2-flash", "IQ4_K", layers=20),
    Row("step-3.5-flash", "IQ4_K", layers=20),
    Row("k-exaone", "IQ4_K", layers=20),
    Row("apertus-8b", "IQ4_K"),
    Row("qwen3-vl-8b", "IQ4_K"),
    Row("qwen3-vl-30b-a3b", "IQ4_K"),
    Row("internlm2-7b", "IQ4_K"),
    Row("deepseek-moe-16b", "IQ4_K"),
    Row("internlm2-20b", "IQ4_K"),
    Row("apertus-70b", "IQ4_K"),
    Row("minimax-m2", "IQ4_K", layers=40),
    Row("lfm2-1.2b", "IQ4_K"),
    Row("lfm2-8b-a1b", "IQ4_K"),
    Row("afm-4.5b", "IQ4_K"),
    Row("glm4-9b", "IQ4_K"),
    Row("glm4-32b", "IQ4_K"),
    Row("olmo2-7b", "IQ4_K"),
    Row("olmoe-1b-7b", "IQ4_K"),
    Row("olmo3-32b", "IQ4_K"),
    Row("ernie-4.5-0.3b", "IQ4_K"),
    Row("ernie-4.5-21b-a3b", "IQ4_K"),
    Row("exaone-4.0-1.2b", "IQ4_K"),
    Row("exaone-4.0-32b", "IQ4_K"),
    Row("hunyuan-0.5b", "IQ4_K"),
    Row("hunyuan-7b", "IQ4_K"),
    Row("hunyuan-a13b", "IQ4_K"),
    Row("hy3", "IQ4_K", layers=20),
    Row("command-r7b", "IQ4_K"),
    Row("command-r-35b", "IQ4_K"),
    Row("north-mini-code", "IQ4_K"),
    Row("command-a-plus", "IQ4_K", layers=16),
    Row("granite-3.3-8b", "IQ4_K"),
    Row("granite-3.1-3b-a800m", "IQ4_K"),
    Row("granite-4.0-h-7b", "IQ4_K"),
    Row("mellum2-12b-a2.5b", "IQ4_K"),
    Row("laguna-xs.2", "IQ4_K"),
    Row("laguna-s-2.1", "IQ4_K"),
    Row("granite-swash-2b", "IQ4_K"),
    Row("granite-swash-3b-a600m", "IQ4_K"),
    Row("nemotron-h-8b", "IQ4_K"),
    Row("nemotron-3-nano-30b-a3b", "IQ4_K"),
    Row("codestral-mamba-7b", "IQ4_K"),
    Row("mamba2-2.7b", "IQ4_K"),
    Row("mamba-2.8b", "IQ4_K"),
    Row("jamba-v0.1", "IQ4_K"),
    Row("falcon-mamba-7b", "IQ4_K"),
    Row("falcon-h1-7b", "IQ4_K"),
    Row("kimi-linear-48b-a3b", "IQ4_K"),
    Row("falcon-h1-34b", "IQ4_K"),
    Row("solar-open-100b", "IQ4_K"),
    Row("ling-3.0-8b", "IQ4_K"),
    Row("ling-3.0-flash", "IQ4_K"),
    Row("deepseek-v4-flash", "IQ4_K", layers=4),
    Row("glm-5.3-flash", "IQ4_K", layers=16),
    Row("hy4-preview", "IQ4_K", layers=6),
    Row("qwen3.8-flash-next", "IQ4_K", layers=16),
    Row("ling-mini-2.0", "IQ4_K"),
    Row("ling-1t", "IQ4_K", layers=16),
]
DEEP_HEADER = (
    "| shape, type | ik_llama.cpp | llama.cpp (Q4_K) | ours | share of FLOP rate / bandwidth |"
    f" tg after {DEEP:,} tokens |",
    "| --- | --- | --- | --- | --- | --- |",
)
HEADER = (
    "| shape, type | ik_llama.cpp | llama.cpp | limit tg | ours | share of FLOP rate / bandwidth |",
    "| --- | --- | --- | --- | --- | --- |",
)


class Figures:
    """The measurements: one dictionary per row and test, appended to a file of JSON lines at
    once.
    """

    def __init__(self, path: str | None, about: dict):
        self.path, self.about, self.known = path, about, {}
        self.cut_off = False  # the last line is incomplete
        if path and os.path.exists(path):
            with open(path) as file:
                for line in file:
                    found, self.cut_off = _parsed(line), not line.endswith("\n")
                    if found and all(found.get(key) == value for key, value in about.items()):
                        self.known[found["row"], found["test"]] = found

    def add(self, row: str, test: str, **figures) -> None:
        """Keep a figure, and append it to the file at once."""
        finished = time.strftime("%FT%TZ", time.gmtime())
        self.known[row, test] = found = {
            "row": row,
            "test": test,
            **self.about,
            **figures,
            "finished": finished,
        }
        if self.path:
            with open(self.path, "a") as file:
                file.write("\n" * self.cut_off + json.dumps(found) + "\n")
                self.cut_off = False
                file.flush()
                os.fsync(file.fileno())


def _parsed(line: str) -> dict | None:
    try:
        found = json.loads(line)
    except ValueError:  # a line that a killed run left unfinished
        return None
    return found if isinstance(found, dict) and "row" in found and "test" in found else None


def code() -> str:
    """Return a name for the sources that speed depends on."""
    import iqforge

    folder, digest = Path(iqforge.__file__).parent, hashlib.sha256()
    for part in ("cuda_kernels", "formats", "runtime"):
        for path in sorted((folder / part).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def measure(row: Row, args: argparse.Namespace, device: torch.device, figures: Figures) -> None:
    """Measure the figures of a row that are missing."""
    import iqforge.api
    from iqforge.runtime.bench.bench import Test, run_test
    from iqforge.runtime.commands.speed.flags import OPTIONS
    from iqforge.runtime.commands.speed.settings import open_model
    from iqforge.runtime.cuda.common.device_facts import device_facts

    tests = {
        "pp": Test(n_prompt=args.n_prompt),
        "tg": Test(n_gen=args.n_gen),
        "deep": Test(n_gen=args.n_gen, depth=DEEP),
    }
    missing = [name for name in row.tests if (row.name, name) not in figures.known]
    if not missing:
        return
    setting = {option.field: option.default for option in OPTIONS} | {
        "precision": args.precision,
        "n_ubatch": 2048,
    }
    facts, begin = device_facts(device) if device.type == "cuda" else None, time.time()
    with open_model(
        iqforge.api,
        row.name,
        True,
        device,
        setting,
        context=max(tests[name].n_ctx for name in missing),
        verbose=True,
    ) as model:
        say(f"{row.name} loaded in {time.time() - begin:.1f} s")
        for name in missing:
            begin = time.time()
            result = run_test(model, tests[name], repetitions=args.repetitions)
            reached, limit = (
                (result.flop_per_second, facts and facts.bf16_rate)
                if name == "pp"
                else (result.bytes_per_second, facts and facts.bandwidth)
            )
            figures.add(
                row.name,
                name,
                samples_ts=result.samples_ts,
                share=reached / limit if reached and limit else None,
            )
            speeds = ", ".join(f"{x:.1f}" for x in result.samples_ts)
            say(f"{row.name} {tests[name].label}: {speeds} t/s, {time.time() - begin:.1f} s in all")


def table_line(row: Row, figures: Figures) -> str:
    """Return a line of the table. A missing figure is a dash."""
    from iqforge.runtime.bench.bench import deviation, mean

    ours, shares = [], []
    for test in TESTS:
        found = figures.known.get((row.name, test))
        speed = mean(found["samples_ts"]) if found else 0.0
        digits = 0 if speed >= 1000 else 1
        ours.append(
            f"{speed:,.{digits}f} ± {deviation(found['samples_ts']):.{digits}f}" if found else "-"
        )
        shares.append(f"{100 * found['share']:.0f} %" if found and found["share"] else "-")
    pair = " / ".join
    if not row.limit:
        return (
            f"| {row.label} | {row.reference[0]} | {row.reference[1]} | {pair(ours)} |"
            f" {pair(shares)} | {_deep(row, figures)} |"
        )
    return (
        f"| {row.label} | {row.reference[0]} | {row.reference[1]} | {row.limit:,} |"
        f" {pair(ours)} | {pair(shares)} |"
    )


def _deep(row: Row, figures: Figures) -> str:
    """Return the speed after `DEEP` tokens, and its share of that from an empty context."""
    from iqforge.runtime.bench.bench import mean

    empty, deep = (figures.known.get((row.name, test)) for test in ("tg", "deep"))
    if deep is None:
        return "-"
    speed = mean(deep["samples_ts"])
    share = "" if empty is None else f" ({100 * speed / mean(empty['samples_ts']):.0f} %)"
    return f"{speed:,.1f}{share}"


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Measure the rows that were asked for, and print the table."""
    from iqforge.runtime.weights.devices import usable_device

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--architectures", action="store_true", help="the table of other architectures"
    )
    parser.add_argument("--shape", action="append", help="rows of this shape")
    parser.add_argument("--type", action="append", help="rows of this type")
    parser.add_argument(
        "--json", metavar="FILE", help="where figures are kept, one line of JSON each"
    )
    parser.add_argument(
        "--table", action="store_true", help="measure nothing, print what is in --json"
    )
    parser.add_argument("--apart", action="store_true", help="a process per row")
    parser.add_argument("--no-header", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("-p", "--n-prompt", type=int, default=2048)
    parser.add_argument("-n", "--n-gen", type=int, default=128)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    args = parser.parse_args()
    rows = [
        row
        for row in (ARCHITECTURES if args.architectures else ROWS)
        if (not args.shape or row.shape in args.shape) and (not args.type or row.type in args.type)
    ]
    about, device = (
        {
            "precision": args.precision,
            "n_prompt": args.n_prompt,
            "n_gen": args.n_gen,
        },
        torch.device("cpu"),
    )
    if not args.table:
        if args.device.startswith("cuda") and not torch.cuda.is_available():
            raise SystemExit("no CUDA device found")
        device = usable_device(args.device)
        about |= {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "code": code(),
        }
    if not args.no_header:
        print("\n".join(DEEP_HEADER if args.architectures else HEADER), flush=True)
    failed = 0
    for row in rows:
        if args.apart and not args.table:
            # Repeated flags add up, so the flags of the row replace those given.
            words = [word for word in sys.argv[1:] if word != "--apart"]
            words = _without(_without(words, "--shape"), "--type") + [
                "--shape",
                row.shape,
                "--type",
                row.type,
                "--no-header",
            ]
            failed += subprocess.run([sys.executable, __file__, *words]).returncode != 0
            continue
        figures = Figures(args.json, about)
        try:
            if not args.table:
                measure(row, args, device, figures)
        except Exception:  # the other rows are still measured
            failed += 1
            traceback.print_exc()
        print(table_line(row, figures), flush=True)
        if args.table:
            for (name, test), found in figures.known.items():
                if name == row.name:
                    say(
                        f"{name} {test}: {found['device']}, sources {found['code']},"
                        f" {found['finished']}"
                    )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 1 if failed else 0


def _without(words: list[str], flag: str) -> list[str]:
    return [
        word for i, word in enumerate(words) if word != flag and (i == 0 or words[i - 1] != flag)
    ]


if __name__ == "__main__":
    sys.exit(main())
