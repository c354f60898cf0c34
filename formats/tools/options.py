"""Options of what turns GGUF files into GGUF files. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from ..options import Options, option
from ..shared_options import dry_run_option


@dataclass(frozen=True)
class SplitOptions(Options):
    """Options for splitting a model into shards; see `split.plan_split`."""

    max_tensors: int | None = option(
        None,
        "--split-max-tensors",
        kind=int,
        metavar="N",
        aliases=("--split_max_tensors",),
        help="most tensors per shard (default: 128)",
    )
    max_size: str | int | None = option(
        None,
        "--split-max-size",
        metavar="N(M|G)",
        aliases=("--split_max_size",),
        help="most bytes of tensor data per shard, in units of 10^6 or 10^9 bytes",
    )
    first_shard_metadata_only: bool = option(
        False,
        "--no-tensor-first-split",
        aliases=("--no_tensor_first_split",),
        help="put metadata alone into the first shard",
    )
    dry_run: bool = dry_run_option(aliases=("--dry_run",))


@dataclass(frozen=True)
class MergeShardsOptions(Options):
    """Options for merging shards into one file; see `split.merge_model`."""

    delete_shards: bool = option(
        False,
        "--delete-splits",
        aliases=("--delete_splits",),
        help="with --merge: remove the shards when OUT is complete",
    )
    dry_run: bool = dry_run_option(aliases=("--dry_run",))


@dataclass(frozen=True)
class GateUpOptions(Options):
    """Options for merging gate and up of experts, or splitting them; see
    `gate_up.merge_gate_up`.
    """

    undo: bool = option(
        False,
        "--split-gate-up",
        "--undo",
        aliases=("--part-gate-up",),
        help="split merged tensors again: the inverse, byte for byte",
    )
    dry_run: bool = dry_run_option("print what would be done, write nothing; OUT may be left out")
