"""When the launches of a prompt overlap (`prompt/overlap.cuh`)."""

from __future__ import annotations

FEW = 64  # tokens


def overlap(tokens: int) -> bool:
    """Return whether a launch for so many tokens may begin before the one in front of it has ended.
    With more tokens its blocks, which wait, take room from those of that one, which costs as much
    as the gap between launches or more ("Overlap" in docs/benchmarks/cuda-history/prompts.md).
    """
    return tokens <= FEW
