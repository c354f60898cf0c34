"""`iqforge hessian`: collect second moments, or show the figures of a file of them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import UsageError, printable
from ...runtime.commands.flags import (
    RunningOutput,
    add_chunk_flags,
    add_load_flags,
    add_model_flag,
    chunks_per_pass,
    on_one_device,
    open_model,
)
from ...runtime.commands.watch import watched
from ...runtime.options import LoadOptions
from ..moments.options import HessianOptions
from .passes import batch_tokens

if TYPE_CHECKING:
    from ..moments.data import MomentInput


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge hessian` to its parser."""
    parser.description = (
        "Run calibration texts through a model and save the second moments of the inputs of"
        " every weight matrix, for `iqforge quantize --hessian`. The last fifth of each text is"
        " kept apart to judge the rounding by. Use several kinds of text."
    )
    add_model_flag(parser, required=False)
    add_chunk_flags(parser, several_texts=True, default_text=True, batch_tokens=None)
    parser.add_argument(
        "-o",
        "--output",
        "--output-file",
        default="hessian.safetensors",
        metavar="OUT",
        help="file to write (default: hessian.safetensors)",
    )
    HessianOptions.add_flags(parser, without=("n_ctx", "chunks", "batch_tokens"))
    parser.add_argument(
        "--show", metavar="F", help="print figures of every input of a file, and do nothing else"
    )
    add_load_flags(parser)


def run(args: argparse.Namespace, api) -> int:
    """Collect second moments and write them, or print the figures of a file with --show. Return 0.
    Raise UsageError if a model or a text is missing.
    """
    if args.show is not None:
        from ..moments.figures import figure_lines

        for line in figure_lines(api.load_hessian(args.show)):
            print(line, flush=True)
        return 0
    if not args.model or not args.file:
        raise UsageError("-m MODEL and -f TEXT are needed, or --show F")
    from ...runtime.evaluate.chunks import read_text
    from ..default_texts import DEFAULT

    for path in args.file:
        if path != DEFAULT:
            read_text(path)  # an error before the model is loaded
    if len(args.file) == 1 and args.file != [DEFAULT]:
        print(
            "note: with one text, quantize shrinks correlations by 0.75, as they say little of"
            " other kinds of text; add -f default, or set --hessian-shrink there",
            file=sys.stderr,
        )
    on_one_device(args)
    load = LoadOptions.from_flags(args)
    options = HessianOptions.from_flags(args, batch_tokens=batch_tokens(args, load))
    rows = options.tokens_per_pass(load.ubatch)
    options = replace(options, batch_tokens=rows)
    started = time.monotonic()
    with open_model(args, api, rows=rows, chunk=options.n_ctx, collects=True) as model:
        plan = [(4, 1), (rows, 1)]
        with watched(model, "first pass", plan, every=float("inf")):
            made = api.collect_hessian(
                model,
                args.file,
                args.output,
                options=options,
                progress=RunningOutput(chunks_per_pass(options, load), values=False),
                on_sizes=_say_sizes,
            )
    print(
        f"{len(made.inputs)} inputs of {sum(len(one.tensors) for one in made.inputs.values())}"
        f" tensors written to {printable(args.output, 400)}"
    )
    print(
        f"{os.path.getsize(args.output) / 2**20:.2f} MiB, {time.monotonic() - started:.1f} s"
        " in all",
        file=sys.stderr,
    )
    return 0


def _say_sizes(inputs: Sequence[MomentInput], size: int) -> None:
    from ..moments.data import total_sizes

    memory, file = total_sizes(inputs, size)
    print(
        f"second moments of {len(inputs)} inputs: {memory / 2**20:.0f} MiB of memory, a file of"
        f" {file / 2**20:.0f} MiB",
        file=sys.stderr,
    )
