"""`iqforge imatrix-coverage`: how many tokens each expert saw."""

from __future__ import annotations

import argparse
import json

from ..options import CoverageOptions


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge imatrix-coverage` to its parser."""
    parser.description = (
        "Count the tokens that each expert of a model saw when an importance matrix was collected."
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help="importance matrix; a .dat file only tells which experts saw nothing",
    )
    CoverageOptions.add_flags(parser)
    parser.add_argument("--json", action="store_true", help="everything as JSON")


def run(args: argparse.Namespace, api) -> int:
    """Print how many tokens each expert saw, as a table or JSON, and return 0."""
    coverage = api.imatrix_coverage(args.file, options=CoverageOptions.from_flags(args))
    if args.json:
        print(json.dumps(coverage.as_dict()))
    elif not coverage.layers:
        print("there are no entries of experts")
    else:
        print("\n".join([*coverage.table(), "", *coverage.summary()]))
    return 0
