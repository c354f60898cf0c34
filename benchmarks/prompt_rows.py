"""Measure what is between the products of a layer with experts in a prompt: the router, the choice
of experts, the order of their rows, and the sum of their results with the norm after it.

    python benchmarks/prompt_rows.py
    python benchmarks/prompt_rows.py --shape qwen3-next-80b-a3b --tokens 512 2048

Each is in a graph of 20 launches; activations are bfloat16. The output is Markdown, microseconds of
a launch: the router with weights in float32 and in bfloat16, choice, order, sum without and with a
shared expert (the latter writes its rows in the order of columns, too).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from matvec import microseconds  # pyright: ignore[reportAttributeAccessIssue]  beside


class Layer(NamedTuple):
    """The width of a layer, its experts, and how many of them a token has."""

    width: int
    experts: int
    used: int


SHAPES = {
    "qwen3-30b-a3b": Layer(2048, 128, 8),
    "qwen3.5-35b-a3b": Layer(2048, 256, 8),
    "qwen3-next-80b-a3b": Layer(2048, 512, 10),
    "deepseek-v2-lite": Layer(2048, 64, 6),
    "gpt-oss-20b": Layer(2880, 32, 4),
    "glm-4.5-air": Layer(4096, 128, 8),
    "deepseek-v3": Layer(7168, 256, 8),
}
LAUNCHES = 20  # of a graph


def timed(launch: Callable[[], object]) -> str:
    """Return the microseconds of a launch, which has been compiled before."""
    launch()
    return f"{microseconds(lambda i: launch(), LAUNCHES):.1f}"


def cells(layer: Layer, tokens: int) -> list[str]:
    """Return the figures of one layer."""
    from iqforge.cuda_kernels.prompt import experts, grouped, rows, scores

    device, half = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    x, w = (torch.randn(n, layer.width, device=device) for n in (tokens, layer.experts))
    parts = scores.parts_of(tokens, layer.width, layer.experts, device)
    logits = torch.empty(parts, tokens, layer.experts, device=device)
    found = [
        timed(lambda weights=weights: scores.scores(x, weights, logits))
        if scores.fits(layer.experts, layer.width, device)
        else "-"
        for weights in (w, w.to(half))
    ]
    ids, slots = (
        torch.empty(tokens, layer.used, dtype=torch.int32, device=device) for _ in range(2)
    )
    weights = torch.empty(tokens, layer.used, device=device)
    ends = torch.empty(layer.experts, dtype=torch.int32, device=device)
    sources = torch.empty(ids.numel(), dtype=torch.int32, device=device)
    found.append(timed(lambda: experts.route(logits, ids, weights)))
    found.append(timed(lambda: experts.group_rows(ids, ends, sources, slots)))
    results = torch.randn(ids.numel(), layer.width, device=device).to(half)
    h, norm, exact = (
        torch.randn_like(x),
        torch.ones(layer.width, device=device),
        torch.empty_like(x),
    )
    out = torch.empty(tokens, grouped.padded(layer.width), device=device, dtype=half)
    extra, plain = (torch.randn_like(x).to(half) for _ in range(2))
    shared: dict[str, Any] = {
        "extra": extra,
        "shares": torch.randn(tokens, device=device),
        "plain": plain,
    }
    for more in ({}, shared):
        mixed: dict[str, Any] = {"delta": results, "rows": slots, "weights": weights, **more}
        found.append(
            timed(
                lambda mixed=mixed: rows.add_norm(
                    h, norm, 1e-6, out, exact=exact, permuted=True, **mixed
                )
            )
        )
    return found


def main() -> int:
    """Measure what was asked for, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device found")
    print("| us | tokens | router | router, bf16 | choice | order | sum | sum, shared expert |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in args.shape:
        for tokens in args.tokens:
            found = " | ".join(cells(SHAPES[name], tokens))
            print(f"| {name} | {tokens:,} | {found} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
