"""Quantize models."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..errors import OutputError, UsageError
from ..quantize.run.report import RunProgress, RunReport, report_plan
from .calibration import Calibration
from .devices import note_choice
from .outputs import plan_outputs, save_plan
from .plan import plan_quantization
from .quantize_run import QuantizeRun
from .rounding import (
    calibration_provenance,
    check_calibration,
    loaded_moments,
    moments_imatrix,
    refuse_read_files,
    rounders_of,
    rounding_plans,
    rounding_provenance,
)
from .source import (
    PathLike,
    changed_imatrix,
    check_fields,
    excluded_names,
    importance_lookup,
    loaded_imatrix,
    open_source,
    preset_recipe,
    selected_imatrix,
    split_recipe,
    with_gate_up,
)

if TYPE_CHECKING:
    from ..imatrix.data import Imatrix
    from ..imatrix.moments.file import MomentsFile
    from ..quantize.options import QuantizeOptions, Shards
    from ..quantize.plan.changes import Changes
    from ..quantize.plan.recipe import Recipe
    from ..quantize.rounding.choice import RoundingPlan

log = logging.getLogger(__name__)


def quantize_model(
    src: PathLike,
    out: PathLike | None,
    type: str | Recipe,
    imatrix: PathLike | Imatrix | None = None,
    *,
    hessian: PathLike | MomentsFile | None = None,
    calibrate: PathLike | Sequence[PathLike] | None = None,
    options: QuantizeOptions | None = None,
    changes: Changes | None = None,
    shards: Shards | None = None,
    progress: RunProgress | None = None,
    **keywords: Any,
) -> RunReport:
    """Quantize a GGUF file (also the first shard of a split one) or a checkpoint folder to one GGUF
    file, and return types, sizes and errors of all tensors.

    type: a preset, such as "IQ4_K", or a recipe. imatrix: an importance matrix, or its file.
    hessian: second moments, or their file. calibrate: texts to collect them from. out: None with
    `dry_run`. options, changes, shards and keywords: those of `quantize_models`; for a preset also
    the fields of `quantize.plan.recipe.Recipe`, such as `pure`, `custom_q`, `token_embedding_type`.
    """
    from ..quantize.options import QuantizeOptions
    from ..quantize.plan.recipe import Recipe

    check_fields(quantize_model, keywords, QuantizeOptions, Recipe)
    return quantize_models(
        src,
        [(out, type)],
        imatrix,
        hessian=hessian,
        calibrate=calibrate,
        options=options,
        changes=changes,
        shards=shards,
        progress=[progress or RunProgress()],
        **keywords,
    )[0]


def quantize_models(
    src: PathLike,
    outputs: Sequence[tuple[PathLike | None, str | Recipe]],
    imatrix: PathLike | Imatrix | None = None,
    *,
    hessian: PathLike | MomentsFile | None = None,
    calibrate: PathLike | Sequence[PathLike] | None = None,
    options: QuantizeOptions | None = None,
    changes: Changes | None = None,
    shards: Shards | None = None,
    progress: Sequence[RunProgress] = (),
    **keywords: Any,
) -> list[RunReport]:
    """Quantize to several files in one pass, in which every piece of the source is read and decoded
    once. Every file is the same, byte for byte, as one that is made alone.

    outputs: (file, preset or recipe). keywords: fields of `quantize.options.QuantizeOptions`, which
    win over `options`, and of `quantize.plan.recipe.Recipe` for every output that names a preset.
    Return a report for each.

    - imatrix: a file in either layout, or a loaded one.
    - hessian: second moments, as `collect_hessian` returns or writes them. Types that they guide
      are rounded with them, on GPUs where they have kernels; `progress.rounding_chosen` gets how
      each role is rounded. Their diagonal is the importance matrix if none is given.
      hessian_shrink: shrink correlations by this share instead of one chosen on held-out text.
      refine: also move codes and scales. couple_rows: round the rows of some matrices together;
      see `quantize.rounding.rows`. stretch: multiply scales by a little more than 1 in the end; see
      `quantize.rounding.stretch`.
    - calibrate: texts, or "default", from which second moments are collected during the run, layer
      by layer: at most `calibrate_chunks` chunks of `calibrate_ctx` tokens of all texts together.
      Everything else is as with `hessian`, but each tensor is judged alone. sequential: layers read
      what the rounded layers before them give, and weights make up for the errors of these.
    - nan_to_zero: NaN and infinities in tensors that change their type become 0 and are counted
      (`zeroed` in the report of a tensor). Without it they are a NonFiniteError that names the
      first one.
    - dry_run: plan only; files may be None. estimate: with dry_run, also the time, memory and disk
      space that the run would take, from trying some rows for seconds; `estimate` of the report.
    - device: "cpu", "cuda" (all GPUs), "cuda:1", "cuda:0,2" or "auto" (all GPUs, or the CPU).
    - provenance: write keys that say what the file was made of, see `quantize.run.provenance`.
      Without them it is the reference's to the byte.
    - changes: of the model, besides types. gate_up: "merge" gate and up of experts into
      ffn_gate_up_exps, as `merge_gate_up`, or "split" it, before anything is quantized.
    - save_plan: a file that gets the plan of a single output, see `quantize.plan.saved_plan`, whose
      `load_plan` returns it as a recipe.
    - shards: how an output is divided into files.
    - validate: read a file back before it gets its name. A ValidationError names the first tensor
      with a value that is not a number, with other errors than the run reported, or with other
      bytes than the source's where they were kept. `OUT.part` stays then.
    - progress: one for each output, or none.

    A run that ends early leaves `OUT.part` and `OUT.journal` once a tensor is finished. Called
    again it resumes and gives the same file, or a ResumeError if anything has changed that the
    bytes depend on. restart: start from scratch instead.
    """
    from ..formats.output import refuse_same_file
    from ..quantize.cuda.devices import find_devices
    from ..quantize.options import QuantizeOptions, Shards
    from ..quantize.plan.changes import Changes
    from ..quantize.run.compilation import compile_ahead, tasks_of_plans, tasks_of_rounding

    started = time.perf_counter()
    o, of_recipe = split_recipe(quantize_models, keywords, QuantizeOptions, options)
    recipes = [preset_recipe(type, of_recipe, quantize_models) for _, type in outputs]
    changes, shards = changes or Changes(), shards or Shards()
    if o.save_plan is not None and len(outputs) > 1:
        raise UsageError("save_plan needs exactly one output")
    check_calibration(calibrate, hessian, o, shards, len(outputs))
    refuse_read_files((out for out, _ in outputs), hessian, calibrate)
    _check_folders([out for out, _ in outputs if out is not None], o.dry_run)
    moments = loaded_moments(hessian, o, calibrate is not None)
    guided = moments is not None or calibrate is not None
    devices = find_devices(o.device)
    rounders = rounders_of(devices if guided else ())
    if imatrix is None and moments is not None:
        imatrix = moments_imatrix(moments)
    progress = progress or [RunProgress() for _ in outputs]
    loaded = loaded_imatrix(imatrix)
    with open_source(src) as model, ExitStack() as opened:
        calibration = None
        if calibrate is not None:
            folder = os.path.dirname(os.path.abspath(outputs[0][0] or "."))
            calibration = opened.enter_context(Calibration(src, calibrate, o, folder))
        own = calibration is not None and imatrix is None  # importances of the same texts
        if calibration is not None and loaded is None:
            loaded = calibration.planned_imatrix()
        changes.review_parts(None if loaded is None else loaded.entries)
        loaded = selected_imatrix(loaded, changes)
        rearranged = with_gate_up(model, o.gate_up)
        source = changes.apply(rearranged, recipes[0].rules)
        used = changed_imatrix(loaded, changes, rearranged, source)
        recipes = [changes.recipe(recipe) for recipe in recipes]
        plans = [plan_quantization(source, recipe, used) for recipe in recipes]
        for planned in plans:
            changes.check(planned)
        if o.save_plan is not None:
            inputs = [*source.files, *([loaded.path] if loaded is not None and loaded.path else [])]
            save_plan(o.save_plan, recipes[0], plans[0], inputs, outputs[0][0])
        if o.nan_to_zero:
            plans = [[replace(plan, nan_to_zero=True) for plan in planned] for planned in plans]
        excluded = excluded_names(changes, rearranged)
        lookups = [importance_lookup(used, planned, excluded) for planned in plans]
        if o.dry_run and not o.estimate:
            return [report_plan(*of_output) for of_output in zip(plans, progress)]
        tasks = tasks_of_plans(plans, lookups, bool(devices))
        roundings: list[RoundingPlan] = []
        if calibration is not None:
            compile_ahead(tasks, progress[0])
        if moments is not None:
            for out, _ in outputs:
                if out is not None and not o.dry_run:
                    refuse_same_file(out, model.files)  # before the choice, which takes long
            compile_ahead(tasks, progress[0])  # the choice tries the searches
            if not devices:
                made_types = {plan.target.type for plan in chain(*plans) if not plan.kept}
                compile_ahead(tasks_of_rounding(made_types), progress[0])
            roundings = rounding_plans(
                moments, changes, rearranged, source, plans, lookups, o, progress, rounders
            )
        wanted = [
            (out, recipe, planned) for (out, _), recipe, planned in zip(outputs, recipes, plans)
        ]
        records = [rounding_provenance(moments, plan) for plan in roundings] if moments else []
        if calibration is not None:
            records = [calibration_provenance(calibration.texts, o)] * len(outputs)
        files = plan_outputs(
            model,
            source,
            wanted,
            loaded,
            changes,
            shards,
            provenance=o.provenance,
            threads=o.threads,
            rounded=records,
            calibrated="" if calibration is None else calibration.key(),
        )
        if o.device == "auto":
            note_choice(devices, plans)
        run = QuantizeRun(
            source=source,
            model=rearranged,
            changes=changes,
            options=o,
            plans=plans,
            lookups=lookups,
            files=files,
            tasks=tasks,
            devices=devices,
            rounders=rounders,
            progress=progress,
        )
        if o.dry_run:
            return run.estimated(started)
        return run.made(roundings, calibration, own)


def _check_folders(outputs: Sequence[str | os.PathLike], dry_run: bool) -> None:
    """Raise OutputError for a folder that does not exist, before anything that takes long; a dry
    run only says so.
    """
    from ..formats.output import check_folder

    for out in outputs:
        try:
            check_folder(out)
        except OutputError as error:
            if not dry_run:
                raise
            log.warning("%s", error)
