"""Flags of drawing tokens, in a group of the help. Imports nothing heavy."""

from __future__ import annotations

import argparse

from ..sampling.options import SamplerOptions

ANSWER_FIELDS = (
    "n",
    "context",
    "stop",
    "grammar",
    "grammar_file",
    "json_schema",
    "json_schema_file",
    "ignore_eos",
    "special",
)


def add_sampler_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the samplers."""
    group = parser.add_argument_group(
        "samplers",
        "They run in the order of --samplers. Those with their neutral values do nothing. On a GPU"
        " top-k, top-p, min-p and temperature, in this order, are drawn by a kernel; with any other"
        " sampler, tokens are drawn on the CPU.",
    )
    SamplerOptions.add_flags(group)


CACHE_FIELDS = ("prompt_cache", "prompt_cache_all", "prompt_cache_ro")
