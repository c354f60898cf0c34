"""Run GPU tests under compute-sanitizer, several processes side by side, on all GPUs of the host.

    python tests/sanitize.py memcheck tests/test_index.py "tests/test_latent_cuda.py -k chosen"
    python tests/sanitize.py racecheck --jobs 8 --seconds 300 tests/test_step_kernels_cuda.py

Kernels of torch and its libraries are left out: they take most of the time. Where racecheck ends
with an internal error, because such a kernel and one of ours take turns, --all checks them, too.
Prints what each process found. The exit status is 1 if there was an error or a hazard, if a test
failed or was skipped, or if one was not reached within the time.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

PYTEST = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu"]
# All kernels of the project are extern "C", so their names are not mangled.
OTHERS = "regex=^(_Z|sm[0-9]|ampere|volta|turing|cutlass|cublas|nvjet|gemm|magma|void)"
WITHOUT_OTHERS = ["--kernel-name-exclude", OTHERS]
OPTIONS = {"memcheck": ["--report-api-errors", "no"]}


def main() -> int:
    """Run what the command asks for, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tool", choices=["memcheck", "racecheck", "synccheck", "initcheck"])
    parser.add_argument("tests", nargs="+", help="arguments of pytest, as one word for each")
    parser.add_argument("--jobs", type=int, default=8, help="processes side by side")
    parser.add_argument("--seconds", type=int, default=600, help="after which they are ended")
    parser.add_argument("--all", action="store_true", help="check the kernels of torch, too")
    args = parser.parse_args()
    found: list[str] = []
    for words in args.tests:
        names = collected(shlex.split(words))
        if not names:
            parser.error(f"no GPU test is chosen by {words!r}")
        found += names
    folder = Path(tempfile.mkdtemp(prefix="sanitizer-"))
    shares = [found[first :: args.jobs] for first in range(min(args.jobs, len(found)))]
    print(f"{len(found)} tests in {len(shares)} processes; logs: {folder}", flush=True)
    n_gpus = max(1, torch.cuda.device_count())
    options = [*OPTIONS.get(args.tool, []), *([] if args.all else WITHOUT_OTHERS)]
    command = ["compute-sanitizer", "--tool", args.tool, *options]
    running = [
        start(command, share, folder / f"{i}.log", i % n_gpus) for i, share in enumerate(shares)
    ]
    end = time.monotonic() + args.seconds
    for process in running:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the program that it runs
    good = [report(i, share, folder / f"{i}.log") for i, share in enumerate(shares)]
    return 0 if all(good) else 1


def collected(words: list[str]) -> list[str]:
    """Return the names of the tests that the arguments choose."""
    done = subprocess.run([*PYTEST, "--collect-only", "-q", *words], capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def start(command: list[str], names: list[str], log: Path, gpu: int) -> subprocess.Popen:
    listed = log.with_suffix(".tests")  # names of tests can be longer than a command may be
    listed.write_text("\n".join(names) + "\n")
    command = [*command, *PYTEST, "-v", "-rf", f"@{listed}"]
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    here = os.environ | {"CUDA_VISIBLE_DEVICES": seen.split(",")[gpu] if seen else str(gpu)}
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=here, start_new_session=True)


def report(number: int, names: list[str], log: Path) -> bool:
    """Print what a process found, and return whether all is well."""
    text = log.read_text(errors="replace")
    passed = len(re.findall(r" PASSED", text))
    summary = re.findall(r"SUMMARY: (.*)", text) or ["it has not ended"]
    first = re.findall(r"^========= (?:Error|Warning|Invalid|Internal|Potential).*", text, re.M)[:1]
    print(f"{number}: {passed} of {len(names)} passed; {'; '.join([*summary, *first])}", flush=True)
    clean = all(re.match(r"(0 errors|0 hazards)", line) for line in summary)
    return passed == len(names) and clean


if __name__ == "__main__":
    sys.exit(main())
