"""`iqforge bench`: the tests of llama-bench on a model, or on random weights of a real shape."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import UsageError, printable
from ...formats.commands.progress import Meter
from ..bench.options import BenchOptions
from ..options import SPLIT_FIELDS, LoadOptions, split_options
from . import bench_flags
from .bench_flags import OPTIONS
from .bench_settings import cache_settings, open_model, planned_settings
from .flags import MODEL_HELP, chosen_device
from .watch import Runs, passes, watched

if TYPE_CHECKING:
    import torch

    from ...formats.source import Source
    from ..bench.bench import Result, Test
    from ..cuda.common.device_facts import DeviceFacts
    from ..model import Model

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
        help="the same on stderr (default: none)",
    )
    parser.add_argument(
        "-w", dest="warm", type=int, choices=(0, 1), default=1, help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--delay", type=float, default=0, metavar="SECONDS", help="pause before each test"
    )
    parser.add_argument("--progress", action="store_true", help="say on stderr what runs")
    add_setting_flags(parser)


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
    from .bench_output import FORMATS

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
    from .bench_output import Printer, printer

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
            for line, result in measure(
                api, args, which, synthetic, device, settings, options, facts, begin
            ):
                for output in outputs:
                    output.add(line, result.samples_ns, result.samples_ts)
    finally:  # what was measured before an error stays readable
        for output in begun:
            output.end()
    return 0


def _write(args: argparse.Namespace, api) -> int:
    from ..bench.write import written_bytes

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


def measure(
    api,
    args: argparse.Namespace,
    which: str,
    synthetic: bool,
    device: torch.device,
    settings: list[dict[str, Any]],
    options: BenchOptions,
    facts: DeviceFacts | None,
    on_open: Callable[[], None],
) -> Iterator[tuple[dict[str, Any], Result]]:
    """Yield (record, Result) of every test under every setting for one model, which is loaded again
    only where a setting asks for it. on_open: called each time it is.
    """
    import torch

    from ...version import __version__
    from ..bench.record import record
    from .flags import NO_SCORES

    cores, opened, loaded_as, limits = torch.get_num_threads(), None, None, None
    # -amb matters if one of the settings is without flash attention.
    said: set[tuple[str, str]] = (
        set() if all(setting["flash_attn"] for setting in settings) else {NO_SCORES}
    )
    tests, several = options.tests(), len(args.model) + len(args.synthetic) > 1
    try:
        for setting in settings:
            torch.set_num_threads(setting["n_threads"])
            load_as = tuple(setting[option.field] for option in OPTIONS if option.reload)
            if opened is None or load_as != loaded_as:
                if opened is not None:
                    opened.close()
                opened = None  # the old one goes first: both need not fit
                opened = open_model(
                    api,
                    which,
                    synthetic,
                    device,
                    setting,
                    context=max(test.n_ctx for test in tests),
                    verbose=True,
                    said=said,
                    name=printable(which, 400) if several else "",
                )
                on_open()
                loaded_as, limits = load_as, _limits(opened, device, facts)
            for test in tests:
                time.sleep(args.delay)
                what, say = f"{which}: {test.label}", None
                if args.progress:
                    say = partial(_say, what)
                one = replace(
                    options.only(test),
                    n_batch=setting["n_batch"],
                    warmup=bool(args.warm) and options.warmup,
                )
                with watched(opened, what, planned_passes(one, test, opened.ubatch)):
                    [result] = api.benchmark_model(
                        opened, options=one, cache=cache_settings(setting), progress=say
                    )
                yield (
                    record(
                        opened.source,
                        result,
                        setting,
                        device=str(device),
                        facts=facts,
                        limits=limits,
                        version=__version__,
                    ),
                    result,
                )
    finally:
        torch.set_num_threads(cores)
        if opened is not None:
            opened.close()


def _say(what: str, line: str) -> None:
    print(f"{what}: {line}", file=sys.stderr)


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


def planned_passes(options: BenchOptions, test: Test, ubatch: int) -> Runs:
    """Return the passes of a test on the CPU, in order."""
    prompt = passes(test.n_prompt, ubatch)
    warm = [*prompt, (1, min(test.n_gen, 4))] if options.warmup else []
    before = passes(test.depth + test.before, ubatch)
    return [*warm, *before, *[*prompt, (1, test.n_gen)] * min(options.repetitions, 1000)]


def open_source(api, which: str, synthetic: bool) -> Source:
    """Return the source of a model that is named."""
    return (api.random_source if synthetic else api.open_source)(which)


def _limits(model: Model, device: torch.device, facts: DeviceFacts | None) -> DeviceFacts | None:
    """Return what all devices that evaluate a token together could do, if they are like `device`;
    None if a matrix is elsewhere, as the limits of `device` say nothing then.
    """
    if facts is None or set(model.weights.bytes_by_device()) != {device}:
        return None
    share = model.weights.share
    n = 1 if share is None else share.plan.n_ranks
    bandwidth, rate = (None if x is None else n * x for x in (facts.bandwidth, facts.bf16_rate))
    return replace(facts, bandwidth=bandwidth, bf16_rate=rate)


def _facts(device: torch.device) -> DeviceFacts | None:
    if device.type != "cuda":
        return None
    from ..cuda.common.device_facts import device_facts

    return device_facts(device)
