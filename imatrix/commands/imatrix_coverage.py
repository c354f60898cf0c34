"""`iqforge imatrix-coverage`: how many tokens each expert saw."""

from __future__ import annotations

import argparse
import json

from ...errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Count the tokens that each expert of a model saw when an importance matrix was collected."
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help="importance matrix; a .dat file only tells which experts saw nothing",
    )
    parser.add_argument(
        "--min-tokens", type=int, metavar="N", help="experts that saw fewer are cold (default: 128)"
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON")


def run(args: argparse.Namespace, api) -> int:
    from ..coverage import DEFAULT_LEAST

    if args.min_tokens is not None and args.min_tokens < 0:
        raise UsageError(f"--min-tokens is {args.min_tokens}, expected 0 or more")
    coverage = api.imatrix_coverage(
        args.file, DEFAULT_LEAST if args.min_tokens is None else args.min_tokens
    )
    if args.json:
        print(json.dumps(coverage.as_dict()))
    elif not coverage.layers:
        print("there are no entries of experts")
    else:
        print("\n".join([*coverage.table(), "", *coverage.summary()]))
    return 0
