"""Measure how long `iqforge quantize --device cuda` takes for a model of the shape of Llama 8B, and
what limits it.

    python benchmarks/gpu_quantize.py --dir /dev/shm --type IQ4_K IQ2_KS --device cuda:0 cuda

It writes a bf16 GGUF file of random values (16 GB; fewer with --layers) and an importance matrix
into --dir, then runs the command on it in separate processes: for each type first with an empty
cache of compiled code (cold, on the first of --device), then --repeat times on each of --device
(warm). It prints the times, their parts, and the digest of the outputs, which must agree for a
type. For comparison it prints how long reading the input and writing an output of 4.5 bits per
weight take alone. Without a GPU, `--device cpu --layers 1` shows that it works.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from iqforge.formats.codecs.codec import encode_float
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import string
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.imatrix.files.load import save_imatrix

HIDDEN, HEADS_KV, FFN, VOCABULARY = 4096, 1024, 14336, 128256
CHUNK = 16 << 20


def llama_8b(layers: int) -> list[TensorInfo]:
    """Return the tensors of Llama 8B with this many layers."""
    bf16, f32 = ggml_type("BF16"), ggml_type("F32")
    tensors = [
        TensorInfo("token_embd.weight", (VOCABULARY, HIDDEN), bf16),
        TensorInfo("output.weight", (VOCABULARY, HIDDEN), bf16),
        TensorInfo("output_norm.weight", (HIDDEN,), f32),
    ]
    for layer in range(layers):
        shapes = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (HEADS_KV, HIDDEN),
            "attn_v": (HEADS_KV, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }
        tensors += [
            TensorInfo(f"blk.{layer}.{name}.weight", shape, f32 if len(shape) == 1 else bf16)
            for name, shape in shapes.items()
        ]
    return tensors


def write_model(path: Path, tensors: list[TensorInfo]) -> None:
    """Write random values: pieces of one Gaussian tile, from another place each time, so that no
    two rows of a tensor are equal.
    """
    random = np.random.default_rng(1)
    tile = random.standard_normal(48 << 20, dtype=np.float32) * np.float32(0.02)
    tile[random.integers(0, tile.size, tile.size // 1000)] *= np.float32(5)
    tile = encode_float("BF16", tile[None])[0]
    with GGUFWriter(path, {"general.architecture": string("llama")}, tensors) as sink:
        for tensor in tensors:
            left = tensor.n_bytes
            while left:
                if tensor.type.name == "F32":
                    piece = np.ones(left // 4, dtype=np.float32)
                else:
                    start = int(random.integers(0, len(tile) // 4)) // 2 * 2
                    piece = tile[start : start + min(left, len(tile) // 2)]
                sink.write(tensor, piece)
                left -= piece.nbytes


def write_imatrix(path: Path, tensors: list[TensorInfo]) -> None:
    """Write a random importance matrix of these tensors."""
    random, entries = np.random.default_rng(2), {}
    for tensor in tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            entries[tensor.name] = Entry(
                random.gamma(0.5, 2, (1, tensor.n_cols)) * 1000, np.full(1, 1000)
            )
    save_imatrix(Imatrix(entries, chunk_count=1000, chunk_size=512, datasets=("random",)), path)


def seconds(work, *arguments) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


def read_file(path: Path, threads: int) -> None:
    """Read the whole file into small buffers, on several threads."""
    size, fd = path.stat().st_size, os.open(path, os.O_RDONLY)

    def read(part: int) -> None:
        buffer = bytearray(CHUNK)
        for offset in range(part * CHUNK, size, threads * CHUNK):
            os.preadv(fd, [buffer], offset)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    os.close(fd)


def write_file(path: Path, size: int) -> None:
    """Write a file of random bytes."""
    buffer = os.urandom(CHUNK)
    with open(path, "wb", buffering=0) as file:
        for _ in range(size // CHUNK):
            file.write(buffer)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run(command: list[str], environment: dict[str, str]) -> tuple[float, list[str]]:
    """Return the seconds of the whole process, and what it printed."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    spent = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-4000:]}")
    lines = [line for line in done.stderr.splitlines() if line.startswith("DEBUG")]
    return spent, lines + [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("quantize time", "quant size"))
    ]


def main() -> None:
    """Write the model, run the command on every device, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", default=None, help="where the files go (16 GB and the output's size are needed)"
    )
    parser.add_argument("--type", nargs="+", default=["IQ4_K", "IQ2_KS"])
    parser.add_argument("--device", nargs="+", default=["cuda"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=2, help="warm runs")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument(
        "--no-floor", action="store_true", help="do not time plain reading and writing"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        folder = Path(name)
        model, imatrix, tensors = folder / "model.gguf", folder / "model.dat", llama_8b(args.layers)
        print(f"writing the model: {seconds(write_model, model, tensors):.1f} s", flush=True)
        write_imatrix(imatrix, tensors)
        elements, size = sum(t.n_elements for t in tensors), model.stat().st_size
        print(f"{elements / 1e9:.2f} G elements, {size / 1e9:.2f} GB")
        if not args.no_floor:
            for threads in (1, 8):
                print(
                    f"floor: reading all with {threads} threads"
                    f" {seconds(read_file, model, threads):.2f} s",
                    flush=True,
                )
            plain = folder / "plain"
            part = size * 45 // 160
            print(
                f"floor: writing {part / 1e9:.2f} GB, new {seconds(write_file, plain, part):.2f} s,"
                f" again {seconds(write_file, plain, part):.2f} s",
                flush=True,
            )
            plain.unlink()
        for type in args.type:
            found = set()
            for number, device in enumerate(args.device):
                for turn in range(1 if number else 0, 1 + args.repeat):
                    out = folder / f"{type}.gguf"
                    command = [
                        sys.executable,
                        "-m",
                        "iqforge",
                        "quantize",
                        "--pure",
                        "--imatrix",
                        str(imatrix),
                        "--device",
                        device,
                        str(model),
                        str(out),
                        type,
                        *([str(args.threads)] if args.threads else []),
                    ]
                    spent, lines = run(
                        command,
                        {"NUMBA_CACHE_DIR": str(folder / f"cache-{type}"), "IQFORGE_DEBUG": "1"},
                    )
                    found.add(digest(out))
                    print(
                        f"{type} on {device}, {'warm' if turn else 'cold'}: {spent:.2f} s whole"
                        f" command, {elements / spent / 1e6:.0f} M elements/s",
                        *lines,
                        sep="\n    ",
                        flush=True,
                    )
            print(
                f"{type}: {'all outputs the same' if len(found) == 1 else 'outputs DIFFER'}:"
                f" {', '.join(sorted(found))}",
                flush=True,
            )


if __name__ == "__main__":
    main()
