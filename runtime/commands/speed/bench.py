"""`iqforge bench`: the tests of llama-bench on a model, or on random weights of a real shape."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING

from ....errors import UsageError
from ....formats.commands.progress import Meter
from ...bench.options import BenchOptions
from ...options import SPLIT_FIELDS, LoadOptions, split_options
from ..flags import MODEL_HELP, chosen_device
from . import flags as bench_flags
from .measure import measured
from .settings import planned_settings

if TYPE_CHECKING:
    import torch

    from ....formats.source import Source
    from ...cuda.common.device_facts import DeviceFacts

_LONGEST_DELAY = 86400


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge bench` to its parser."""
    parser.description = (
        "Measure the speed of prompts (pp) and of generation (tg). Lists (with commas, by"
        " repeating a flag, or as ranges such as 128-512+128 and 128-2048*2) multiply into a matrix"
        " of tests. GB/s are the weights and the cache that a token needs, times tokens per second."
    )
    parser.add_argument(
        "-m",
        "--model",
        action="append",
        default=[],
        metavar="MODEL",
        help=MODEL_HELP + " (repeatable)",
    )
    parser.add_argument(
        "--synthetic",
        action="append",
        default=[],
        metavar="SHAPE:TYPE",
        help="random weights (repeatable): llama-8b:IQ4_K, llama-70b:Q4_K,"
        " qwen3-30b-a3b:IQ2_K,attn_v=Q6_K, ...; with layers=N only the first N layers:"
        " deepseek-v3:IQ4_K,layers=12",
    )
    parser.add_argument(
        "--write",
        metavar="FILE",
        help="write the model of --synthetic as a GGUF file instead of measuring it: random"
        " weights and a small vocabulary, which other engines open too",
    )
    BenchOptions.add_flags(parser)
    parser.add_argument(
        "-o",
        "--output",
        default="md",
        metavar="FORMAT",
        help="md, csv, json, jsonl, sql or none (default: md)",
    )
    parser.add_argument(
        "-oe",
        "--output-err",
        default="none",
        metavar="FORMAT",
        help="the same on stderr, without lines about how far a test is (default: none)",
    )
    parser.add_argument(
        "-w", dest="warm", type=int, choices=(0, 1), default=1, help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--delay", type=float, default=0, metavar="SECONDS", help="pause before each test"
    )
    parser.add_argument("--progress", action="store_true", help="say on stderr what runs")
    add_setting_flags(parser)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name one model, in a file or synthetic."""
    parser.add_argument("-m", "--model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--synthetic",
        metavar="SHAPE:TYPE",
        help="random weights of a real shape, as in `iqforge bench`",
    )


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where and how the model runs, the last group of help."""
    group = parser.add_argument_group("where and how the model runs")
    LoadOptions.add_flags(group, only=SPLIT_FIELDS, device="auto")
    group.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="no effect here: what runs on a slower path is always said on stderr",
    )
    bench_flags.add_options(group)


def check(args: argparse.Namespace) -> None:
    """Raise errors of flags, which are found without a model."""
    from .output import FORMATS

    if args.write is not None:
        return
    for flag, form in (("-o", args.output), ("-oe", args.output_err)):
        if form not in FORMATS:
            raise UsageError(f"{flag} is '{form}', expected one of {', '.join(FORMATS)}")
    if not 0 <= args.delay <= _LONGEST_DELAY:
        raise UsageError(f"--delay is {args.delay} seconds, expected 0 to {_LONGEST_DELAY}")
    if "," in args.device:
        raise UsageError(
            f"-dev {args.device}: bench takes no list of devices to compare; several GPUs together"
            f" are -dev {args.device.replace(',', '/')} with -sm graph or layer"
        )
    if not args.model and not args.synthetic:
        raise UsageError("-m MODEL or --synthetic SHAPE:TYPE is needed")
    if not planned_tests(args).tests():
        raise UsageError("there is nothing to measure: -p and -n are 0")


def run(args: argparse.Namespace, api) -> int:
    """Run the tests and print the results in the chosen formats. Return 0. Raise UsageError for
    unknown formats or values out of range.
    """
    from .output import Printer, printer

    if args.write is not None:
        return _write(args, api)
    check(args)
    options = planned_tests(args)
    device = chosen_device(split_options(args))
    settings, facts = planned_settings(args, device), _facts(device)
    for note in bench_flags.notes(args, device.type == "cpu"):
        print(note, file=sys.stderr)
    models = [(path, False) for path in args.model] + [(spec, True) for spec in args.synthetic]
    for which, synthetic in models:  # a wrong name is found before anything is measured or printed
        open_source(api, which, synthetic).close()
    varied, limits = bench_flags.varied(args), facts.describe() if facts else ""
    labels = [test.label for test in options.tests()]
    outputs = [
        printer(
            form,
            partial(print, file=stream, flush=True),
            varied,
            facts is not None,
            limits,
            labels,
            split_options(args).split(device).n_ranks > 1,
        )
        for form, stream in ((args.output, sys.stdout), (args.output_err, sys.stderr))
    ]
    begun: list[Printer] = []

    def begin() -> None:
        for output in outputs[len(begun) :]:
            begun.append(output)
            output.begin()

    try:
        for which, synthetic in models:
            for line, result in measured(
                api, args, which, synthetic, device, settings, options, facts, begin
            ):
                for output in outputs:
                    output.add(line, result.samples_ns, result.samples_ts)
    finally:  # what was measured before an error stays readable
        for output in begun:
            output.end()
    return 0


def _write(args: argparse.Namespace, api) -> int:
    from ...bench.write import written_bytes

    if args.model or len(args.synthetic) != 1:
        raise UsageError("--write takes one model of random weights: --synthetic SHAPE:TYPE")
    [spec] = args.synthetic
    with Meter(f"writing {args.write}") as progress:
        progress.begin(written_bytes(spec))
        path = api.write_random_model(spec, args.write, progress=progress)
    mib = path.stat().st_size / 2**20
    size = f"{mib:.1f} MiB" if mib < 1024 else f"{mib / 1024:.2f} GiB"
    print(f"{path}: {size} of random weights, {spec}")
    return 0


def planned_tests(args: argparse.Namespace) -> BenchOptions:
    """Return the tests of one setting."""
    usual, integers = BenchOptions(), bench_flags.integers
    return BenchOptions.from_flags(
        args,
        n_batch=usual.n_batch,  # one of the settings
        prompts=tuple(n for n in integers(args.prompts, usual.prompts, "-p") if n),
        generations=tuple(n for n in integers(args.generations, usual.generations, "-n") if n),
        prompt_generations=tuple(bench_flags.pairs(args.prompt_generations, "-pg")),
        generations_after=tuple(bench_flags.pairs(args.generations_after, "-gp")),
        depths=tuple(integers(args.depths, usual.depths, "-d")),
    )


def open_source(api, which: str, synthetic: bool) -> Source:
    """Return the source of a model that is named."""
    return (api.random_source if synthetic else api.open_source)(which)


def _facts(device: torch.device) -> DeviceFacts | None:
    if device.type != "cuda":
        return None
    from ...cuda.common.device_facts import device_facts

    return device_facts(device)
