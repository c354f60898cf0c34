"""`iqforge imatrix-convert`: convert an importance matrix file to the other layout."""

from __future__ import annotations

import argparse

from ...errors import printable


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write an importance matrix, .dat or .gguf, in the other layout."
    parser.add_argument("input", metavar="IN", help="an importance matrix, .dat or GGUF")
    parser.add_argument("output", metavar="OUT", help="the file to write")
    parser.add_argument(
        "--output-format",
        choices=("dat", "gguf"),
        help="layout of OUT (default: gguf if it ends in .gguf, else dat)",
    )
    parser.add_argument(
        "--chunk-size",
        type=int,
        metavar="N",
        help="tokens of a call, which is what a .dat file counts (default: 512)",
    )


def run(args: argparse.Namespace, api) -> int:
    imatrix = api.convert_imatrix(
        args.input, args.output, args.output_format, chunk_size=args.chunk_size
    )
    size = "" if imatrix.counts_calls else f" of {imatrix.chunk_size} tokens"
    print(
        f"{len(imatrix.entries)} entries from {imatrix.chunk_count} chunks{size} written to"
        f" {printable(args.output, 400)}"
    )
    return 0
