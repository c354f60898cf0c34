"""Measure perplexity and KL divergence of a model quantized to several types, as a Markdown table.

    python benchmarks/quality.py MODEL.gguf --imatrix F --text wiki.test.txt \\
        [--reference reference.json] [--type T ...]

Every type is written with --pure, token embeddings and output at Q8_0, and compared with MODEL on
the text. With a reference file (`types: {name: {mean_kld, ppl}}`) its figures are printed next to
ours.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import iqforge

TYPES = [
    "Q8_0",
    "IQ6_K",
    "Q6_K",
    "IQ5_K",
    "Q5_K",
    "IQ5_KS",
    "IQ4_K",
    "Q4_K",
    "IQ4_NL",
    "IQ4_KS",
    "IQ4_XS",
    "Q4_0",
    "IQ4_KSS",
    "IQ4_KT",
    "IQ3_K",
    "Q3_K",
    "IQ3_S",
    "IQ3_KS",
    "IQ3_KT",
    "IQ3_XXS",
    "Q2_K",
    "IQ2_KL",
    "IQ2_K",
    "IQ2_XS",
    "IQ2_KS",
    "IQ2_KT",
    "IQ2_XXS",
    "IQ1_M",
    "IQ1_KT",
    "IQ1_S",
]


def main() -> None:
    """Measure every type and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--imatrix")
    parser.add_argument("--text", required=True)
    parser.add_argument("--chunks", type=int, default=60)
    parser.add_argument("--reference")
    parser.add_argument("--type", action="append", dest="types")
    args = parser.parse_args()
    reference = json.loads(Path(args.reference).read_text())["types"] if args.reference else {}
    with tempfile.TemporaryDirectory() as folder:
        base, out = os.path.join(folder, "base.kld"), os.path.join(folder, "q.gguf")
        full = iqforge.measure_perplexity(
            args.model, args.text, chunks=args.chunks, kl_divergence_base=base
        )
        print(
            f"base: PPL {full.perplexity:.4f} +/- {full.uncertainty:.4f},"
            f" {full.tokens_per_second:.0f} tokens/s\n"
        )
        print(
            "| type | bpw | PPL | mean KLD | 99 % KLD | same top % | reference PPL | reference KLD"
            " | KLD ratio | quantize s |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        for name in args.types or TYPES:
            started = time.monotonic()
            report = iqforge.quantize_model(
                args.model,
                out,
                name,
                args.imatrix,
                pure=True,
                token_embedding_type="q8_0",
                output_tensor_type="q8_0",
            )
            seconds = time.monotonic() - started
            result = iqforge.measure_perplexity(
                out, None, kl_divergence_base=base, kl_divergence=True
            )
            row = [
                name,
                f"{report.bits_per_weight:.2f}",
                f"{result.perplexity:.4f}",
                f"{result.mean_kld:.6f}",
                f"{result.statistics.kld_quantiles(0.99)[0]:.5f}",
                f"{100 * result.statistics.same_top[0]:.2f}",
            ]
            other = reference.get(name)
            row += (
                [
                    f"{other['ppl']:.4f}",
                    f"{other['mean_kld']:.6f}",
                    f"{result.mean_kld / other['mean_kld']:.3f}",
                ]
                if other
                else ["", "", ""]
            )
            print("| " + " | ".join([*row, f"{seconds:.1f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
