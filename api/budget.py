"""Choose types for a given size."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..quantize.searches import encodable_types
from ..version import __version__
from .devices import devices_to_measure
from .plan import plan_quantization
from .rounding import moments_imatrix, moments_lookup, opened_moments, rounders_of
from .source import (
    PathLike,
    changed_imatrix,
    imatrix_note,
    loaded_imatrix,
    open_source,
    preset_recipe,
    selected_imatrix,
    split_recipe,
)

if TYPE_CHECKING:
    from ..formats.source import Source
    from ..formats.types import GGMLType
    from ..formats.values import Value
    from ..imatrix.data import Imatrix
    from ..imatrix.moments.file import MomentsFile
    from ..quantize.options import TargetOptions
    from ..quantize.plan.budget import Fitted
    from ..quantize.plan.changes import Changes
    from ..quantize.plan.plan import PlannedTensor
    from ..quantize.plan.recipe import Recipe
    from ..quantize.plan.sensitivity import Sensitivities
    from ..quantize.plan.size_target import SizeTarget
    from ..quantize.plan.type_errors import TensorStats
    from ..quantize.report.stats import StatsProgress
    from ..quantize.rounding.moments import MomentsLookup
    from ..quantize.rounding.proxy import RoundedErrors
    from ..quantize.run.piece import ImportanceLookup

# Elements that a core searches, rounds and refines once per second, about.
_TRIED_PER_SECOND = 7e4

log = logging.getLogger(__name__)


def recipe_for_target(
    src: PathLike,
    imatrix: PathLike | Imatrix | None = None,
    *,
    hessian: PathLike | MomentsFile | None = None,
    hessian_shrink: float | None = None,
    refine: bool = True,
    target: TargetOptions | None = None,
    changes: Changes | None = None,
    threads: int = 0,
    device: str = "cpu",
    provenance: bool = True,
    progress: StatsProgress | None = None,
    **keywords: Any,
) -> Fitted:
    """Choose types that bring a GGUF file, or a checkpoint folder, to a size with the least
    predicted damage.

    bpw: bits per weight of all tensor data; or size: bytes of the whole file, or a text like `12G`.
    types: types to choose from, by default `quantize.plan.budget.DEFAULT_TYPES`. damage: a file
    that `measure_sensitivity` wrote; without one, tensors count by their roles. These are fields of
    `quantize.options.TargetOptions`; keywords win over `target`. Other keywords are fields of
    `quantize.plan.recipe.Recipe` besides its type; tensors whose types they set count against the
    budget.

    hessian: second moments, or their file, if the model will be rounded with them; their diagonal
    is the importance matrix if none is given. Errors are then those that rounding leaves on
    held-out text: see `quantize.rounding.proxy`. hessian_shrink, refine: as for `quantize_models`.

    Errors of all types are estimated on rows of every tensor; nothing is written. device: where, as
    for `quantize_stats`; errors on GPUs agree with the CPU's to about six digits, so that types can
    differ where two choices are as close as that. `quantize_model` takes the result's `recipe`,
    with the same imatrix, changes and provenance. Raise UsageError for a target that cannot be
    reached, naming the smallest that can.
    """
    from ..formats.gguf.writer import FileLayout
    from ..quantize.options import TargetOptions
    from ..quantize.plan.budget import DRAFT, chosen_types, fit_types, fitted_targets
    from ..quantize.plan.changes import Changes
    from ..quantize.plan.size_target import SizeTarget, parse_size

    o, of_recipe = split_recipe(recipe_for_target, keywords, TargetOptions, target)
    n_bytes = None if o.size is None else parse_size(o.size)
    measured = None if o.damage is None else os.fspath(o.damage)
    aim = SizeTarget(o.bpw, n_bytes, tuple(o.types), measured)
    moments = None if hessian is None else opened_moments(hessian)
    if imatrix is None and moments is not None:
        imatrix = moments_imatrix(moments)
    loaded, changes = loaded_imatrix(imatrix), changes or Changes()
    if changes.prune_layers and o.damage is not None:
        raise UsageError(
            "sensitivities were measured with all layers: leave them out first, and measure then",
            file=o.damage,
        )
    with open_source(src) as model:
        recipe = preset_recipe(DRAFT, of_recipe, recipe_for_target)
        source = changes.apply(model, recipe.rules)
        used = changed_imatrix(loaded, changes, model, source)
        draft = plan_quantization(
            source, replace(changes.recipe(recipe), ignore_imatrix_rules=True), used
        )
        n_elements = sum(plan.target.n_elements for plan in draft)
        most = math.floor((aim.bpw or 0) * n_elements / 8) if n_bytes is None else n_bytes
        stats, devices = _errors(source, draft, aim, most, used, threads, device, progress)
        sensitivities = _sensitivities(source, draft, aim)
        rounded = None
        if moments is not None:
            rounded = _rounded_errors(
                source,
                stats,
                moments_lookup(moments, changes, model),
                None if used is None else used.importance,
                hessian_shrink,
                refine,
                threads,
                devices,
                progress,
            )

        def fit(budget: int) -> Fitted:
            found = stats
            if rounded is not None:
                found = rounded.for_choice(
                    lambda errors: chosen_types(draft, errors, sensitivities, budget)
                )
            return fit_types(recipe, draft, found, sensitivities, budget)

        if n_bytes is None:
            return fit(most)
        # The bytes of metadata depend slightly on the types, so a second round may be needed.
        overhead = 0
        while True:
            fitted = fit(most - overhead)
            metadata = _metadata(
                model,
                source,
                fitted.recipe,
                draft,
                selected_imatrix(loaded, changes),
                changes,
                provenance,
            )
            over = FileLayout("", metadata, fitted_targets(fitted, draft)).n_bytes - most
            if over <= 0:
                return fitted
            overhead += over


def _sensitivities(
    source: Source, draft: Sequence[PlannedTensor], target: SizeTarget
) -> Sensitivities:
    from ..quantize.plan.budget import is_free
    from ..quantize.plan.roles import ModelFacts
    from ..quantize.plan.sensitivity import Sensitivities

    free, facts = (
        [plan.source for plan in draft if is_free(plan)],
        ModelFacts.of(source.metadata, source.tensors),
    )
    return (
        Sensitivities.of_roles(free, facts)
        if target.damage is None
        else Sensitivities.load(target.damage, free, facts)
    )


def _errors(
    source: Source,
    draft: Sequence[PlannedTensor],
    target: SizeTarget,
    most: int,
    imatrix: Imatrix | None,
    threads: int,
    device: str,
    progress: StatsProgress | None,
) -> tuple[list[TensorStats], tuple[int, ...]]:
    """Return the errors of the candidates of each free tensor, measured for tensors with the same
    candidates together, and the GPUs that measured them. Raise UsageError before anything is
    measured or compiled if the smallest candidates take more than `most` bytes.
    """
    from ..quantize.cuda.devices import find_devices
    from ..quantize.plan.budget import (
        SAMPLED_ROWS,
        allowed_types,
        candidates,
        is_free,
        refuse_less,
    )
    from ..quantize.report.stats import StatsReport, collect_stats

    tensors = [plan.source for plan in draft if is_free(plan)]
    types, groups = allowed_types(target.types, encodable_types()), {}
    for tensor in tensors:
        weighted = imatrix is not None and imatrix.entry(tensor.name, tensor.shape) is not None
        groups.setdefault(
            tuple(candidates(tensor, weighted, types, bool(target.types))), []
        ).append(tensor)
    least = sum(plan.target.n_bytes for plan in draft if not is_free(plan)) + sum(
        min(tensor.with_type(type).n_bytes for type in own_types)
        for own_types, own in groups.items()
        for tensor in own
    )
    devices = (
        devices_to_measure([(own, own_types) for own_types, own in groups.items()], SAMPLED_ROWS)
        if device == "auto"
        else find_devices(device)
    )
    refuse_less(draft, least, most)
    found = {}
    for own_types, own in groups.items():
        report = StatsReport(os.fspath(source.path), list(own_types), SAMPLED_ROWS)
        collect_stats(
            source,
            own,
            own_types,
            report,
            importance=None if imatrix is None else imatrix.importance,
            threads=threads,
            devices=devices,
            progress=progress,
        )
        found |= {stats.tensor.name: stats for stats in report.tensors}
    return [found[tensor.name] for tensor in tensors], tuple(devices)


def _rounded_errors(
    source: Source,
    stats: Sequence[TensorStats],
    moments: MomentsLookup,
    importance: ImportanceLookup | None,
    shrink: float | None,
    refine: bool,
    threads: int,
    devices: Sequence[int],
    progress: StatsProgress | None,
) -> RoundedErrors:
    """Return the errors that rounding leaves, found on these GPUs, or on the CPU."""
    from ..quantize.report.stats import StatsProgress
    from ..quantize.rounding.proxy import RoundedErrors
    from ..quantize.run.compilation import compile_ahead, tasks_of_rounding
    from ..quantize.run.parallel import thread_count

    shown = progress or StatsProgress()

    def announce(types: Sequence[GGMLType], n_elements: int) -> None:
        seconds = n_elements / (_TRIED_PER_SECOND * thread_count(threads))
        about = "" if devices else f" (about {max(1.0, seconds):.0f} s)"
        log.info("rounding on trial, to choose types%s: %s", about, ", ".join(map(str, types)))
        if not devices:
            tasks = tasks_of_rounding(types)
            compile_ahead([task for task in tasks if task.kind == "decode"], shown)
            compile_ahead(tasks, shown)

    return RoundedErrors(
        source,
        stats,
        moments,
        importance,
        shrink=shrink,
        refine=refine,
        threads=thread_count(threads),
        rounders=rounders_of(devices),
        announce=announce,
        begin=partial(shown.begin, ()),
        advance=shown.advance,
    )


def _metadata(
    model: Source,
    source: Source,
    recipe: Recipe,
    draft: Sequence[PlannedTensor],
    imatrix: Imatrix | None,
    changes: Changes,
    provenance: bool,
) -> dict[str, Value]:
    """Return the keys that `quantize_model` will write; any fingerprint has the same length."""
    from ..quantize.plan.metadata import quantized_metadata
    from ..quantize.run.provenance import provenance_keys, with_provenance

    note = imatrix_note(imatrix, provenance, changes.hide_imatrix)
    keys = quantized_metadata(
        changes.metadata(model, source),
        recipe.file_type(draft, source.metadata),
        note,
        changes.overrides(recipe.rules),
    )
    own = (
        provenance_keys(changes.recipe(recipe), "0" * 64, __version__, changes)
        if provenance
        else {}
    )
    return with_provenance(
        keys, own, imatrix=note is not None, imatrix_sha256=note.sha256 if note else None
    )
