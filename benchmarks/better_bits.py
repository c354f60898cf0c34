"""Measure what rounding with second moments gains over the search with an importance matrix, as a
Markdown table.

    python benchmarks/better_bits.py --python-texts DIR
    python benchmarks/better_bits.py MODEL.gguf --calibrate TEXT [--calibrate TEXT ...] \\
        --text TEXT [--text TEXT ...] --work DIR [--type T ...]

The first command writes texts that every Python has: its help topics, those whose name has a CRC-32
divisible by 5 (`topics-test.txt`) apart from the others (`topics.txt`), and source of its standard
library (`source.txt`). The second one collects second moments from the calibration texts, writes
every type with --pure, token embeddings and output at Q8_0, with the importance matrix of the same
texts (their diagonal) and with the second moments, and compares both with MODEL on each text.
Ratios below 1 are gains.
"""

from __future__ import annotations

import argparse
import math
import os
import time
import zlib
from pathlib import Path

import iqforge

TYPES = ["IQ2_K", "IQ2_KS", "Q2_K", "IQ3_K", "IQ3_KS", "Q3_K", "IQ4_K", "IQ4_KS", "IQ4_NL"]
TYPES += ["IQ4_XS", "Q4_K", "Q4_0", "Q4_1", "IQ5_K", "IQ5_KS", "Q5_K", "Q5_0", "Q5_1", "Q6_0"]
TYPES += ["Q6_K", "IQ6_K", "MXFP4", "NVFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]
SOURCES = ("argparse", "asyncio.base_events", "dataclasses", "decimal", "difflib", "inspect")
SOURCES += ("pathlib", "subprocess", "tarfile", "typing", "unittest.mock", "zipfile")


def main() -> None:
    """Write the texts, or measure every type and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--python-texts", metavar="DIR")
    parser.add_argument("--calibrate", action="append", default=[], metavar="TEXT")
    parser.add_argument("--text", action="append", default=[], metavar="TEXT")
    parser.add_argument("--work", metavar="DIR")
    parser.add_argument("--type", action="append", dest="types")
    parser.add_argument("--shrink", type=float, help="instead of choosing it for each role")
    parser.add_argument("--calibration-chunks", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=60)
    args = parser.parse_args()
    if args.python_texts:
        write_texts(Path(args.python_texts))
        return
    if not (args.model and args.calibrate and args.text and args.work):
        parser.error("MODEL, --calibrate, --text and --work are needed, or --python-texts")
    measure(args)


def write_texts(folder: Path) -> None:
    """Write `topics.txt`, `topics-test.txt` and `source.txt`."""
    import importlib
    import inspect
    from pydoc_data.topics import topics

    folder.mkdir(parents=True, exist_ok=True)
    held_out = {name for name in topics if zlib.crc32(name.encode()) % 5 == 0}
    for file, names in (("topics.txt", topics.keys() - held_out), ("topics-test.txt", held_out)):
        (folder / file).write_text("\n".join(topics[name] for name in sorted(names)))
    text = "\n".join(inspect.getsource(importlib.import_module(name)) for name in SOURCES)
    (folder / "source.txt").write_text(text)


def measure(args: argparse.Namespace) -> None:
    """Print a row for every type: KL divergences with importances and ratios, by text."""
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    hessian, out = work / "hessian.safetensors", work / "q.gguf"
    if not hessian.exists():
        iqforge.collect_hessian(args.model, args.calibrate, hessian, chunks=args.calibration_chunks)
    bases = []
    for number, text in enumerate(args.text):
        base = work / f"base-{number}.kld"
        iqforge.measure_perplexity(args.model, text, chunks=args.chunks, kl_divergence_base=base)
        bases.append(base)
    names = [os.path.basename(text) for text in args.text]
    print("| type | " + " | ".join(names) + " | geometric mean | worst | quantize s |")
    print("|---" * (len(names) + 4) + "|")
    everything = []
    for name in args.types or TYPES:
        before, _ = divergences(args.model, out, name, bases, imatrix=hessian)
        after, seconds = divergences(
            args.model, out, name, bases, hessian=hessian, hessian_shrink=args.shrink
        )
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        cells = [f"{a:.5f} x {ratio:.3f}" for a, ratio in zip(before, ratios, strict=True)]
        row = [name, *cells, f"{mean(ratios):.3f}", f"{max(ratios):.3f}", f"{seconds:.1f}"]
        print("| " + " | ".join(row) + " |", flush=True)
        everything += ratios
    print(f"\nall types and texts: x {mean(everything):.3f}, worst x {max(everything):.3f}")


def mean(ratios: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def divergences(
    model: str, out: Path, name: str, bases: list[Path], **guide: Path | float | None
) -> tuple[list[float], float]:
    """Return the mean KL divergence on each text, and the seconds that quantizing took."""
    given: dict = dict(guide)
    started = time.monotonic()
    iqforge.quantize_model(
        model,
        out,
        name,
        pure=True,
        token_embedding_type="q8_0",
        output_tensor_type="q8_0",
        device="cpu",
        restart=True,
        **given,
    )
    seconds = time.monotonic() - started
    found = [
        iqforge.measure_perplexity(out, None, kl_divergence_base=base, kl_divergence=True).mean_kld
        for base in bases
    ]
    return found, seconds


if __name__ == "__main__":
    main()
