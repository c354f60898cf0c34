"""`iqforge imatrix-convert`: convert an importance matrix file to the other layout."""

from __future__ import annotations

import argparse

from ...errors import printable
from ..options import ConvertFileOptions


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge imatrix-convert` to its parser."""
    parser.description = "Write an importance matrix, .dat or .gguf, in the other layout."
    parser.add_argument("input", metavar="IN", help="an importance matrix, .dat or GGUF")
    parser.add_argument("output", metavar="OUT", help="the file to write")
    ConvertFileOptions.add_flags(parser)


def run(args: argparse.Namespace, api) -> int:
    """Write the file in the other layout, print how much it holds, and return 0."""
    options = ConvertFileOptions.from_flags(args)
    imatrix = api.convert_imatrix(args.input, args.output, options=options)
    print(f"{imatrix.contents} written to {printable(args.output, 400)}")
    return 0
