"""Measure attention of prompts alone: our kernel next to torch's FlashAttention-2.

    python benchmarks/prompt_attention.py
    python benchmarks/prompt_attention.py --shape gpt-oss-20b --queries 256 --depth 0 32768

The last `--queries` tokens attend to themselves and to `--depth` tokens before them, with float16
for queries, keys and values and bfloat16 for results, in a graph of 20 launches. The output is
Markdown: microseconds of torch's kernel and of ours, and operations per second of ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from matvec import microseconds  # pyright: ignore[reportAttributeAccessIssue]  beside


class Heads(NamedTuple):
    """Elements of a key and a value, heads of queries and of keys."""

    key: int
    value: int
    queries: int
    keys: int


SHAPES = {
    "llama-8b": Heads(128, 128, 32, 8),
    "qwen3-30b-a3b": Heads(128, 128, 32, 4),
    "deepseek-v2-lite": Heads(192, 128, 16, 16),
    "qwen3.5-35b-a3b": Heads(256, 256, 16, 2),
    "gpt-oss-20b": Heads(64, 64, 64, 8),
}
LAUNCHES = 20  # of a graph


def timed(launch: Callable[[], object]) -> float:
    """Return the microseconds of a launch, which has been compiled and planned before."""
    launch()
    return microseconds(lambda i: launch(), LAUNCHES)


def cell(heads: Heads, n: int, depth: int) -> str:
    """Return the figures for n queries after `depth` tokens."""
    from iqforge.cuda_kernels.prompt.flash import flash_attention

    total, device = depth + n, torch.device("cuda")

    def halves(rows: int, count: int, length: int) -> torch.Tensor:
        return torch.randn(1, rows, count, length, device=device).half()

    q = halves(n, heads.queries, heads.key)
    k, v = (halves(total, heads.keys, length) for length in (heads.key, heads.value))
    out = torch.empty(1, n, heads.queries, heads.value, device=device, dtype=torch.bfloat16)
    scale = heads.key**-0.5
    # Its values are as long as keys.
    filled = torch.nn.functional.pad(v, (0, heads.key - heads.value))
    theirs = timed(
        lambda: torch.ops.aten._flash_attention_forward(
            q, k, filled, None, None, n, total, 0.0, True, False, scale=scale
        )
    )
    ours = timed(lambda: flash_attention(q, k, v, out, scale=scale))
    pairs = n * depth + n * (n + 1) // 2
    rate = 2 * heads.queries * (heads.key + heads.value) * pairs / ours / 1e6
    return f"{theirs:,.1f}, {ours:,.1f} ({rate:.0f})"


def main() -> int:
    """Measure what was asked for, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--queries", type=int, nargs="+", default=[32, 256, 2048])
    parser.add_argument("--depth", type=int, nargs="+", default=[0, 8192, 32768])
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("no Hopper GPU found")
    columns = [(n, depth) for n in args.queries for depth in args.depth]
    print("| us: torch, ours (TFLOP/s) | " + " | ".join(f"{n} @ {d:,}" for n, d in columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for name in args.shape:
        cells = (cell(SHAPES[name], n, depth) for n, depth in columns)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
