"""Quantize a file that is larger than its share of memory, and measure speed, peak resident memory
and how busy the cores are.

    python benchmarks/stream.py --gigabytes 16 --largest 2 --type Q4_K --dir /tmp \\
        --reference llama-quantize

It writes a bf16 GGUF file (random values, one tensor of --largest GB, the others an eighth of it),
runs `iqforge quantize` on it in a separate process and, if one is named, the reference's program
with as many threads; then --kills times the same run, killed at random moments and resumed, whose
file must be the same. It prints lines for docs/benchmarks/memory.md.

"own CPU" is user and system time of the process over (wall time x cores), from its start to the
last sync; "idle" is the share of all cores' time that was unused meanwhile, including waits for the
disk. On a machine with other work the first figure says little, the second everything.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from memory import write_model


@dataclass
class Measured:
    """Figures of one run: seconds, peak memory in bytes, and shares of CPU time."""

    seconds: float
    peak: int
    own: float
    idle: float
    load: float


def run(command: list[str], cores: int) -> Measured:
    """Run a command that must succeed."""
    idle, load, started = idle_seconds(), os.getloadavg()[0], time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return Measured(
        seconds,
        usage.ru_maxrss * 1024,
        (usage.ru_utime + usage.ru_stime) / seconds / cores,
        (idle_seconds() - idle) / seconds / cores,
        load,
    )


def idle_seconds() -> float:
    """Return the idle seconds of all cores together, since the machine started."""
    with open("/proc/stat", encoding="ascii") as file:
        fields = file.readline().split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def kill_and_resume(command: list[str], out: str, times: int, seconds: float) -> int:
    """Start the command and kill it after random times until it was killed `times` times. Return
    how many runs resumed an earlier one. The last one runs to its end.
    """
    chance, resumed = random.Random(1), 0
    for _ in range(times):
        resumed += os.path.exists(out + ".part") and os.path.getsize(out + ".journal") > 0
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(chance.uniform(0, 2 * seconds / times))
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return resumed


def digest(path: str) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Write the file, quantize it, also with kills, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=16)
    parser.add_argument(
        "--largest", type=float, default=2, help="bytes of the largest tensor, in GB"
    )
    parser.add_argument("--type", default="Q4_K")
    parser.add_argument("--dir", default=None, help="where the files go")
    parser.add_argument("--reference", metavar="PATH", help="llama-quantize, to compare with")
    parser.add_argument(
        "--kills", type=int, default=0, help="also: so many runs killed with SIGKILL, then resumed"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        model, out, other = (
            os.path.join(folder, name) for name in ("model.gguf", "out.gguf", "reference.gguf")
        )
        write_model(model, int(args.gigabytes * 1e9), int(args.largest * 1e9))
        size, words = os.path.getsize(model), [args.type, str(args.threads)]
        ours = [sys.executable, "-m", "iqforge", "quantize", "--pure", model, out, *words]
        print(
            f"{size / 1e9:.2f} GB bf16, largest tensor {args.largest:g} GB ({2 * args.largest:g} GB"
            f" as float32), to {args.type}, {args.threads} threads, {platform.machine()}\n"
        )
        print(
            "| | peak resident | time | MB/s | own CPU | idle | load before"
            " |\n|---|---|---|---|---|---|---|"
        )
        runs = {"iqforge": ours}
        if args.reference:
            runs["llama-quantize"] = [args.reference, "--pure", model, other, *words]
        for name, command in runs.items():
            found = run(command, args.threads)
            print(
                f"| {name} | {found.peak / 1e6:.0f} MB | {found.seconds:.1f} s |"
                f" {size / found.seconds / 1e6:.1f} | {found.own:.1%} | {found.idle:.1%} |"
                f" {found.load:.1f} |",
                flush=True,
            )
            if name == "iqforge":
                seconds = found.seconds
        if args.kills:
            expected = digest(out)
            os.unlink(out)
            resumed = kill_and_resume(ours, out, args.kills, seconds)
            same = digest(out) == expected
            print(
                f"\n{args.kills} runs killed, {resumed} of them after resuming: SHA-256"
                f" {'equal' if same else 'DIFFERENT'}"
            )


if __name__ == "__main__":
    main()
