"""Compare the speed of collecting an importance matrix with plain perplexity, and measure the
treatment of experts that saw few tokens.

    python benchmarks/imatrix.py speed MODEL.gguf TEXT [--chunks 24] [--rounds 5]
    python benchmarks/imatrix.py cold MODEL.gguf TEXT [--trials 20]

`speed` runs both in turn, several times. Seconds are CPU seconds of all threads, which depend less
on other programs; the ratio is the median over rounds.

`cold` collects from many short pieces of the text. It compares what is written for cold experts
with what the same experts saw in the whole rest of the text: cosines of the means, averaged over
experts, by how many tokens of the piece the expert saw.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from iqforge.imatrix.all_experts import router_rows
from iqforge.imatrix.cold_experts import fill_cold_experts
from iqforge.imatrix.collecting import collect
from iqforge.runtime.evaluate.chunks import read_text
from iqforge.runtime.evaluate.perplexity import measure_perplexity
from iqforge.runtime.model import load_model

PIECE, N_CTX = 192, 64  # tokens of a piece, in chunks of so many
GROUPS = ((0, 0), (1, 7), (8, 31), (32, 127))


def speed(args: argparse.Namespace) -> None:
    """Compare the speed of collecting with that of perplexity."""
    text = read_text(args.text)
    with load_model(args.model) as model:
        tokens = model.tokenizer.encode(text)[: 512 * args.chunks]
        measure_perplexity(model, tokens[:2048])  # decodes the weights
        runs = {
            "perplexity": lambda: measure_perplexity(model, tokens),
            "imatrix": lambda: collect(model, tokens),
            "imatrix --no-ppl": lambda: collect(model, tokens, compute_perplexity=False),
            "imatrix --cold-experts all-experts": lambda: collect(
                model, tokens, cold_experts="all-experts"
            ),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                wall, cpu = time.perf_counter(), time.process_time()
                run()
                seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    print(
        "| run | tokens/s (best round) | CPU seconds (least) | CPU seconds over perplexity's"
        " (median) |\n|---|---|---|---|"
    )
    for name, measured in seconds.items():
        ratio = statistics.median(
            cpu / base for (_, cpu), (_, base) in zip(measured, seconds["perplexity"])
        )
        wall, cpu = (min(values) for values in zip(*measured))
        print(f"| {name} | {len(tokens) / wall:.0f} | {cpu:.2f} | {ratio:.2f} |")


def cold(args: argparse.Namespace) -> None:
    """Compare what becomes of experts that a short text hardly uses."""
    text, rng = read_text(args.text), np.random.default_rng(0)
    with load_model(args.model) as model:
        tokens, routers = model.tokenizer.encode(text), router_rows(model)
        half = len(tokens) // 2
        truth = collect(model, tokens[half : half + 512 * args.chunks], compute_perplexity=False)
        found: dict[tuple, list[float]] = {}
        for _ in range(args.trials):
            start = int(rng.integers(0, half - PIECE))
            options = {"n_ctx": N_CTX, "compute_perplexity": False}
            seen = collect(model, tokens[start : start + PIECE], **options)
            results = {
                "none": seen,
                "all-experts": collect(
                    model, tokens[start : start + PIECE], cold_experts="all-experts", **options
                ),
            }
            for method in ("prior", "neighbours"):
                for worth in (8, 32, 128):
                    results[f"{method}, {worth} tokens"] = fill_cold_experts(
                        seen, method, prior_tokens=worth, routers=routers
                    )
            for name, entry in seen.entries.items():
                for expert in (
                    np.flatnonzero(truth.entries[name].counts >= 500)
                    if "_exps" in name and "up" not in name
                    else ()
                ):
                    n, wanted = int(entry.counts[expert]), truth.entries[name].means[expert]
                    group = next(
                        (f"{a} to {b}" if a else "none" for a, b in GROUPS if a <= n <= b), None
                    )
                    for method, imatrix in results.items() if group else ():
                        got = imatrix.entries[name].means[expert]
                        cosine = float(got @ wanted / np.sqrt((got @ got) * (wanted @ wanted)))
                        found.setdefault(
                            ("down" if "down" in name else "gate and up", group, method), []
                        ).append(cosine)
    groups = [f"{a} to {b}" if a else "none" for a, b in GROUPS]
    print(
        f"| tensor | method | {' | '.join(f'{group} tokens' for group in groups)}"
        f" |\n|---|---|{'---|' * len(groups)}"
    )
    for kind in ("gate and up", "down"):
        for method in results:
            cells = [
                (
                    f"{np.mean(values):.3f} ({len(values)})"
                    if (values := found.get((kind, group, method)))
                    else "-"
                )
                for group in groups
            ]
            print(f"| {kind} | {method} | {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "cold"))
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--chunks", type=int, default=24, help="chunks of 512 tokens (default: 24)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=20)
    parsed = parser.parse_args()
    {"speed": speed, "cold": cold}[parsed.what](parsed)
