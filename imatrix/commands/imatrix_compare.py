"""`iqforge imatrix-compare`: how far two importance matrices of the same model are apart."""

from __future__ import annotations

import argparse
import json


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge imatrix-compare` to its parser."""
    parser.description = (
        "Compare two importance matrices of the same model, .dat or .gguf: cosine of the mean"
        " squared inputs per tensor, for experts the lowest and the mean one, and the relative"
        " difference. The worst come first."
    )
    parser.add_argument("a", metavar="A", help="an importance matrix, .dat or GGUF")
    parser.add_argument("b", metavar="B", help="the importance matrix to compare it with")
    parser.add_argument(
        "--limit", type=int, default=0, metavar="N", help="only the N worst tensors"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(args: argparse.Namespace, api) -> int:
    """Print the comparison as a table or JSON, and return 0."""
    from ..compare import comparison_lines

    comparison = api.compare_imatrices(args.a, args.b)
    print(
        json.dumps(comparison.as_dict(), indent=1)
        if args.json
        else "\n".join(comparison_lines(comparison, args.limit))
    )
    return 0
