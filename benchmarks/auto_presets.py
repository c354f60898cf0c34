"""Compare what `iqforge auto` makes with presets that use the same importance matrix, as a Markdown
table. The target is the size of a preset without an importance matrix.

    python benchmarks/auto_presets.py CHECKPOINT... --calibrate wiki.valid.txt \\
        --text wiki.test.txt --work FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import iqforge
from iqforge.cli import main as iqforge_main

PRESETS = ("IQ4_K", "Q4_K_M", "Q4_K_S", "IQ4_KS", "IQ4_XS", "IQ4_KSS", "IQ3_KL")


def rows(checkpoint: Path, args: argparse.Namespace) -> list[str]:
    """Return the lines of one model: what auto makes, then the presets."""
    name = checkpoint.name
    work = Path(args.work) / name
    work.mkdir(parents=True, exist_ok=True)
    made, base = work / "preset.gguf", work / "auto" / "work" / f"{name}.gguf"
    iqforge.quantize_model(checkpoint, made, args.size_of, restart=True)
    size = os.path.getsize(made)
    status = iqforge_main(
        [
            *("auto", str(checkpoint), "--target-size", str(size), "-o", str(work / "auto")),
            *("-f", args.calibrate, "--test", args.text, "--chunks", str(args.chunks)),
            *("--test-chunks", str(args.test_chunks), "--device", args.device),
        ]
    )
    if status:
        raise SystemExit(status)
    [figures] = json.loads((work / "auto" / "figures.json").read_text())["models"]
    kld = figures["texts"][0]["kld"]
    bytes_of_auto = figures["file_bytes"]
    lines = [
        f"| {name} | `auto` | {bytes_of_auto:,} | {100 * bytes_of_auto / size:.2f} % |"
        f" {kld[0]:.5f} ± {kld[1]:.5f} |"
    ]
    predictions = work / "base.kld"
    load = {"device": args.device}
    iqforge.measure_perplexity(
        base, args.text, chunks=args.test_chunks, kl_divergence_base=predictions, **load
    )
    for preset in args.presets:
        iqforge.quantize_model(
            base, made, preset, work / "auto" / f"{name}.imatrix.gguf", restart=True
        )
        mean, error = iqforge.measure_perplexity(
            made, None, kl_divergence_base=predictions, kl_divergence=True, **load
        ).statistics.mean_kld
        n_bytes = os.path.getsize(made)
        share = f"{100 * n_bytes / size:.2f} %"
        lines.append(f"| | {preset} | {n_bytes:,} | {share} | {mean:.5f} ± {error:.5f} |")
    return lines


def main() -> None:
    """Parse the command line, make and judge the files of every checkpoint, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--calibrate", required=True, metavar="TEXT")
    parser.add_argument("--text", required=True, metavar="TEXT", help="text to measure on")
    parser.add_argument("--work", required=True, metavar="FOLDER")
    parser.add_argument("--size-of", default="IQ4_K", metavar="PRESET")
    parser.add_argument("--presets", nargs="+", default=PRESETS, metavar="PRESET")
    parser.add_argument("--chunks", type=int, default=60)
    parser.add_argument("--test-chunks", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    table = ["| model | made by | bytes | of the target | mean KLD |", "|---|---|---|---|---|"]
    for checkpoint in args.checkpoints:
        table += (found := rows(checkpoint, args))
        print("\n".join(found), flush=True)
    print("\n" + "\n".join(table))


if __name__ == "__main__":
    main()
