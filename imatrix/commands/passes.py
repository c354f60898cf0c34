"""How many tokens go through a model at a time while statistics of its inputs are collected."""

from __future__ import annotations

import argparse

from ...runtime.options import LoadOptions
from ...runtime.text_options import ChunkOptions

FAST_TOKENS = 8192  # on the fast path, where launches of a pass cost as much as 2,000 tokens


def batch_tokens(args: argparse.Namespace, load: LoadOptions) -> int:
    """Return the tokens of a pass: `-b`, or what suits the device."""
    if args.batch_tokens is not None:
        return args.batch_tokens
    from ...runtime.start_ranks import device_here  # imports torch

    fast = load.precision != "f32" and device_here(load).type == "cuda"
    return FAST_TOKENS if fast else ChunkOptions().batch_tokens
