"""`iqforge gguf-split`: split a GGUF model into shards, or merge them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ...errors import UsageError
from ..tools.options import MergeShardsOptions, SplitOptions
from .progress import Meter, count_of

if TYPE_CHECKING:
    from ..gguf.reader import GGUFFile
    from ..tools.split import Shard


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge gguf-split` to its parser."""
    parser.description = (
        "Split a GGUF model into shards PREFIX-00001-of-0000N.gguf, or merge shards into one file."
    )
    operation = parser.add_mutually_exclusive_group()
    operation.add_argument(
        "--split",
        action="store_true",
        help="split IN into shards named after the prefix OUT (the default)",
    )
    operation.add_argument(
        "--merge",
        action="store_true",
        help="merge the shards of which IN is the first into the new file OUT",
    )
    limit = parser.add_mutually_exclusive_group()
    SplitOptions.add_flags(limit, only=("max_tensors", "max_size"))
    SplitOptions.add_flags(parser, only=("first_shard_metadata_only", "dry_run"))
    MergeShardsOptions.add_flags(parser, only=("delete_shards",))
    parser.add_argument("input", metavar="IN", help="a GGUF file; for --merge the first shard")
    parser.add_argument(
        "output",
        metavar="OUT",
        help="the prefix of the shards' names; for --merge the file to write",
    )


def run(args: argparse.Namespace, api) -> int:
    """Split or merge, and return 0. Raise UsageError for --delete-splits without --merge."""
    if args.delete_shards and not args.merge:
        raise UsageError("--delete-splits goes with --merge: splitting has no shards to remove")
    return _merge(args, api) if args.merge else _split(args, api)


def _split(args: argparse.Namespace, api) -> int:
    n_tensors, options = 0, SplitOptions.from_flags(args)

    def show(source: GGUFFile, plan: list[Shard]) -> None:
        nonlocal n_tensors
        n_tensors = len(source.tensors)
        print(f"n_split: {len(plan)}")
        for index, shard in enumerate(plan):
            header = shard.header_bytes(source.metadata, index, len(plan), n_tensors)
            total = shard.tensor_bytes + header
            print(
                f"split {index + 1:05d}: n_tensors = {len(shard.tensors)}, total_size ="
                f" {total // 10**6}M"
            )
        progress.begin(sum(shard.tensor_bytes for shard in plan))

    with Meter("splitting") as progress:
        paths = api.split_model(
            args.input,
            args.output,
            options=options,
            progress=progress,
            on_plan=show,
        )
    if not options.dry_run:
        for path in paths:
            print(f"Writing file {path} ... done")
        print(f"{count_of(len(paths), 'shard')} written with a total of {n_tensors} tensors")
    return 0


def _merge(args: argparse.Namespace, api) -> int:
    n_shards = n_tensors = 0
    options = MergeShardsOptions.from_flags(args)

    def show(source: GGUFFile) -> None:
        nonlocal n_shards, n_tensors
        n_shards, n_tensors = len(source.shards), len(source.tensors)
        total = sum(tensor.n_bytes for tensor in source.tensors)
        print(f"n_split: {n_shards}, n_tensors = {n_tensors}, total_size = {total // 10**6}M")
        progress.begin(total)

    with Meter("merging") as progress:
        path = api.merge_model(
            args.input,
            args.output,
            options=options,
            progress=progress,
            on_plan=show,
        )
    if not options.dry_run:
        print(f"Writing file {path} ... done")
        print(f"{n_shards} shards merged with a total of {n_tensors} tensors")
    return 0
