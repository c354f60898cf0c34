"""`iqforge gguf-split`: split a GGUF model into shards, or merge them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
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
    _add(
        limit,
        "--split-max-tensors",
        metavar="N",
        type=int,
        help="most tensors per shard (default: 128)",
    )
    _add(
        limit,
        "--split-max-size",
        metavar="N(M|G)",
        help="most bytes of tensor data per shard, in units of 10^6 or 10^9 bytes",
    )
    _add(
        parser,
        "--no-tensor-first-split",
        action="store_true",
        help="put metadata alone into the first shard",
    )
    _add(
        parser, "--dry-run", action="store_true", help="print what would be written, write nothing"
    )
    _add(
        parser,
        "--delete-splits",
        action="store_true",
        help="with --merge: remove the shards when OUT is complete",
    )
    parser.add_argument("input", metavar="IN", help="a GGUF file; for --merge the first shard")
    parser.add_argument(
        "output",
        metavar="OUT",
        help="the prefix of the shards' names; for --merge the file to write",
    )


def _add(group, flag: str, help: str, **options) -> None:
    """A flag that is also accepted with underscores, as the reference does."""
    group.add_argument(flag, help=help, **options)
    group.add_argument(
        "--" + flag[2:].replace("-", "_"),
        help=argparse.SUPPRESS,
        **(options | {"default": argparse.SUPPRESS}),
    )


def run(args: argparse.Namespace, api) -> int:
    if args.delete_splits and not args.merge:
        raise UsageError("--delete-splits goes with --merge: splitting has no shards to remove")
    return _merge(args) if args.merge else _split(args)


def _split(args: argparse.Namespace) -> int:
    from ..gguf.reader import open_gguf
    from ..tools.split import plan_split, write_split

    with open_gguf(args.input) as source:
        plan = plan_split(
            source,
            args.output,
            max_tensors=args.split_max_tensors,
            max_size=args.split_max_size,
            first_shard_metadata_only=args.no_tensor_first_split,
        )
        print(f"n_split: {len(plan)}")
        for index, shard in enumerate(plan):
            total = shard.tensor_bytes + shard.header_bytes(
                source.metadata, index, len(plan), len(source.tensors)
            )
            print(
                f"split {index + 1:05d}: n_tensors = {len(shard.tensors)}, total_size ="
                f" {total // 10**6}M"
            )
        if args.dry_run:
            return 0
        with _progress(sum(shard.tensor_bytes for shard in plan)) as progress:
            paths = write_split(source, plan, progress)
        for path in paths:
            print(f"Writing file {path} ... done")
        print(f"{len(paths)} shards written with a total of {len(source.tensors)} tensors")
    return 0


def _merge(args: argparse.Namespace) -> int:
    from ..tools.split import check_merge_output, merge_model, open_shards

    check_merge_output(Path(args.output))
    with open_shards(args.input) as source:
        n_shards, n_tensors = len(source.shards), len(source.tensors)
        total = sum(tensor.n_bytes for tensor in source.tensors)
        print(f"n_split: {n_shards}, n_tensors = {n_tensors}, total_size = {total // 10**6}M")
    if not args.dry_run:
        with _progress(total) as progress:
            path = merge_model(
                args.input, args.output, delete_shards=args.delete_splits, progress=progress
            )
        print(f"Writing file {path} ... done")
        print(f"{n_shards} shards merged with a total of {n_tensors} tensors")
    return 0


@contextmanager
def _progress(n_bytes: int) -> Iterator:
    """A progress bar on stderr where that is a terminal."""
    from tqdm import tqdm

    with tqdm(total=n_bytes, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        yield bar.update
