"""`iqforge imatrix`: collect an importance matrix, add to others, or look at the statistics of one."""

from __future__ import annotations

import argparse
import os
import sys
import time

from ...errors import UsageError, printable
from ...runtime.commands.flags import RunningOutput, add_model_flags, batch_tokens, note, open_model


def configure(parser: argparse.ArgumentParser) -> None:
    from ..cold_experts import DEFAULT_PRIOR_TOKENS, METHODS
    from ..coverage import DEFAULT_LEAST

    parser.description = (
        "Run a calibration text through a model and save the mean squared input of every weight"
        " column. With --in-file and no text, only add up files."
    )
    add_model_flags(parser, model_required=False, several_texts=True, device="auto")
    parser.add_argument(
        "--text-weight",
        type=float,
        action=_TextWeight,
        metavar="W",
        help="every token of the -f TEXT before it counts W times (default: 1)",
    )
    parser.set_defaults(ctx_size=None)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the text itself, instead of -f")
    parser.add_argument(
        "-o",
        "--output",
        "--output-file",
        default="imatrix.dat",
        metavar="OUT",
        help="file to write (imatrix.dat)",
    )
    parser.add_argument(
        "--output-format",
        choices=("dat", "gguf"),
        help="layout (default: gguf if OUT ends in .gguf, else dat)",
    )
    parser.add_argument(
        "--in-file",
        action="append",
        default=[],
        metavar="F",
        help="add to this importance matrix, .dat or .gguf (repeatable)",
    )
    parser.add_argument(
        "--in-weight",
        action="append",
        type=float,
        metavar="W",
        help="how many times the --in-file at the same place counts",
    )
    parser.add_argument(
        "--in-weighting",
        choices=("tokens", "calls"),
        default="tokens",
        help=(
            "calls of .dat files, against new tokens: each as the -c tokens it is (tokens, the"
            " default), or as one token, which is what ik_llama.cpp does (calls)"
        ),
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="add files that seem to belong to another model",
    )
    parser.add_argument("--process-output", action="store_true", help="include the output matrix")
    parser.add_argument(
        "--output-tensor-name",
        default="output.weight",
        metavar="NAME",
        help="its name (output.weight)",
    )
    parser.add_argument(
        "--chunk",
        "--from-chunk",
        type=int,
        default=0,
        metavar="N",
        dest="from_chunk",
        help="leave out the first N windows",
    )
    parser.add_argument(
        "--parse-special", action="store_true", help="the text of a control token is that token"
    )
    parser.add_argument(
        "-ofreq",
        "--output-frequency",
        type=int,
        metavar="N",
        help=(
            "write what there is after every N windows, and "
            "OUT.resume to go on from; 0: only at the end (default: 10, at most once a minute)"
        ),
    )
    parser.add_argument(
        "--save-frequency",
        type=int,
        default=0,
        metavar="N",
        help="keep a copy OUT.at_WINDOWS every N windows",
    )
    parser.add_argument(
        "--coverage",
        type=int,
        default=DEFAULT_LEAST,
        metavar="N",
        dest="min_tokens",
        help=(
            "experts that saw fewer than N "
            f"tokens are cold: they are named at the end (default: {DEFAULT_LEAST})"
        ),
    )
    parser.add_argument(
        "--cold-experts",
        choices=METHODS,
        help=(
            "what is written of cold experts: what they saw with the mean of their layer mixed in"
            " (prior, the default if there is a text), or that of the experts with the nearest"
            " router rows (neighbours); all-experts shows every token to every expert while"
            " collecting; none: what they saw, and ones for those that saw nothing"
        ),
    )
    parser.add_argument(
        "--prior-tokens",
        type=float,
        default=DEFAULT_PRIOR_TOKENS,
        metavar="K",
        help=f"how many tokens that mean counts as (default: {DEFAULT_PRIOR_TOKENS:g})",
    )
    parser.add_argument(
        "-lsim",
        "--layer-similarity",
        action="store_true",
        help="at the end, say how much each layer changes its input",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on where a run of the same command was interrupted, if one was",
    )
    parser.add_argument(
        "--no-ppl", action="store_true", help="do not compute the running perplexity"
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


def run(args: argparse.Namespace, api) -> int:
    if args.show_statistics:
        return _show_statistics(args)
    if args.file and args.prompt:
        raise UsageError("-f TEXT or -p TEXT, not both")
    if args.min_tokens < 0:
        raise UsageError(f"--coverage is {args.min_tokens}, expected 0 or more")
    if not args.file and not args.prompt:
        return _combine(args, api)
    if not args.model:
        raise UsageError("-m MODEL is needed")
    return _collect(args, api)


def _collect(args: argparse.Namespace, api) -> int:
    from ...runtime.devices import (
        usable_device,  # torch, which takes longer to import than files to add up
    )
    from ...runtime.evaluate.report import final_estimate
    from ..similarity import LayerSimilarity

    args.ctx_size = 512 if args.ctx_size is None else args.ctx_size
    if args.precision not in (None, "f32"):
        note(f"--precision {args.precision}", "inputs of products are observed in float32")
    args.precision = "f32"
    weights = [(args.text_weight or {}).get(index, 1.0) for index in range(len(args.file or ()))]
    text = (
        {"text": args.file, "text_weights": weights}
        if args.file
        else {"text": args.prompt, "dataset": ""}
    )
    perplexities, coverages, similarity, started = [], [], None, time.monotonic()
    if args.device == "auto":
        args.device = str(usable_device(args.device))
        print(f"collecting on {args.device}", file=sys.stderr)
    with open_model(args, rows=batch_tokens(args), window=args.ctx_size) as model:
        if args.layer_similarity:
            similarity = LayerSimilarity(len(model.network.blocks))
        imatrix = api.collect_imatrix(
            model,
            **text,
            out=args.output,
            n_ctx=args.ctx_size,
            chunks=args.chunks,
            from_chunk=args.from_chunk,
            output_format=args.output_format,
            process_output=args.process_output,
            output_name=args.output_tensor_name,
            parse_special=args.parse_special,
            compute_perplexity=not args.no_ppl,
            batch_tokens=batch_tokens(args),
            in_files=args.in_file,
            in_weights=args.in_weight,
            weighting=args.in_weighting,
            output_frequency=args.output_frequency,
            save_frequency=args.save_frequency,
            resume=args.resume,
            progress=RunningOutput(args),
            cold_experts=args.cold_experts or "prior",
            min_tokens=args.min_tokens,
            prior_tokens=args.prior_tokens,
            force=args.force,
            similarity=similarity,
            on_perplexity=perplexities.append,
            on_coverage=coverages.append,
        )
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
    if not args.in_file:
        raise UsageError("-f TEXT is needed")
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
    _say(
        api.merge_imatrices(
            args.in_file,
            args.output,
            weights=args.in_weight,
            chunk_size=args.ctx_size,
            weighting=args.in_weighting,
            output_format=args.output_format,
            cold_experts=args.cold_experts or "none",
            min_tokens=args.min_tokens,
            prior_tokens=args.prior_tokens,
            force=args.force,
        ),
        args,
    )
    return 0


def _show_statistics(args: argparse.Namespace) -> int:
    from ..files.load import load_imatrix
    from ..statistics import statistics_lines

    if len(args.in_file) != 1:
        raise UsageError(f"--show-statistics needs exactly one --in-file, not {len(args.in_file)}")
    print("\n".join(statistics_lines(load_imatrix(args.in_file[0]))))
    return 0


def _say(imatrix, args: argparse.Namespace) -> None:
    if args.verbosity > 1:
        unit = "calls" if imatrix.counts_calls else "tokens"
        for name, entry in imatrix.entries.items():
            counts = (
                f"{entry.counts.min()} to {entry.counts.max()}"
                if len(entry.counts) > 1
                else f"{entry.counts[0]}"
            )
            print(f"{printable(name)}: {entry.shape[0]} x {entry.shape[1]}, {counts} {unit}")
    size = "" if imatrix.counts_calls else f" of {imatrix.chunk_size} tokens"
    print(
        f"{len(imatrix.entries)} entries from {imatrix.chunk_count} chunks{size} written to"
        f" {printable(args.output, 400)}"
    )


class _TextWeight(argparse.Action):
    """The weight of the text named before it: {index of the text: weight}."""

    def __call__(self, parser, namespace, value, option_string=None):
        if not namespace.file:
            parser.error("--text-weight W comes behind the -f TEXT that it is about")
        weights = getattr(namespace, self.dest) or {}
        setattr(namespace, self.dest, weights | {len(namespace.file) - 1: value})
