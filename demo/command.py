"""`iqforge demo`: run the whole chain on the embedded model and report what each type costs."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import UsageError, printable
from .text import DEFAULT_CHUNKS, N_CTX


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge demo` to its parser."""
    parser.description = (
        "Convert the embedded model, collect an importance matrix, quantize to several types, split"
        " and merge, and measure each type against the unquantized model. Writes report.html and"
        " chart.svg. Needs no network and takes a minute or two."
    )
    parser.add_argument(
        "--dir",
        default="iqforge-demo",
        metavar="DIR",
        help="folder for all files; files of an earlier demo are replaced (default: iqforge-demo)",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        default=DEFAULT_CHUNKS,
        metavar="N",
        help=(
            f"use at most N chunks of {N_CTX} tokens to calibrate and to measure (default:"
            f" {DEFAULT_CHUNKS})"
        ),
    )


def run(args: argparse.Namespace, api) -> int:
    """Run the chain, write report.html and chart.svg, print the table and return 0. Raise
    UsageError if --chunks is below 1.
    """
    from ..formats.output import PartFile
    from .chain import Chain
    from .figures import text_table
    from .report import html_report, svg_chart

    if args.chunks < 1:
        raise UsageError(f"--chunks is {args.chunks}, expected 1 or more")
    chain = Chain(api, Path(args.dir), args.chunks)
    demo = chain.run()
    print("\n" + text_table(demo))
    print(
        "\nbpw: bits per weight over all tensors. KLD: KL divergence of the predictions from those"
        " of the BF16 model.\nIQ4_K_R4 is IQ4_K with its rows interleaved in groups of four: the"
        " same values in another order, so the same figures."
    )
    report = chain.folder / "report.html"
    for path, text in ((report, html_report(demo)), (chain.folder / "chart.svg", svg_chart(demo))):
        with PartFile(path) as file:
            file.write(text.encode())
    print(f"\ntotal {demo.seconds:.1f} s, report: {printable(report, 400)}")
    return 0
