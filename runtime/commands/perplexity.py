"""`iqforge perplexity`: perplexity of a model on texts, its divergence from a base model, or its
score in tasks with several answers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import EvaluationError, UsageError, printable, utf_8
from ..options import LoadOptions
from ..text_options import PerplexityOptions
from . import perplexity_base
from .flags import (
    RunningOutput,
    add_chunk_flags,
    add_load_flags,
    add_model_flag,
    chunks_per_pass,
    note,
    open_model,
)
from .prompt_flags import typed_text
from .tasks import TASKS, add_task_flags, score_tasks, task_kind
from .watch import watched

if TYPE_CHECKING:
    from ..evaluate.divergence import Statistics
    from ..model import Model


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge perplexity` to its parser."""
    parser.description = (
        "Measure perplexity over chunks of a text, or of several. With --kl-divergence-base F alone"
        " the predictions are also saved to F. With --kl-divergence they are compared with those"
        " saved in F, on the text that F holds. --kl-divergence-against BASE compares two models"
        " without a file. --hellaswag, --winogrande and --multiple-choice"
        " count right answers in a file of tasks instead."
    )
    add_model_flag(parser)
    add_chunk_flags(parser, several_texts=True)
    parser.add_argument(
        "-p",
        "--prompt",
        type=utf_8,
        metavar="TEXT",
        help="the text itself, instead of -f; \\n, \\t, \\\\ and the like are replaced unless"
        " --no-escape",
    )
    parser.add_argument(
        "--no-escape", action="store_true", help="take backslashes in -p as they are"
    )
    parser.add_argument("-e", "--escape", action="store_true", help=argparse.SUPPRESS)
    PerplexityOptions.add_flags(
        parser, only=("kl_divergence_base", "kl_divergence", "kl_divergence_compact")
    )
    parser.add_argument(
        "--kl-divergence-against",
        metavar="BASE",
        help="compare with this model, which is evaluated at the same time, without a base file",
    )
    PerplexityOptions.add_flags(parser, only=("ppl_stride",))
    parser.add_argument(
        "--ppl-output-type",
        type=int,
        choices=(0, 1),
        default=0,
        help="1: one line per chunk (default: 0)",
    )
    add_task_flags(parser)
    add_load_flags(parser)


def check(args: argparse.Namespace) -> None:
    """Raise errors of flags and texts, which are found without a model."""
    from ..evaluate.chunks import can_be_read_again, read_text

    options = PerplexityOptions.from_flags(args)
    LoadOptions.from_flags(args).check()
    texts = args.file or []
    if task_kind(args, options, texts):
        return
    if args.binary_file:
        raise UsageError("-bf is the file of --multiple-choice")
    base = options.kl_divergence_base
    perplexity_base.check_flags(args, options)
    if texts and args.prompt is not None:
        raise UsageError("-f TEXT or -p TEXT, not both")
    _prompt(args)
    if options.kl_divergence:
        return
    if not texts and args.prompt is None:
        raise UsageError("-f TEXT or -p TEXT is needed")
    for text in filter(can_be_read_again, texts):
        read_text(text)
    if base:
        perplexity_base.check_output(base, args.model, texts, options)


def check_ranks(args: argparse.Namespace) -> None:
    """UsageError for what ranks that share chunks do not measure."""
    if args.split_mode != "data":
        return
    values = {
        "--kl-divergence": args.kl_divergence,
        "--kl-divergence-base": args.kl_divergence_base is not None,
        "--kl-divergence-against": args.kl_divergence_against is not None,
        "--ppl-stride": args.ppl_stride,
        **{f"--{kind}": getattr(args, kind.replace("-", "_")) for kind in TASKS},
    }
    for flag, value in values.items():
        if value:
            raise UsageError(f"{flag} is measured by one process only: not with -sm data")


def run(args: argparse.Namespace, api) -> int:
    """Measure, print the results in the reference's words, and return 0. Raise UsageError if the
    text is missing.
    """
    from ..evaluate.compact_base import open_base

    check(args)
    options = PerplexityOptions.from_flags(args)
    texts, prompt = args.file or [], _prompt(args)
    kind = task_kind(args, options, texts)
    _say_unused(args, options, kind)
    if kind:
        return score_tasks(args, api, kind)
    base = options.kl_divergence_base
    if options.kl_divergence:
        n_ctx = open_base(base or "").n_ctx
        if options.n_ctx not in (n_ctx, PerplexityOptions.default_of("n_ctx")):
            note("-c", f"{printable(base or '', 400)} has chunks of {n_ctx} tokens")
        options = replace(options, n_ctx=n_ctx)
    load = LoadOptions.from_flags(args)
    if not options.ppl_stride:
        options = replace(options, batch_tokens=options.tokens_per_pass(load.ubatch))
    rows = options.tokens_per_pass(load.ubatch)
    against = args.kl_divergence_against
    own_name = printable(args.model, 400) if against else ""
    with (
        open_model(args, api, rows=rows, chunk=options.n_ctx, name=own_name) as model,
        watched(model, "first pass", [(rows, 1)], every=float("inf")),
    ):
        if options.kl_divergence:
            perplexity_base.note_other_texts(model, base or "", texts, prompt)
            _compare(api, model, None, options, load)
        elif against:
            words = argparse.Namespace(**vars(args) | {"model": against})
            name = printable(against, 400)
            with open_model(
                words, api, rows=rows, chunk=options.n_ctx, name=name, is_first=False
            ) as other:
                for text in texts or [None]:
                    name = text if text and len(texts) > 1 else ""
                    with _named(name):
                        _compare(api, model, text, options, load, prompt, against=other, name=name)
        else:
            if options.ppl_stride:
                _say_windows(model, options)
            for text in texts or [None]:
                with _named(text if text and len(texts) > 1 else ""):
                    _measure(args, api, model, text, options, load, prompt)
    return 0


def _prompt(args: argparse.Namespace) -> str | None:
    """Return the text of -p. UsageError if it, or what backslashes in it say, is not UTF-8."""
    return None if args.prompt is None else typed_text(args.prompt, escape=not args.no_escape)


def _say_windows(model: Model, options: PerplexityOptions) -> None:
    from ..evaluate.strided import window_length

    flash, stride = model.weights.switches.flash_attention, options.ppl_stride
    length = window_length(options.n_ctx, stride, options.batch_tokens, flash)
    print(
        f"windows of {length} tokens, one every {stride}; the last {stride} of each are scored"
        " (-b, -c: their length)",
        file=sys.stderr,
    )


@contextmanager
def _named(text: str) -> Iterator[None]:
    """Let an error of one of several texts say which."""
    try:
        yield
    except EvaluationError as error:
        error.file = error.file or text or None
        raise


def _compare(
    api,
    model: Model,
    text: str | None,
    options: PerplexityOptions,
    load: LoadOptions,
    prompt: str | None = None,
    *,
    against: Model | None = None,
    name: str = "",
) -> None:
    """Print the table and the summary of a comparison, or one line that begins with `name`."""
    from ..evaluate import report

    def show(chunk: int, statistics: Statistics) -> None:
        if chunk == 0:  # nothing is printed before an error of the input
            print(f"\n{report.TABLE_HEADER}")
        print(report.table_row(chunk, statistics), flush=True)

    result = api.measure_perplexity(
        model,
        text,
        prompt=prompt,
        options=options,
        against=against,
        progress=RunningOutput(chunks_per_pass(options, load), False),
        on_chunk=None if name else show,
    )
    if name:
        print(report.divergence_line(name, result), flush=True)
    elif result.statistics.n >= report.LEAST_FOR_SUMMARY:
        print("\n" + "\n".join(report.summary(result.statistics)))


def _measure(
    args: argparse.Namespace,
    api,
    model: Model,
    text: str | None,
    options: PerplexityOptions,
    load: LoadOptions,
    prompt: str | None,
) -> None:
    from ..evaluate import report

    named = text if text and len(args.file) > 1 else ""
    result = api.measure_perplexity(
        model,
        text,
        prompt=prompt,
        options=options,
        progress=RunningOutput(
            chunks_per_pass(options, load), args.ppl_output_type == 0 and not named
        ),
    )
    if args.ppl_output_type == 1:
        line = report.strided_line if options.ppl_stride else report.running_line
        print("\n".join(map(line, result.running)))
    if named:
        print(report.text_line(named, result), flush=True)
    elif not options.ppl_stride:
        print(report.final_estimate(result))


def _say_unused(args: argparse.Namespace, options: PerplexityOptions, kind: str | None) -> None:
    """Print a note for each flag that changes nothing in what is measured."""
    if kind is not None and options.chunks > 0:
        note("--chunks", f"--{kind} has tasks instead: --{kind}-tasks")
    if args.ppl_output_type and (kind or options.kl_divergence or args.kl_divergence_against):
        note("--ppl-output-type", "it is about perplexity alone")
