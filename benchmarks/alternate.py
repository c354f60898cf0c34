"""Compare the speed of several versions of the package on one device, in turn.

    git worktree add /tmp/old/iqforge 7954903
    python benchmarks/alternate.py old=/tmp/old new=.. llama-8b:IQ4_K qwen3-30b-a3b:IQ4_K

Each NAME=FOLDER is a version: FOLDER contains the package `iqforge`. All versions hold the model
at the same time, one process each, and measure in turn a prompt (-p) and generated tokens (-n), so
that clocks and temperature are the same for all. Models are random weights of real shapes, or
files.

The output is Markdown: medians in tokens/s, and the difference to the first version. --json
appends every sample to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import IO, Any

Samples = dict[str, list[float]]  # tokens/s of each test


def main() -> int:
    """Parse the command line, time the versions in turn and print medians. Return the exit
    status.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="+", metavar="NAME=FOLDER or MODEL")
    parser.add_argument("-p", "--n-prompt", type=int, default=2048, help="0: no prompts")
    parser.add_argument("-n", "--n-gen", type=int, default=128, help="0: no generation")
    parser.add_argument("-d", "--n-depth", default="0", help="tokens before: a list, with commas")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="turns of every version")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="a file to which samples are added")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    if args.serve:
        depths = [int(depth) for depth in args.n_depth.split(",")]
        serve(args.words[0], args.device, args.n_prompt, args.n_gen, depths)
        return 0
    versions, models = versions_and_models(args.words)
    if not versions or not models:
        parser.error("at least one NAME=FOLDER and one model are needed")
    for name, folder in versions.items():
        if not (Path(folder) / "iqforge" / "__init__.py").is_file():
            parser.error(f"{name}={folder}: {folder} does not contain the package iqforge")
    print(f"| model, test | {' | '.join(versions)} |\n| --- |{' --- |' * len(versions)}")
    failed = 0
    for model in models:
        try:
            found = in_turn(model, versions, args)
        except ChildProcessError as error:
            failed += 1
            print(f"{model}: {error}", file=sys.stderr)
            continue
        print("\n".join(table(model, found)), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps({"model": model, "samples": found}) + "\n")
    return 1 if failed else 0


def versions_and_models(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return folders by name, and models. A model may have options, such as `:IQ4_K,layers=8`."""
    versions, models = {}, []
    for word in words:
        name, is_named, folder = word.partition("=")
        if is_named and ":" not in name:
            versions[name] = folder
        else:
            models.append(word)
    return versions, models


def in_turn(model: str, versions: dict[str, str], args: argparse.Namespace) -> dict[str, Samples]:
    """Return the samples of every version. ChildProcessError if a version cannot measure it."""
    started = {name: start(folder, model, args) for name, folder in versions.items()}
    found: dict[str, Samples] = {name: {} for name in versions}
    try:
        for process in started.values():
            answer(process)  # it has loaded the model
        for _ in range(args.rounds):
            for name, process in started.items():
                for test, speed in answer(process, "measure").items():
                    found[name].setdefault(test, []).append(speed)
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    return found


def start(folder: str, model: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start a process that measures with the package in a folder whenever it is told to."""
    paths = [folder, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    lengths = ["-p", str(args.n_prompt), "-n", str(args.n_gen), "-d", args.n_depth]
    lengths += ["--device", args.device]
    return subprocess.Popen(
        # -P: not the folder of this script, but that of the version comes first.
        [sys.executable, "-P", __file__, "--serve", model, *lengths],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str], word: str = "") -> dict[str, float]:
    """Return what the process says next, after telling it a word."""
    to, back = process.stdin, process.stdout
    if to is None or back is None:
        raise ChildProcessError("the process has no pipes")
    if word:
        print(word, file=to, flush=True)
    line = back.readline()
    if not line:
        raise ChildProcessError(f"a version ended with status {process.wait()}")
    return json.loads(line)


def serve(model: str, device: str, prompt: int, steps: int, depths: list[int]) -> None:
    """Load the model, say so, and measure once for each line on stdin."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    import iqforge

    make: Any = iqforge.load_model if Path(model).exists() else iqforge.random_model
    with make(model, device=device, ubatch=max(prompt, 512)) as loaded:
        _say(out, {})
        for _ in sys.stdin:
            results = iqforge.benchmark_model(
                loaded,
                prompts=[prompt] if prompt else [],
                generations=[steps] if steps else [],
                depths=depths,
                repetitions=1,
            )
            _say(out, {result.test.label: result.avg_ts for result in results})


def _say(out: IO[str], what: dict[str, float]) -> None:
    print(json.dumps(what), file=out, flush=True)


def table(model: str, found: dict[str, Samples]) -> Sequence[str]:
    """Return a line for each test."""
    lines = []
    for test in next(iter(found.values())):
        middle = [median(samples[test]) for samples in found.values()]
        digits = 0 if middle[0] >= 1000 else 1
        cells = [f"{middle[0]:,.{digits}f}"]
        cells += [f"{x:,.{digits}f} ({100 * (x / middle[0] - 1):+.1f} %)" for x in middle[1:]]
        lines.append(f"| {model} {test} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
