"""Measure peak resident memory and speed of quantizing a synthetic bf16 GGUF file that is larger
than its share of memory.

    python benchmarks/memory.py --gigabytes 4 --largest 1 --type IQ4_K --dir /tmp

It writes the file (random values, tensors of at most --largest GB), runs `iqforge quantize` on it
in a separate process and prints the kernel's figures of that process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

import numpy as np
from iqforge.formats.codecs.codec import encode_float
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import string

N_COLS = 4096


def write_model(path: str, total_bytes: int, largest_bytes: int) -> None:
    """Write a GGUF file of about total_bytes: one tensor of largest_bytes, the rest in tensors of
    an eighth of that.
    """
    sizes = [largest_bytes]
    while sum(sizes) < total_bytes:
        sizes.append(min(largest_bytes // 8, total_bytes - sum(sizes)))
    bf16 = ggml_type("BF16")
    tensors = [
        TensorInfo(
            f"blk.{i}.ffn_down.weight", (max(16, size // 2 // N_COLS // 16 * 16), N_COLS), bf16
        )
        for i, size in enumerate(sizes)
    ]
    random = np.random.default_rng(1)
    tile = encode_float(
        bf16, random.standard_normal((1024, N_COLS), dtype=np.float32) * np.float32(0.02)
    )
    with GGUFWriter(path, {"general.architecture": string("llama")}, tensors) as sink:
        for tensor in tensors:
            for start in range(0, tensor.n_rows, len(tile)):
                sink.write(tensor, tile[: min(len(tile), tensor.n_rows - start)])


def peak_of(command: list[str]) -> tuple[int, float]:
    """Return (peak resident bytes, seconds) of a command that must succeed."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return usage.ru_maxrss * 1024, time.monotonic() - started


def main() -> None:
    """Write the file, quantize it, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument(
        "--largest", type=float, default=1, help="bytes of the largest tensor, in GB"
    )
    parser.add_argument("--type", default="IQ4_K")
    parser.add_argument("--dir", default=None, help="where the files go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        model, out = os.path.join(folder, "model.gguf"), os.path.join(folder, "out.gguf")
        write_model(model, int(args.gigabytes * 1e9), int(args.largest * 1e9))
        peak, seconds = peak_of(
            [sys.executable, "-m", "iqforge", "quantize", "--pure", model, out, args.type]
        )
        size = os.path.getsize(model)
        print(
            f"{size / 1e9:.2f} GB bf16, largest tensor {args.largest:g} GB, to {args.type}: peak"
            f" resident {peak / 1e6:.0f} MB, {seconds:.1f} s, {size / seconds / 1e6:.1f} MB/s"
        )


if __name__ == "__main__":
    main()
