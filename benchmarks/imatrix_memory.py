"""Measure peak memory and time of the commands on importance matrix files of the size of DeepSeek
V3's.

    python benchmarks/imatrix_memory.py

It makes two files of 1 GB (58 layers of 256 experts, 7168 and 2048 columns) in a temporary folder,
which takes 5 GB.
"""

from __future__ import annotations

import argparse
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

LAYERS, EXPERTS, N_EMBD, N_FF = 58, 256, 7168, 2048


def main() -> None:
    """Run each command on two large files, and print its peak memory and time."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        a, b, gguf, out, both = (
            str(Path(folder, name)) for name in ("a.dat", "b.dat", "x.gguf", "out.dat", "y.gguf")
        )
        for seed, path in enumerate((a, b)):
            write(path, np.random.default_rng(seed))
        print(f"two files of {os.path.getsize(a) / 2**20:.0f} MiB")
        for words in (
            ["imatrix-convert", a, gguf],
            ["imatrix-convert", gguf, out],
            ["imatrix", "--in-file", a, "--in-file", b, "-o", out],
            [
                "imatrix",
                "--in-file",
                gguf,
                "--in-file",
                b,
                "--in-weight",
                "1",
                "--in-weight",
                "0.5",
                "-o",
                both,
            ],
            ["imatrix-compare", a, b, "--limit", "1"],
            ["imatrix", "--show-statistics", "--in-file", gguf],
        ):
            started = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, "-m", "iqforge", *words], stdout=subprocess.DEVNULL
            )
            _, status, usage = os.wait4(process.pid, 0)
            shown = " ".join(os.path.basename(word) for word in words)
            seconds, code = time.monotonic() - started, os.waitstatus_to_exitcode(status)
            print(f"{shown}: {usage.ru_maxrss / 1024:.0f} MiB, {seconds:.1f} s, exit {code}")


def write(path: str, random: np.random.Generator) -> None:
    """Write a random importance matrix of the model in the .dat layout."""
    with open(path, "wb") as file:
        file.write(struct.pack("<i", 4 * LAYERS))
        for layer in range(LAYERS):
            for name, n in (
                ("gate_inp", N_EMBD),
                *((f"{part}_exps", EXPERTS * N_EMBD) for part in ("up", "gate")),
                ("down_exps", EXPERTS * N_FF),
            ):
                encoded = f"blk.{layer}.ffn_{name}.weight".encode()
                file.write(struct.pack("<i", len(encoded)) + encoded + struct.pack("<ii", 100, n))
                file.write(random.random(n, dtype=np.float32).tobytes())
        file.write(struct.pack("<ii", 100, 0))


if __name__ == "__main__":
    main()
