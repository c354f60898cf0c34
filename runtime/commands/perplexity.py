"""`iqforge perplexity`: perplexity of a model on a text, or its divergence from a base model."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ...errors import UsageError
from ..options import LoadOptions
from ..text_options import PerplexityOptions
from .flags import (
    RunningOutput,
    add_chunk_flags,
    add_load_flags,
    add_model_flag,
    chunks_per_pass,
    open_model,
)
from .watch import watched


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure perplexity over chunks of a text. With --kl-divergence-base F alone the"
        " predictions are also saved to F. With --kl-divergence they are compared with those saved"
        " in F, on the text that F holds."
    )
    add_model_flag(parser)
    add_chunk_flags(parser)
    PerplexityOptions.add_flags(parser, only=("kl_divergence_base", "kl_divergence"))
    parser.add_argument(
        "--ppl-output-type",
        type=int,
        choices=(0, 1),
        default=0,
        help="1: one line per chunk (default: 0)",
    )
    add_load_flags(parser)


def run(args: argparse.Namespace, api) -> int:
    from ...formats.output import refuse_same_file
    from ..evaluate import report
    from ..evaluate.base_file import BaseFile
    from ..evaluate.chunks import read_text

    options = PerplexityOptions.from_flags(args)
    base = options.kl_divergence_base
    if options.kl_divergence:
        if not base:
            raise UsageError("--kl-divergence needs --kl-divergence-base F")
        options = replace(options, n_ctx=BaseFile(base).n_ctx)
    elif not args.file:
        raise UsageError("-f TEXT is needed")
    else:
        read_text(args.file)  # an error before the model is loaded
        if base:
            refuse_same_file(base, (args.model, args.file))
    load = LoadOptions.from_flags(args)
    rows = options.tokens_per_pass(load.ubatch)
    options = replace(options, batch_tokens=rows)
    values = not options.kl_divergence and args.ppl_output_type == 0
    with open_model(args, api, rows=rows, chunk=options.n_ctx) as model:
        if options.kl_divergence:
            print(f"\n{report.TABLE_HEADER}")
        with watched(model, "first pass", [(rows, 1)], every=float("inf")):
            result = api.measure_perplexity(
                model,
                args.file,
                options=options,
                progress=RunningOutput(chunks_per_pass(options, load), values),
                on_chunk=lambda chunk, found: print(report.table_row(chunk, found), flush=True),
            )
    if options.kl_divergence:
        if result.statistics.n >= report.LEAST_FOR_SUMMARY:
            print("\n" + "\n".join(report.summary(result.statistics)))
        return 0
    if args.ppl_output_type == 1:
        print("\n".join(map(report.running_line, result.running)))
    print(report.final_estimate(result))
    return 0
