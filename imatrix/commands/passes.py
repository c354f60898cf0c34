"""How many tokens a chunk has, and how many go through a model at a time, while statistics of its
inputs are collected.
"""

from __future__ import annotations

import argparse

from ...formats.flags import check_value
from ...runtime.options import LoadOptions
from ...runtime.text_options import ChunkOptions

FAST_TOKENS = 8192  # on the fast path, where launches of a pass cost as much as 2,000 tokens


def chunk_tokens(args: argparse.Namespace) -> int:
    """Return the tokens of a chunk: `-c`, or the usual number. UsageError for too few."""
    if args.n_ctx is not None:
        check_value("-c", ChunkOptions.flag_of("n_ctx"), args.n_ctx, None)
        return args.n_ctx
    return ChunkOptions().n_ctx


def batch_tokens(args: argparse.Namespace, load: LoadOptions) -> int:
    """Return the tokens of a pass: `-b`, or what suits the device. UsageError for fewer than 1."""
    if args.batch_tokens is not None:
        check_value("-b", ChunkOptions.flag_of("batch_tokens"), args.batch_tokens, None)
        return args.batch_tokens
    from ...runtime.start_ranks import device_here  # imports torch

    fast = load.precision != "f32" and device_here(load).type == "cuda"
    return FAST_TOKENS if fast else ChunkOptions().batch_tokens
