"""Time attention of decoding steps at several depths, all layers of a model in a CUDA graph.

    python benchmarks/attention.py --shape qwen3-30b-a3b --cache f16 --depth 8192 32768

A row for each shape, type of the cache, depth and way of dividing the work: microseconds of a
layer, bytes of the cache per second, and their share of the rate of a large copy (`copy_rate.py`).
The flags from --by-warp on take several values of the fields of `AttentionShape`; without them the
kernel's own.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace

import torch
from copy_rate import copy_rate
from iqforge.cuda_kernels.attention.shape import AttentionShape
from iqforge.cuda_kernels.attention.step import StepAttention
from iqforge.formats.types import ggml_type
from matvec import microseconds  # pyright: ignore[reportAttributeAccessIssue]  beside

# Layers, heads of keys, heads of queries for each, length of a head.
SHAPES = {
    "llama-8b": (32, 8, 4, 128),
    "llama-70b": (80, 8, 8, 128),
    "qwen3-30b-a3b": (48, 4, 8, 128),
    "gpt-oss-20b": (12, 8, 8, 64),
    "qwen3.5-35b-a3b": (10, 2, 8, 256),
    "gemma2-9b": (21, 8, 2, 256),
    "gemma3-27b": (10, 16, 2, 128),
    "qwen3-235b-a22b": (94, 4, 16, 128),
    "glm-4.5-air": (46, 8, 12, 128),
    "seed-oss-36b": (64, 8, 10, 128),
}
MEMORY = 12 << 30  # bytes of caches at most; layers share them where there are more


def measure(name: str, cache: str, depth: int, change: dict[str, int]) -> str:
    """Return a row of the table."""
    n_layers, kv_heads, group, length = SHAPES[name]
    kinds = [ggml_type(kind) for kind in (cache.split("/") * 2)[:2]]
    k, v = (kind.name for kind in kinds)
    shape = replace(
        AttentionShape(1, group, kv_heads, length, length, k, v, length, True), **change
    )
    device = torch.device("cuda")
    attention = StepAttention(shape, depth + 256, device)
    rows = [kind.row_bytes(length) for kind in kinds]
    nbytes = depth * kv_heads * sum(rows)
    n_caches = max(1, min(n_layers, MEMORY // nbytes))
    caches = [
        torch.zeros(depth + 256, kv_heads, row, dtype=torch.uint8, device=device)
        for row in rows * n_caches
    ]
    q, k, v = (
        torch.randn(1, n * length, device=device) for n in (kv_heads * group, kv_heads, kv_heads)
    )
    angles = torch.zeros(1, length // 2, 2, device=device)
    positions = torch.tensor([depth], dtype=torch.int32, device=device)
    out = torch.empty(1, kv_heads * group * length, device=device)

    def layer(i: int) -> None:
        key, value = caches[2 * (i % n_caches)], caches[2 * (i % n_caches) + 1]
        attention(q, k, v, None, None, 0.0, angles, key, value, positions, length**-0.5, out)

    us = microseconds(layer, n_layers)
    speed = nbytes / us / 1e-6
    ways = " ".join(f"{key} {value}" for key, value in change.items()) or "as it is"
    return (
        f"| {name} | {cache} | {depth} | {ways} | {us:.2f} | {speed / 1e12:.2f} |"
        f" {100 * speed / copy_rate():.0f} % |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=sorted(SHAPES), choices=sorted(SHAPES))
    parser.add_argument("--cache", nargs="+", default=["f16", "q8_0"], help="TYPE, or KEYS/VALUES")
    parser.add_argument("--depth", nargs="+", type=int, default=[512, 8192, 32768, 131072])
    changes = {
        "by-warp": "by_warp",
        "warps": "warps",
        "warp-tile": "warp_tile",
        "warp-stages": "warp_stages",
        "warp-blocks": "warp_blocks",
        "tile": "tile_size",
        "stages": "stages",
        "blocks": "blocks",
    }
    for name in changes:
        parser.add_argument(f"--{name}", nargs="+", type=int, default=[])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device found")
    values_of = {field: getattr(args, name.replace("-", "_")) for name, field in changes.items()}
    given = {field: values for field, values in values_of.items() if values}
    print(
        "| shape | cache | depth | work | us | TB/s | of the limit |\n|---|---|---|---|---|---|---|"
    )
    for name, cache, depth in itertools.product(args.shape, args.cache, args.depth):
        for values in itertools.product(*given.values()):
            try:
                print(
                    measure(name, cache, depth, dict(zip(given, values, strict=True))), flush=True
                )
            except Exception as error:  # a way that does not fit
                print(
                    f"| {name} | {cache} | {depth} | {values} | {type(error).__name__} {error} |",
                    flush=True,
                )
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
