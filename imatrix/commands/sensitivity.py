"""`iqforge sensitivity`: how much a model suffers from errors in each of its tensors."""

from __future__ import annotations

import argparse
import sys
import time

from ...errors import UsageError, printable
from ...runtime.commands.flags import add_model_flags, open_model


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Store one tensor after another in another type, in memory, and measure the mean KL"
        " divergence of the model's predictions from those of the unchanged model. iqforge quantize"
        " --target-bpw takes the result by --damage."
    )
    add_model_flags(parser)
    parser.set_defaults(chunks=16)
    parser.add_argument(
        "--imatrix",
        metavar="F",
        help="importance matrix, legacy .dat or GGUF: guides the searches and weighs the errors",
    )
    parser.add_argument(
        "-o",
        "--output",
        default="sensitivity.json",
        metavar="OUT",
        help="file to write (sensitivity.json)",
    )
    parser.add_argument(
        "--type",
        metavar="T",
        nargs="+",
        default=[],
        help="types to store tensors in, the first that fits (IQ3_K IQ4_NL)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=1,
        metavar="N",
        help="the same tensor of N layers at a time: quicker, and tells less (1)",
    )


def run(args: argparse.Namespace, api) -> int:
    if not args.file:
        raise UsageError("-f TEXT is needed")
    if args.device != "cpu":
        raise UsageError(f"--device {args.device}: tensors can be replaced on the CPU only")
    started = time.monotonic()

    def show(done: int, count: int, probe) -> None:
        name = probe.tensors[0] + (
            f" and {len(probe.tensors) - 1} more" if len(probe.tensors) > 1 else ""
        )
        print(
            f"[{done:4d}/{count:4d}] {printable(name):>36s}, error = {probe.error:.6f}, KLD ="
            f" {probe.kld:.6f}, sensitivity ="
            f" {probe.kld / probe.error if probe.error else 0.0:.4f}",
            flush=True,
        )
        if done == 1:
            print(
                f"ETA {(time.monotonic() - started) * (count - 1) / 60:.2f} minutes",
                file=sys.stderr,
            )

    with open_model(args) as model:
        probes = api.measure_sensitivity(
            model,
            args.file,
            args.output,
            args.imatrix,
            types=args.type,
            layers=args.layers,
            n_ctx=args.ctx_size,
            chunks=args.chunks,
            threads=args.threads,
            progress=show,
        )
    print(f"{len(probes)} sensitivities written to {printable(args.output)}")
    return 0
