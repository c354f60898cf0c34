"""`iqforge perplexity`: perplexity of a model on a text, or its divergence from a base model."""

from __future__ import annotations

import argparse

from ...errors import UsageError
from .flags import RunningOutput, add_model_flags, batch_tokens, open_model


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Perplexity over windows of a text. With --kl-divergence-base F alone the predictions are"
        " also saved to F; with --kl-divergence they are compared with those saved in F, whose text"
        " is used."
    )
    add_model_flags(parser)
    parser.add_argument(
        "--kl-divergence-base",
        "--save-all-logits",
        metavar="F",
        help="file with the base model's predictions",
    )
    parser.add_argument(
        "--kl-divergence",
        action="store_true",
        help="compare with the base file instead of writing it",
    )
    parser.add_argument(
        "--ppl-output-type", type=int, choices=(0, 1), default=0, help="1: one line per window"
    )


def run(args: argparse.Namespace, api) -> int:
    return _divergence(args) if args.kl_divergence else _perplexity(args)


def _perplexity(args: argparse.Namespace) -> int:
    from ...formats.output import refuse_same_file
    from ..evaluate.perplexity import measure_perplexity
    from ..evaluate.report import final_estimate, running_line
    from ..evaluate.windows import read_text

    if not args.file:
        raise UsageError("-f TEXT is needed")
    if args.kl_divergence_base:
        refuse_same_file(args.kl_divergence_base, (args.model, args.file))
    text = read_text(args.file)
    with open_model(args, rows=batch_tokens(args), window=args.ctx_size) as model:
        result = measure_perplexity(
            model,
            text,
            n_ctx=args.ctx_size,
            chunks=args.chunks,
            batch_tokens=batch_tokens(args),
            save_logits=args.kl_divergence_base,
            progress=RunningOutput(args, values=args.ppl_output_type == 0),
        )
    if args.ppl_output_type == 1:
        print("\n".join(map(running_line, result.running)))
    print(final_estimate(result))
    return 0


def _divergence(args: argparse.Namespace) -> int:
    from ..evaluate import report
    from ..evaluate.base_file import BaseFile
    from ..evaluate.divergence import measure_divergence

    if not args.kl_divergence_base:
        raise UsageError("--kl-divergence needs --kl-divergence-base F")
    base = BaseFile(args.kl_divergence_base)
    args.ctx_size = base.n_ctx
    with open_model(args, rows=batch_tokens(args), window=args.ctx_size) as model:
        print(f"\n{report.TABLE_HEADER}")
        result = measure_divergence(
            model,
            base,
            chunks=args.chunks,
            batch_tokens=batch_tokens(args),
            progress=RunningOutput(args, values=False),
            on_window=lambda window, statistics: print(
                report.table_row(window, statistics), flush=True
            ),
        )
    if result.statistics.n >= report.LEAST_FOR_SUMMARY:
        print("\n" + "\n".join(report.summary(result.statistics)))
    return 0
