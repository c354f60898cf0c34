"""Time `expert_down_add` of a decoding step by how the slots of a row are divided among warps.

    python benchmarks/expert_slots.py --shape qwen3-235b-a22b --type IQ4_K Q6_K

A row for each shape and type: megabytes of a launch, and microseconds with all slots in one part,
in two, and so on; what the plan of cuda_kernels/matvec/plan.py takes is marked with a star.
"""

from __future__ import annotations

import argparse
import functools

import torch
from iqforge.cuda_kernels.matvec import experts, specs
from iqforge.cuda_kernels.matvec import plan as mp
from iqforge.formats.types import ggml_type
from matvec import matrix, microseconds, zeros  # pyright: ignore[reportAttributeAccessIssue]  beside

# Rows and columns of `down`, experts, slots of a token with those of a shared expert.
SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
    "qwen3-235b-a22b, half of the columns": (4096, 768, 128, 8),
    "glm-4.5-air": (4096, 1408, 128, 9),
    "deepseek-v2-lite": (2048, 1408, 64, 8),
    "deepseek-v3": (7168, 2048, 64, 9),
    "gpt-oss": (2880, 2880, 32, 4),
    "qwen3.5-35b-a3b": (2048, 512, 256, 9),
    "qwen3-next-80b-a3b": (2048, 512, 512, 11),
    "mixtral-8x7b": (4096, 14336, 8, 2),
}
MEMORY, LAUNCHES, CHOICES = 4 << 30, 64, 16


def measure(name: str, type_name: str) -> str:
    """Return a row of the table."""
    rows, cols, n_experts, slots = SHAPES[name]
    type, here = ggml_type(type_name), mp.limits(0)
    nbytes = slots * rows * type.row_bytes(cols)
    n = max(1, min(8, MEMORY * slots // (n_experts * nbytes)))
    downs = [matrix(type_name, rows, cols, n_experts) for _ in range(n)]
    ids = [torch.randperm(n_experts, device="cuda")[:slots].int()[None] for _ in range(CHOICES)]
    weights = torch.full((1, slots), 1 / slots, device="cuda")
    x, h = zeros(1, slots, cols), zeros(1, rows)
    taken = here.plan(type, cols, slots, mp.EXPERT_DOWN, [rows])
    block_rows = -(-rows // here.processors)
    as_is, figures = mp.plan, []
    for parts in (k for k in range(1, slots + 1) if slots % k == 0):
        cut = mp.cut_in_parts(
            type, cols, slots, mp.EXPERT_DOWN, here.shared, here.beside, False, block_rows, parts
        )
        mp.plan = functools.partial(lambda cut, *_: cut, cut)
        try:
            us = microseconds(
                lambda i: experts.expert_down_add(x, downs[i % n], ids[i % CHOICES], weights, h),
                LAUNCHES,
            )
        finally:
            mp.plan = as_is
        figures.append(f"{parts}: {us:.2f}{'*' * (cut == taken)}")
    specs.product_spec.cache_clear()
    return f"| {name} | {type_name} | {nbytes / 1e6:.1f} | {', '.join(figures)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--type", nargs="+", default=["IQ4_K", "Q4_K", "Q6_K", "Q8_0", "IQ4_NL"])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device found")
    print("| shape | type | MB | us by parts of a row |\n|---|---|---|---|")
    for name in args.shape:
        for type in args.type:
            if SHAPES[name][1] % ggml_type(type).block_size == 0:
                print(measure(name, type), flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
