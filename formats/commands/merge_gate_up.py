"""`iqforge merge-gate-up`: merge gate and up of a GGUF file's experts into one tensor per layer, or
split them again.
"""

from __future__ import annotations

import argparse

from ...errors import UsageError, printable
from ..tools.options import GateUpOptions
from .progress import Meter


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge merge-gate-up` to its parser."""
    parser.description = (
        "Write the GGUF model IN to OUT with ffn_gate_exps and ffn_up_exps of each layer as one"
        " tensor ffn_gate_up_exps. Bytes are moved and nothing is decoded, so all types work,"
        " also interleaved ones, if both halves have the same type."
    )
    GateUpOptions.add_flags(parser)
    parser.add_argument("input", metavar="IN", help="a GGUF file; of a split model the first shard")
    parser.add_argument("output", metavar="OUT", nargs="?", help="the file to write")


def run(args: argparse.Namespace, api) -> int:
    """Print the tensors that change, write the file unless --dry-run, and return 0. Raise
    UsageError if there is no output file.
    """
    from ..tools.gate_up import changed_tensors

    options = GateUpOptions.from_flags(args)
    if args.output is None and not options.dry_run:
        raise UsageError("an output file is needed")
    plan = api.merge_gate_up(args.input, args.output, options=options, dry_run=True)
    total = sum(planned.target.n_bytes for planned in plan)
    for planned in changed_tensors(plan):
        shape = " x ".join(str(size) for size in reversed(planned.target.shape))
        print(
            f"{printable(planned.target.name)}: {shape}, {planned.target.type},"
            f" {planned.target.n_bytes / 1e6:.2f} MB"
        )
    verb = "split" if options.undo else "merged"
    done = f"{len(changed_tensors(plan))} of {len(plan)} tensors {verb}"
    if options.dry_run:
        print(f"{done}, {total / 1e6:.2f} MB would be written")
        return 0
    with Meter("splitting" if options.undo else "merging") as progress:
        progress.begin(total)
        api.merge_gate_up(args.input, args.output, options=options, progress=progress)
    print(f"{printable(args.output)}: {done}, {total / 1e6:.2f} MB written")
    return 0
