"""`iqforge bench`: the tests of llama-bench on a model, or on random weights of a real shape."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from ...errors import UsageError
from ..bench import options as bench_options
from ..bench.options import OPTIONS
from .flags import MOST_TOKENS, add_device_flag, check_layers, chosen_device

_LONGEST_DELAY = 86400


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Speed of prompts (pp) and of generation (tg). Lists (with commas, or a flag given again)"
        " multiply into a matrix of tests. GB/s are the weights and the cache that a token needs,"
        " times tokens per second."
    )
    parser.add_argument(
        "-m",
        "--model",
        action="append",
        default=[],
        metavar="MODEL",
        help="GGUF file; may be given again",
    )
    parser.add_argument(
        "--synthetic",
        action="append",
        default=[],
        metavar="SHAPE:TYPE",
        help=(
            "random weights: llama-8b:IQ4_K, llama-70b:Q4_K, qwen3-30b-a3b:IQ2_K,attn_v=Q6_K, ...;"
            " may be given again"
        ),
    )
    parser.add_argument(
        "-p",
        "--n-prompt",
        action="append",
        metavar="LIST",
        help="tokens of a prompt, 0: no such test (default: 512)",
    )
    parser.add_argument(
        "-n",
        "--n-gen",
        action="append",
        metavar="LIST",
        help="tokens to generate, 0: no such test (default: 128)",
    )
    parser.add_argument(
        "-pg",
        action="append",
        metavar="P,G",
        help="a prompt and then generation, in one span of time",
    )
    parser.add_argument(
        "-gp",
        action="append",
        metavar="P,G",
        help="generation behind a prompt whose time does not count",
    )
    parser.add_argument(
        "-d",
        "--n-depth",
        action="append",
        metavar="LIST",
        help="tokens in the context before every test (default: 0)",
    )
    parser.add_argument(
        "-r", "--repetitions", type=int, default=5, metavar="N", help="(default: 5)"
    )
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
        "-w", "--warmup", type=int, choices=(0, 1), default=1, help="0: no warm-up before a test"
    )
    parser.add_argument("--no-warmup", action="store_true", help="the same as -w 0")
    parser.add_argument(
        "--delay", type=float, default=0, metavar="SECONDS", help="pause before each test"
    )
    parser.add_argument("--progress", action="store_true", help="say on stderr what runs")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what takes a slower path")
    add_device_flag(parser, "auto")
    parser.add_argument(
        "--fit",
        nargs="?",
        type=int,
        const=1024,
        metavar="MIB",
        help=(
            "choose by the GPU's free memory what stays on the "
            "CPU, leaving so much free (default: 1024 MiB)"
        ),
    )
    bench_options.add_options(parser)


def run(args: argparse.Namespace, api) -> int:
    from ..bench.output import FORMATS, printer

    for flag, form in (("-o", args.output), ("-oe", args.output_err)):
        if form not in FORMATS:
            raise UsageError(f"{flag} is '{form}', expected one of {', '.join(FORMATS)}")
    if args.repetitions < 1:
        raise UsageError(f"-r is {args.repetitions}, expected 1 or more")
    if not 0 <= args.delay <= _LONGEST_DELAY:
        raise UsageError(f"--delay is {args.delay} seconds, expected 0 to {_LONGEST_DELAY}")
    if not args.model and not args.synthetic:
        raise UsageError("-m MODEL or --synthetic SHAPE:TYPE is needed")
    device = chosen_device(args.device)
    tests, settings, facts = planned_tests(args), planned_settings(args, device), _facts(device)
    if not tests:
        raise UsageError("there is nothing to measure: -p and -n are 0")
    for note in bench_options.notes(args, device.type == "cpu"):
        print(note, file=sys.stderr)
    models = [(path, False) for path in args.model] + [(spec, True) for spec in args.synthetic]
    for (
        which,
        synthetic,
    ) in models:  # a name that is wrong is found before anything is measured or printed
        _source(which, synthetic).close()
    varied, limits = bench_options.varied(args), facts.describe() if facts else ""
    outputs = [
        printer(
            args.output, lambda line: print(line, flush=True), varied, facts is not None, limits
        ),
        printer(
            args.output_err,
            lambda line: print(line, file=sys.stderr, flush=True),
            varied,
            facts is not None,
            limits,
        ),
    ]
    for output in outputs:
        output.begin()
    try:
        for which, synthetic in models:
            for line, result in measure(args, which, synthetic, device, settings, tests, facts):
                for output in outputs:
                    output.add(line, result.samples_ns, result.samples_ts)
    finally:  # what was measured before an error stays readable
        for output in outputs:
            output.end()
    return 0


def measure(
    args: argparse.Namespace,
    which: str,
    synthetic: bool,
    device,
    settings: list[dict[str, Any]],
    tests: list,
    facts,
) -> Iterator:
    """(record, Result) of every test under every setting for one model, which is loaded anew only
    where a setting asks for it.
    """
    import torch

    from ..bench.bench import run_test
    from ..bench.record import record

    cores, opened, loaded_as, limits, said = torch.get_num_threads(), None, None, None, set()
    try:
        for setting in settings:
            torch.set_num_threads(setting["n_threads"])
            load_as = tuple(setting[option.field] for option in OPTIONS if option.reload)
            if load_as != loaded_as:
                if opened is not None:
                    opened.close()
                opened = None  # the old one goes first: both need not fit
                opened = open_model(
                    which,
                    synthetic,
                    device,
                    setting,
                    context=max(test.n_ctx for test in tests),
                    fit_margin=args.fit,
                    verbose=args.verbose,
                    said=said,
                )
                loaded_as, limits = load_as, _whole_on(opened, device) and facts
            for test in tests:
                time.sleep(args.delay)
                say = (
                    (
                        lambda line, label=test.label: print(
                            f"{which}: {label}: {line}", file=sys.stderr
                        )
                    )
                    if args.progress
                    else None
                )
                result = run_test(
                    opened,
                    test,
                    cache_settings(setting),
                    n_batch=setting["n_batch"],
                    repetitions=args.repetitions,
                    warmup=bool(args.warmup) and not args.no_warmup,
                    progress=say,
                )
                yield (
                    record(
                        opened.source,
                        result,
                        setting,
                        device=str(device),
                        facts=facts,
                        limits=limits or None,
                        version=_version(),
                    ),
                    result,
                )
    finally:
        torch.set_num_threads(cores)
        if opened is not None:
            opened.close()


def planned_tests(args: argparse.Namespace) -> list:
    """The tests of one setting: pp, tg, pg, gp, each at every depth."""
    from ..bench.bench import Test

    depths = bench_options.integers(args.n_depth, [0], "-d")
    tests = [
        Test(n_prompt=n, depth=d)
        for n in bench_options.integers(args.n_prompt, [512], "-p")
        if n
        for d in depths
    ]
    tests += [
        Test(n_gen=n, depth=d)
        for n in bench_options.integers(args.n_gen, [128], "-n")
        if n
        for d in depths
    ]
    tests += [
        Test(n_prompt=p, n_gen=g, depth=d)
        for p, g in bench_options.pairs(args.pg, "-pg")
        for d in depths
    ]
    return tests + [
        Test(n_gen=g, before=p, depth=d)
        for p, g in bench_options.pairs(args.gp, "-gp")
        for d in depths
    ]


def planned_settings(args: argparse.Namespace, device) -> list[dict[str, Any]]:
    """The matrix of settings with defaults filled in. UsageError for one that cannot be, before
    anything is measured.
    """
    import torch

    settings = list(bench_options.settings_matrix(args))
    for setting in settings:
        setting["precision"] = setting["precision"] or ("bf16" if device.type == "cuda" else "f32")
        _placement(setting, args.fit).check(device), _switches(setting)
        if cache_settings(setting).v.is_quantized and not setting["flash_attn"]:
            raise UsageError(
                f"values of a cache cannot be quantized ({setting['type_v']}) without flash"
                " attention (-fa 0)"
            )
        if setting["precision"] not in (
            ("f32", "bf16", "f16") if device.type == "cuda" else ("f32",)
        ):
            raise UsageError(f"--precision {setting['precision']} is not known on {device.type}")
        for flag, field in (("-b", "n_batch"), ("-ub", "n_ubatch")):
            if not 1 <= setting[field] <= MOST_TOKENS:
                raise UsageError(f"{flag} is {setting[field]} tokens, expected 1 to {MOST_TOKENS}")
        if setting["n_threads"] < 0:
            raise UsageError(
                f"-t is {setting['n_threads']}, expected 1 or more, or 0: one thread per core"
            )
        setting["n_threads"] = min(
            setting["n_threads"] or torch.get_num_threads(), os.cpu_count() or 1
        )
    return settings


def only_setting(args: argparse.Namespace, what: str) -> tuple[Any, dict[str, Any]]:
    """(device, setting) of a command that takes one model and no lists; says on stderr which flags
    change nothing, and sets the number of threads. `what` names the command's measurement in the
    UsageError for several settings.
    """
    import torch

    if (args.model is None) == (args.synthetic is None):
        raise UsageError("one of -m MODEL and --synthetic SHAPE:TYPE is needed")
    device = chosen_device(args.device)
    settings = planned_settings(args, device)
    if len(settings) > 1:
        raise UsageError(f"{what} is of one setting, lists are for `iqforge bench`")
    for note in bench_options.notes(args, device.type == "cpu"):
        print(note, file=sys.stderr)
    torch.set_num_threads(settings[0]["n_threads"])
    return device, settings[0]


def cache_settings(setting: dict[str, Any]):
    """The `CacheSettings` of a setting."""
    from ..cache import CacheSettings

    return CacheSettings(
        setting["type_k"],
        setting["type_v"],
        setting["k_cache_hadamard"],
        setting["v_cache_hadamard"],
    )


def open_model(
    which: str,
    synthetic: bool,
    device,
    setting: dict[str, Any],
    *,
    context: int = 0,
    fit_margin: int | None = None,
    verbose: bool = False,
    said: set[tuple[str, str]] | None = None,
):
    """The model of one setting, loaded, closed by the caller. `context`: tokens for which memory is
    reckoned. stderr gets a line for switches that change nothing with this model, unless that was
    `said` (which is added to), and the table of memory of a model that goes to a GPU. DeviceError
    if that is more than there is.
    """
    from ..model import Model
    from .flags import load_on_gpu, model_notes, note

    options = {
        "precision": setting["precision"],
        "placement": _placement(setting, fit_margin),
        "switches": _switches(setting),
        "cache": cache_settings(setting),
    }
    source = _source(which, synthetic)
    try:
        model = Model(
            source,
            device,
            ubatch=setting["n_ubatch"],
            context=context,
            **options,
            verbose=(lambda line: print(line, file=sys.stderr)) if verbose else None,
        )
        said = set() if said is None else said
        for flag, why in model_notes(model):
            if (flag, why) not in said:
                note(flag, why)
                said.add((flag, why))
        if model.device.type != "cpu":
            load_on_gpu(model)
        return model
    except BaseException:
        source.close()
        raise


def _source(which: str, synthetic: bool):
    from ...formats.gguf.reader import open_gguf
    from ..bench.synthetic import SyntheticSource

    return SyntheticSource(which) if synthetic else open_gguf(which)


def _placement(setting: dict[str, Any], fit_margin: int | None = None):
    from ..placement import ALL, Request, parse_overrides

    check_layers(setting["n_gpu_layers"], "-ncmoe", setting["n_cpu_moe"])
    layers = setting["n_gpu_layers"]
    overrides = parse_overrides(setting["override_tensor"]) if setting["override_tensor"] else ()
    return Request(
        ALL if layers in (-1, 99) else layers, overrides, setting["n_cpu_moe"], fit_margin
    )


def _switches(setting: dict[str, Any]):
    from ..switches import Switches, parse_ser

    ser = parse_ser(setting["ser"]) if setting["ser"] else None
    return Switches(setting["flash_attn"], setting["attn_max_batch"], ser, setting["muge"])


def _whole_on(model, device) -> bool:
    """Whether all matrices are on the device: else its limits say nothing."""
    return set(model.weights.bytes_by_device()) == {device}


def _facts(device):
    if device.type != "cuda":
        return None
    from ..cuda.device_facts import device_facts

    return device_facts(device)


def _version() -> str:
    from ...version import __version__

    return __version__
