"""Options of quantizing: how a run is carried out, how its outputs are divided into files, and the
size that types are chosen for. `plan.recipe` has the options for types, `plan.changes` those for
other changes. Imports nothing heavy.
"""

# ruff: noqa: RUF009  `option` makes dataclass fields

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..formats.flags import Constant
from ..formats.options import Options, option
from ..formats.shared_options import (
    devices_option,
    dry_run_option,
    force_option,
    threads_option,
)


@dataclass(frozen=True)
class QuantizeOptions(Options):
    """Options for quantizing models; see `iqforge.quantize_models`."""

    nan_to_zero: bool = option(
        False,
        "--nan-to-zero",
        help="replace NaN and infinities in the source by 0 instead of failing",
    )
    threads: int = threads_option("threads, as NTHREADS (default: all cores)")
    dry_run: bool = option(
        False,
        "--dry-run",
        help="print the plan, the sizes, and an estimate of time, memory and space from a trial on"
        " some rows; write nothing",
    )
    estimate: bool = option(
        False,
        "--no-estimate",
        off=True,
        help="with --dry-run: print only the plan and the sizes, without a trial",
    )
    device: str = devices_option(
        "the bytes are the same, except for trellis types, IQ1_KT to IQ4_KT"
    )
    provenance: bool = option(
        True,
        "--no-provenance",
        off=True,
        help="do not store the keys that say which version made the file from which weights, recipe"
        " and importance matrix",
    )
    save_plan: str | os.PathLike | None = option(
        None,
        "--save-plan",
        metavar="F",
        help="write the type of every tensor, and the reason, as JSON",
    )
    restart: bool = option(
        False, "--restart", help="start from scratch instead of resuming an interrupted run"
    )
    gate_up: str | None = option(
        None,
        constants=(
            Constant(
                ("--merge-gate-up",),
                "merge",
                "write gate and up of experts as one tensor, ffn_gate_up_exps",
            ),
            Constant(
                ("--split-gate-up",),
                "split",
                "write ffn_gate_up_exps as two tensors, gate and up",
            ),
            Constant(("--part-gate-up",), "split", "", hidden=True),
        ),
    )
    hessian_shrink: float | None = option(
        None,
        "--hessian-shrink",
        kind=float,
        metavar="X",
        help="with --hessian or --calibrate: shrink correlations by X, 0 to 1 (default: chosen by"
        " held-out text for each role, or for each tensor)",
    )
    refine: bool = option(
        True,
        "--no-refine",
        off=True,
        help="with --hessian or --calibrate: only feed errors back, and do not refine codes and"
        " scales",
    )
    couple_rows: bool = option(
        True,
        "--no-couple-rows",
        off=True,
        help="with --hessian or --calibrate: round every row on its own, also where rows of a"
        " matrix can keep errors out of what later matrices read",
    )
    stretch: bool = option(
        True,
        "--no-stretch",
        off=True,
        help="with --hessian or --calibrate: leave scales as they are in the end (default: multiply"
        " them by a little more than 1, as rounded rows are shorter than the rows they stand for)",
    )
    sequential: bool = option(
        False,
        "--sequential",
        help="with --calibrate: collect what a layer reads after the layers before it were rounded,"
        " and round to weights that make up for their errors (collects in float32, three times as"
        " many passes)",
    )
    calibrate_chunks: int = option(
        512,
        "--calibrate-chunks",
        least=0,
        metavar="N",
        help="with --calibrate: use at most N chunks of all texts together, at least two of"
        " each (default: 512; 0: all)",
    )
    calibrate_ctx: int = option(
        512,
        "--calibrate-ctx",
        least=4,
        metavar="N",
        help="with --calibrate: tokens of a chunk (default: 512)",
    )
    validate: bool = option(
        False,
        "--validate",
        help="read every output back before it is renamed, and check its values and the reported"
        " errors",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hessian_shrink is not None and not 0 <= self.hessian_shrink <= 1:
            raise UsageError(
                f"hessian_shrink (--hessian-shrink) is {self.hessian_shrink:g}, expected 0 to 1"
            )


@dataclass(frozen=True)
class Shards(Options):
    """Options for dividing an output into files. keep_split: put every tensor into the shard that
    has it in the source, and add `-0000i-of-0000N.gguf` to the output's name without `.gguf`.
    max_size, max_tensors: write shards of at most this many bytes (`300M`, `2G`) or tensors, as
    conversion does. partial: keep files of the output that already exist, and write only the
    others.
    """

    keep_split: bool = option(False, "--keep-split", help="write the same shards as IN has")
    partial: bool = option(
        False,
        "--partial-requant",
        help="keep shards of the output (with --keep-split), or outputs, that already exist",
    )
    max_size: str | int | None = option(
        None,
        "--split-max-size",
        metavar="N",
        help="split the output into shards of at most N bytes: 300M, 2G",
    )
    max_tensors: int | None = option(
        None,
        "--split-max-tensors",
        kind=int,
        metavar="N",
        help="split the output into shards of at most N tensors",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_split and (self.max_size is not None or self.max_tensors is not None):
            raise UsageError(
                "shards are either as the source has them (--keep-split) or of a size that is"
                " given (--split-max-size, --split-max-tensors), not both"
            )


@dataclass(frozen=True)
class TargetOptions(Options):
    """The size that types are chosen for; see `iqforge.recipe_for_target`."""

    bpw: float | None = option(
        None,
        "--target-bpw",
        kind=float,
        metavar="X",
        help="choose the types that lose least at X bits per weight of all tensor data; tensors"
        " whose type is fixed by other flags count too",
    )
    size: str | int | None = option(
        None,
        "--target-size",
        metavar="SIZE",
        help="choose types for a file of at most 12G (10^9 bytes), 11.5GiB, ..",
    )
    types: Sequence[str] = option(
        (),
        "--target-types",
        kind=str,
        many=True,
        commas=True,
        metavar="T,..",
        help="types to choose from (default: most plain types)",
    )
    damage: str | os.PathLike | None = option(
        None,
        "--damage",
        metavar="F",
        help="how much each tensor matters, as measured by iqforge sensitivity (default: by role)",
    )


@dataclass(frozen=True)
class RepackOptions(Options):
    """Options for interleaving tensors, or undoing it; see `iqforge.repack_model`."""

    pattern: str | Sequence[str] = option(
        (),
        "--pattern",
        kind=str,
        many=True,
        one_text=True,
        metavar="REGEX",
        help="only tensors whose name matches; may be repeated",
    )
    undo: bool = option(
        False, "--undo", help="interleaved tensors to plain form: the inverse, byte for byte"
    )
    dry_run: bool = dry_run_option(
        "print what would be done and the sizes, write nothing; OUT may be left out"
    )
    threads: int = threads_option()


@dataclass(frozen=True)
class StatsOptions(Options):
    """Options for measuring what quantizing would lose; see `iqforge.quantize_stats`."""

    force: bool = force_option()
    include: Sequence[str] = option(
        (),
        "--include",
        kind=str,
        many=True,
        several=True,
        metavar="REGEX",
        help="only tensors whose name matches",
    )
    rows: int = option(
        0,
        "--rows",
        metavar="N",
        help="measure about N evenly spaced rows of each tensor, for a quick look (default: all)",
    )
    device: str = devices_option("errors agree to six digits, except for trellis types")
    threads: int = threads_option()


@dataclass(frozen=True)
class WarmUpOptions(Options):
    """How code is compiled ahead; see `iqforge.warm_up`."""

    processes: int = option(
        0,
        "-j",
        "--jobs",
        metavar="N",
        help="processes that compile (default: one per core, at most 8)",
    )


@dataclass(frozen=True)
class ValidateOptions(Options):
    """Options for reading a file back; see `iqforge.validate_model`."""

    force: bool = force_option()
    threads: int = threads_option()
