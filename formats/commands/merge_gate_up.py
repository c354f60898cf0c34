"""`iqforge merge-gate-up`: merge gate and up of a GGUF file's experts into one tensor per layer, or
split them again.
"""

from __future__ import annotations

import argparse

from ...errors import UsageError, printable
from .progress import ByteProgress


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the GGUF model IN to OUT with ffn_gate_exps and ffn_up_exps of each layer as one"
        " tensor ffn_gate_up_exps. Bytes are moved, nothing is decoded: any type will do,"
        " interleaved ones too, if both halves have the same."
    )
    parser.add_argument(
        "--split-gate-up",
        "--undo",
        dest="undo",
        action="store_true",
        help="split merged tensors again: the inverse, byte for byte",
    )
    parser.add_argument("--part-gate-up", dest="undo", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be done, write nothing; OUT may be left out",
    )
    parser.add_argument("input", metavar="IN", help="a GGUF file; of a split model the first shard")
    parser.add_argument("output", metavar="OUT", nargs="?", help="the file to write")


def run(args: argparse.Namespace, api) -> int:
    from ..tools.gate_up import changed_tensors

    if args.output is None and not args.dry_run:
        raise UsageError("an output file is needed")
    plan = api.merge_gate_up(args.input, args.output, undo=args.undo, dry_run=True)
    total = sum(planned.target.n_bytes for planned in plan)
    for planned in changed_tensors(plan):
        shape = " x ".join(str(size) for size in reversed(planned.target.shape))
        print(
            f"{printable(planned.target.name)}: {shape}, {planned.target.type},"
            f" {planned.target.n_bytes / 1e6:.2f} MB"
        )
    done = (
        f"{len(changed_tensors(plan))} of {len(plan)} tensors {'split' if args.undo else 'merged'}"
    )
    if args.dry_run:
        print(f"{done}, {total / 1e6:.2f} MB would be written")
        return 0
    with ByteProgress("splitting" if args.undo else "merging") as progress:
        progress.begin(total)
        api.merge_gate_up(args.input, args.output, undo=args.undo, progress=progress)
    print(f"{printable(args.output)}: {done}, {total / 1e6:.2f} MB written")
    return 0
