"""`iqforge validate`: check that a GGUF file is sound, and compare it with its source."""

from __future__ import annotations

import argparse

from ...formats.commands.progress import Estimate
from ..options import ValidateOptions
from ..report.printing import checked_line
from ..run.report import Checked


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge validate` to its parser."""
    parser.description = (
        "Decode every tensor of FILE (the first shard of a split model): header, sizes and values"
        " are checked, and NaN and infinity are faults. With --against its errors are measured too."
        " Exits with 1 if a tensor is not sound."
    )
    parser.add_argument(
        "model", metavar="FILE", help="a GGUF file; of a split model the first shard"
    )
    parser.add_argument(
        "--against",
        metavar="SOURCE",
        help=(
            "the file or checkpoint folder that FILE was made of: tensors of the same type "
            "must have the same bytes, the errors of the others are printed"
        ),
    )
    parser.add_argument(
        "--imatrix", metavar="F", help="with --against: importance matrix for the weighted errors"
    )
    ValidateOptions.add_flags(parser)


def run(args: argparse.Namespace, api) -> int:
    """Check every tensor and print faults. Return 1 if a tensor is not sound, else 0."""
    estimate = Estimate("validating")

    def show(index: int, count: int, checked: Checked) -> None:
        if args.against is not None or checked.fault:
            print(checked_line(index, count, checked), flush=True)
        estimate.say((index + 1) / count)

    checked = api.validate_model(
        args.model,
        args.against,
        args.imatrix,
        options=ValidateOptions.from_flags(args),
        progress=show,
    )
    faults = sum(bool(one.fault) for one in checked)
    print(f"{len(checked)} tensors, {f'{faults} with a fault' if faults else 'all sound'}")
    return 1 if faults else 0
