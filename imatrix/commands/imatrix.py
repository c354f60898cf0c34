"""`iqforge imatrix`: collect an importance matrix, add to others, or show the statistics of one."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import UsageError, printable, utf_8
from ...runtime.commands.flags import (
    RunningOutput,
    add_chunk_flags,
    add_load_flags,
    add_model_flag,
    chunks_per_pass,
    note,
    on_one_device,
    open_model,
)
from ...runtime.commands.watch import watched
from ...runtime.options import LoadOptions
from ..options import ColdOptions, CollectOptions, MergeOptions
from .passes import batch_tokens, chunk_tokens

if TYPE_CHECKING:
    from ..data import Imatrix

_WINDOWS = ("n_ctx", "chunks", "batch_tokens")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge imatrix` to its parser."""
    parser.description = (
        "Run a calibration text through a model and save the mean squared input of every weight"
        " column. With --in-file and no text, only add up files."
    )
    add_model_flag(parser, required=False)
    add_chunk_flags(parser, several_texts=True, default_text=True, n_ctx=None, batch_tokens=None)
    parser.add_argument(
        "--text-weight",
        type=float,
        action=_TextWeight,
        metavar="W",
        help="count every token of the -f TEXT before this flag W times (default: 1)",
    )
    parser.add_argument(
        "-p", "--prompt", type=utf_8, metavar="TEXT", help="the text itself, instead of -f"
    )
    parser.add_argument(
        "-o",
        "--output",
        "--output-file",
        default="imatrix.dat",
        metavar="OUT",
        help="file to write (default: imatrix.dat)",
    )
    CollectOptions.add_flags(parser, without=(*_WINDOWS, "cold_experts"))
    ColdOptions.add_flags(parser, only=("cold_experts",), cold_experts=None)
    MergeOptions.add_flags(parser, only=("weights",))
    parser.add_argument(
        "-lsim",
        "--layer-similarity",
        action="store_true",
        help="print how much each layer changes its input",
    )
    parser.add_argument("--ppl", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--verbosity", type=int, default=1, metavar="N", help="2: a line for every entry at the end"
    )
    parser.add_argument(
        "--show-statistics",
        action="store_true",
        help="print statistics of one --in-file, and do nothing else",
    )
    add_load_flags(parser)


def check_ranks(args: argparse.Namespace) -> None:
    """UsageError for what ranks that share chunks do not measure."""
    if args.layer_similarity:
        raise UsageError("-lsim is measured by one process only: not with -sm data")


def run(args: argparse.Namespace, api) -> int:
    """Collect, combine or show importance matrices, and return 0. Raise UsageError for flags that
    exclude each other or a missing model.
    """
    if args.show_statistics:
        return _show_statistics(args, api)
    if args.file and args.prompt is not None:
        raise UsageError("-f TEXT or -p TEXT, not both")
    if not args.file and args.prompt is None:
        return _combine(args, api)
    if not args.model:
        raise UsageError("-m MODEL is needed")
    return _collect(args, api)


def _collect(args: argparse.Namespace, api) -> int:
    from ...runtime.evaluate.chunks import read_text
    from ...runtime.evaluate.report import final_estimate
    from ..default_texts import DEFAULT
    from ..similarity import LayerSimilarity

    if args.split_mode != "data":
        on_one_device(
            args, "products of the whole model are looked at; -sm data has other chunks on each GPU"
        )
    texts = args.file or ()
    for path in texts:
        if path != DEFAULT:
            read_text(path)  # an error before the model is loaded
    load = LoadOptions.from_flags(args)
    options = CollectOptions.from_flags(
        args,
        n_ctx=chunk_tokens(args),
        batch_tokens=batch_tokens(args, load),
        cold_experts=args.cold_experts or "prior",
        in_weights=tuple(args.weights) if args.weights else None,
        text_weights=tuple((args.text_weight or {}).get(i, 1.0) for i in range(len(texts))) or None,
    )
    rows = options.tokens_per_pass(load.ubatch)
    options = replace(options, batch_tokens=rows)
    per_pass = chunks_per_pass(options, load)
    perplexities, coverages, similarity, started = [], [], None, time.monotonic()
    with open_model(args, api, rows=rows, chunk=options.n_ctx, collects=True) as model:
        if args.layer_similarity:
            similarity = LayerSimilarity(len(model.network.blocks))
        with watched(model, "first pass", [(rows, 1)], every=float("inf")):
            imatrix = api.collect_imatrix(
                model,
                args.file or args.prompt,
                args.output,
                options=options,
                dataset=None if args.file else "",
                progress=RunningOutput(per_pass),
                similarity=similarity,
                on_perplexity=perplexities.append,
                on_coverage=coverages.append,
            )
        if not model.is_first:
            return 0
    for perplexity in perplexities:
        print(final_estimate(perplexity))
    for coverage in coverages:
        for line in coverage.summary():
            print(line)
    _say(imatrix, args)
    print(
        f"{os.path.getsize(args.output) / 2**20:.2f} MiB, {time.monotonic() - started:.1f} s"
        " in all",
        file=sys.stderr,
    )
    if similarity is not None:
        print("\n".join(similarity.lines()))
    return 0


def _combine(args: argparse.Namespace, api) -> int:
    if not args.in_files:
        raise UsageError("-f TEXT or -p TEXT is needed")
    if args.cold_experts in ("neighbours", "all-experts"):
        raise UsageError(f"--cold-experts {args.cold_experts} needs a model and a text")
    given = [
        flag
        for flag, value in (
            ("-m", args.model),
            ("--process-output", args.process_output),
            ("--resume", args.resume),
            ("--save-frequency", args.save_frequency),
            ("-lsim", args.layer_similarity),
        )
        if value
    ]
    if given:
        note(", ".join(given), "without a text files are only added up")
    options = MergeOptions.from_flags(
        args, chunk_size=args.n_ctx, cold_experts=args.cold_experts or "none"
    )
    _say(api.merge_imatrices(args.in_files, args.output, options=options), args)
    return 0


def _show_statistics(args: argparse.Namespace, api) -> int:
    from ..statistics import statistics_lines

    files = args.in_files or []
    if len(files) != 1:
        raise UsageError(f"--show-statistics needs exactly one --in-file, not {len(files)}")
    imatrix = api.load_imatrix(files[0])
    print("\n".join(statistics_lines(api.imatrix_statistics(imatrix), imatrix.path)))
    return 0


def _say(imatrix: Imatrix, args: argparse.Namespace) -> None:
    if args.verbosity > 1:
        unit = "calls" if imatrix.counts_calls else "tokens"
        for name, entry in imatrix.entries.items():
            counts = (
                f"{entry.counts.min()} to {entry.counts.max()}"
                if len(entry.counts) > 1
                else f"{entry.counts[0]}"
            )
            print(f"{printable(name)}: {entry.shape[0]} x {entry.shape[1]}, {counts} {unit}")
    print(f"{imatrix.contents} written to {printable(args.output, 400)}")


class _TextWeight(argparse.Action):
    """Store the weight of the text named before: {index of the text: weight}."""

    def __call__(self, parser, namespace, value, option_string=None):
        if not namespace.file:
            parser.error("--text-weight W must come after its -f TEXT")
        weights = getattr(namespace, self.dest) or {}
        setattr(namespace, self.dest, weights | {len(namespace.file) - 1: value})
