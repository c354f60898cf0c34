"""The measurements of `iqforge bench`: every test of one model under every setting."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ....errors import printable
from ...bench.options import BenchOptions
from ..watch import Runs, passes, watched
from .flags import OPTIONS
from .settings import cache_settings, open_model

if TYPE_CHECKING:
    import torch

    from ...bench.bench import Result, Test
    from ...cuda.common.device_facts import DeviceFacts
    from ...model import Model


def measured(
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

    from ....version import __version__
    from ...bench.record import record
    from ..flags import NO_SCORES

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
                plan = planned_passes(one, test, opened.ubatch)
                with watched(opened, what, plan) if args.output_err == "none" else _only_results():
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


@contextmanager
def _only_results() -> Iterator[None]:
    """Let nothing on stderr come between results, such as what is compiled or how far a test is:
    a program may read them there. Warnings do.
    """
    logger = logging.getLogger("iqforge")
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)


def _say(what: str, line: str) -> None:
    print(f"{what}: {line}", file=sys.stderr)


def planned_passes(options: BenchOptions, test: Test, ubatch: int) -> Runs:
    """Return the passes of a test on the CPU, in order."""
    prompt = passes(test.n_prompt, ubatch)
    warm = [*prompt, (1, min(test.n_gen, 4))] if options.warmup else []
    before = passes(test.depth + test.before, ubatch)
    return [*warm, *before, *[*prompt, (1, test.n_gen)] * min(options.repetitions, 1000)]


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
