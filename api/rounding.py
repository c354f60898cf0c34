"""Second moments for `quantize_models`: how tensors are rounded with them, and what is recorded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .source import PathLike

if TYPE_CHECKING:
    from ..formats.source import Source
    from ..formats.values import Value
    from ..imatrix.data import Imatrix
    from ..imatrix.moments.file import MomentsFile
    from ..quantize.options import QuantizeOptions, Shards
    from ..quantize.plan.changes import Changes
    from ..quantize.plan.plan import PlannedTensor
    from ..quantize.rounding.choice import RoundingPlan
    from ..quantize.rounding.methods import Rounders
    from ..quantize.rounding.moments import MomentsLookup
    from ..quantize.rounding.tensor_moments import TensorMoments
    from ..quantize.run.piece import ImportanceLookup
    from ..quantize.run.report import RunProgress


def loaded_moments(
    hessian: PathLike | MomentsFile | None, options: QuantizeOptions, calibrated: bool = False
) -> MomentsFile | None:
    """Return the file of second moments that is given, opened. Raise UsageError for options that
    need one, or exclude one. calibrated: moments are collected during the run.
    """
    if hessian is None:
        default = options.refine and options.couple_rows and options.stretch
        chosen = options.hessian_shrink is not None or not default
        if not calibrated and chosen:
            raise UsageError(
                "--hessian-shrink, --no-refine, --no-couple-rows and --no-stretch need second"
                " moments (--hessian or --calibrate)"
            )
        return None
    if options.dry_run and options.estimate:
        raise UsageError("with --hessian, --dry-run gives no estimate: add --no-estimate")
    return opened_moments(hessian)


def check_calibration(
    calibrate: PathLike | Sequence[PathLike] | None,
    hessian: object,
    options: QuantizeOptions,
    shards: Shards,
    n_outputs: int,
) -> None:
    """Raise UsageError for options that exclude calibration texts, or need them."""
    from ..quantize.options import QuantizeOptions

    if calibrate is None:
        if options.sequential:
            raise UsageError("sequential (--sequential) needs texts (--calibrate)")
        default = QuantizeOptions()
        if (options.calibrate_chunks, options.calibrate_ctx) != (
            default.calibrate_chunks,
            default.calibrate_ctx,
        ):
            raise UsageError(
                "calibrate_chunks and calibrate_ctx (--calibrate-chunks, --calibrate-ctx) need"
                " texts (--calibrate)"
            )
        return
    if hessian is not None:
        raise UsageError("second moments (--hessian) and texts (--calibrate) exclude each other")
    if options.dry_run and options.estimate:
        raise UsageError("with --calibrate, --dry-run gives no estimate: add --no-estimate")
    if options.sequential and (n_outputs > 1 or shards.partial):
        raise UsageError(
            "sequential (--sequential) makes one whole output: each has its own rounded layers"
        )


def refuse_read_files(
    outs: Iterable[PathLike | None],
    hessian: PathLike | MomentsFile | None,
    calibrate: PathLike | Sequence[PathLike] | None,
) -> None:
    """Raise OutputError if an output would replace the second moments or texts that are read."""
    from ..formats.output import refuse_same_file

    read = [calibrate] if isinstance(calibrate, (str, os.PathLike)) else list(calibrate or [])
    if hessian is not None:
        read.append(hessian if isinstance(hessian, (str, os.PathLike)) else hessian.path)
    for out in outs:
        if out is not None:
            refuse_same_file(out, read)


def opened_moments(hessian: PathLike | MomentsFile) -> MomentsFile:
    """Return a file of second moments, opened."""
    if not isinstance(hessian, (str, os.PathLike)):
        return hessian
    from ..imatrix.moments.file import load_moments  # imports torch

    return load_moments(hessian)


def rounders_of(devices: Sequence[int]) -> Rounders:
    """Return what rounds rows with second moments: these GPUs, or the CPU."""
    from ..quantize.rounding.methods import ON_CPU

    if not devices:
        return ON_CPU
    from ..quantize.rounding.cuda.rounders import DeviceRounders
    from ..quantize.run.cuda_device import CudaDevice

    return DeviceRounders([CudaDevice(number) for number in devices])


def moments_imatrix(moments: MomentsFile) -> Imatrix:
    """Return the importance matrix that second moments have on their diagonals."""
    from ..imatrix.moments.lookup import imatrix_of

    return imatrix_of(moments)


def moments_lookup(file: MomentsFile, changes: Changes, model: Source) -> MomentsLookup:
    """Return what finds the second moments of a tensor of `model` with `changes`."""
    from ..imatrix.moments.lookup import moments_of

    before = changes.names_before(model)

    def moments(name: str, shape: tuple[int, ...]) -> TensorMoments | None:
        named = before.get(name, name)
        return moments_of(file, named, shape) if changes.uses_entry(named) else None

    return moments


def rounding_plans(
    file: MomentsFile,
    changes: Changes,
    model: Source,
    source: Source,
    plans: Sequence[Sequence[PlannedTensor]],
    lookups: Sequence[ImportanceLookup | None],
    options: QuantizeOptions,
    progress: Sequence[RunProgress],
    rounders: Rounders,
) -> list[RoundingPlan]:
    """Return how the tensors of each plan are rounded. source: `model` with `changes`; rounders:
    where rows are rounded.
    """
    from ..quantize.rounding.choice import plan_rounding
    from ..quantize.rounding.rows import RowMetrics
    from ..quantize.run.parallel import thread_count

    rows = RowMetrics(source) if options.couple_rows else None
    moments = moments_lookup(file, changes, model)
    made = []
    for planned, lookup, shown in zip(plans, lookups, progress, strict=True):
        plan = plan_rounding(
            source,
            planned,
            moments,
            lookup,
            shrink=options.hessian_shrink,
            refine=options.refine,
            threads=thread_count(options.threads),
            progress=shown.choosing,
            rounders=rounders,
            one_text=len(file.texts) == 1,
            rows=rows,
            stretch=options.stretch,
        )
        shown.rounding_chosen(plan.choices)
        made.append(plan)
    return made


def rounding_text(plan: RoundingPlan) -> str:
    """Return JSON of how each role is rounded: shrink (null for a search), refinements, "rows"
    where rows are rounded together, and what scales are multiplied by in the end, if not 1.
    """
    said = []
    for one in plan.choices:
        more = [*["rows"] * one.coupled, *[one.stretch] * (one.stretch != 1)]
        said.append([one.role, one.type, one.shrink, one.passes, *more])
    return json.dumps(said)


def rounding_provenance(file: MomentsFile, plan: RoundingPlan) -> dict[str, Value]:
    """Return the metadata keys that record second moments."""
    from ..quantize.run.provenance import file_sha256, rounding_keys

    return rounding_keys(file_sha256(file.path), file.texts, rounding_text(plan))


def calibration_provenance(
    texts: Sequence[Sequence[Any]], options: QuantizeOptions
) -> dict[str, Value]:
    """Return the metadata keys that record calibration texts, as `Calibration.texts`, and how
    rounding was chosen.
    """
    from ..quantize.run.provenance import calibration_keys

    settings = {
        "n_ctx": options.calibrate_ctx,
        "shrink": options.hessian_shrink,
        "refine": options.refine,
        "couple_rows": options.couple_rows,
        "stretch": options.stretch,
    }
    if options.sequential:
        settings["sequential"] = True
    return calibration_keys(texts, settings)
