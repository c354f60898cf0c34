"""`iqforge sensitivity`: how much a model suffers from errors in each of its tensors."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from ...errors import UsageError, printable
from ...formats.commands.progress import duration
from ...runtime.commands.flags import (
    add_chunk_flags,
    add_load_flags,
    add_model_flag,
    on_one_device,
    open_model,
)
from ...runtime.commands.watch import watched
from ...runtime.options import LoadOptions
from ..options import SensitivityOptions

if TYPE_CHECKING:
    from ...formats.sensitivities import Probe


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge sensitivity` to its parser."""
    parser.description = (
        "Store one tensor after another in another type, in memory, and measure the mean KL"
        " divergence of the model's predictions from those of the unchanged model. Pass the result"
        " to `iqforge quantize --target-bpw` by --damage."
    )
    add_model_flag(parser)
    add_chunk_flags(parser, chunks=SensitivityOptions().chunks)
    parser.add_argument(
        "--imatrix",
        metavar="F",
        help="importance matrix, .dat or .gguf: guides the searches and weighs the errors",
    )
    parser.add_argument(
        "-o",
        "--output",
        default="sensitivity.json",
        metavar="OUT",
        help="file to write (default: sensitivity.json)",
    )
    parser.add_argument(
        "--type",
        dest="types",
        metavar="T",
        nargs="+",
        default=[],
        help="types to store tensors in, the first that fits (default: IQ3_K IQ4_NL)",
    )
    SensitivityOptions.add_flags(parser, only=("layers", "force"))
    add_load_flags(parser)


def run(args: argparse.Namespace, api) -> int:
    """Measure and print the sensitivities, and return 0. Raise UsageError if the text is
    missing.
    """
    from ...runtime.evaluate.chunks import read_text

    if not args.file:
        raise UsageError("-f TEXT is needed")
    args.precision = args.precision or "f32"
    options = SensitivityOptions.from_flags(args)
    on_one_device(args)
    load = LoadOptions.from_flags(args)
    read_text(args.file)  # an error before the model is loaded
    started = time.monotonic()

    def show(done: int, count: int, probe: Probe) -> None:
        first, *others = probe.tensors
        name = first + (f" and {len(others)} more" if others else "")
        print(
            f"[{done:4d}/{count:4d}] {printable(name):>36s}, error = {probe.error:.6f}, KLD ="
            f" {probe.kld:.6f}, sensitivity ="
            f" {probe.kld / probe.error if probe.error else 0.0:.4f}",
            flush=True,
        )
        if done == 1:
            spent = time.monotonic() - started
            print(f"ETA {duration(spent * (count - 1))}", file=sys.stderr)

    with open_model(args, api) as model:
        n_passes = max(1, -(-options.chunks * options.n_ctx // options.batch_tokens))
        plan = [(min(options.chunks * options.n_ctx, options.batch_tokens), n_passes)]
        with watched(model, "measuring the unchanged model", plan, every=float("inf")):
            probes = api.measure_sensitivity(
                model,
                args.file,
                args.output,
                args.imatrix,
                options=options,
                threads=load.threads,
                progress=show,
            )
    print(f"{len(probes)} sensitivities written to {printable(args.output)}")
    return 0
