"""Plan and open the files of a quantization, with their provenance and what resumes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, printable
from ..formats.disk import check_disks, size_on_disk
from ..formats.gguf.reader import GGUFFile
from ..formats.output import real_output
from ..version import __version__
from .source import PathLike, imatrix_note

if TYPE_CHECKING:
    from ..formats.source import Source, TensorInfo
    from ..formats.tools.sharding import OutputPlan
    from ..formats.values import Value
    from ..imatrix.data import Imatrix
    from ..quantize.options import Shards
    from ..quantize.plan.changes import Changes
    from ..quantize.plan.plan import PlannedTensor
    from ..quantize.plan.recipe import Recipe
    from ..quantize.run.resume import ResumableOutput

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedOutput:
    """An output with the user's name for it (None in a dry run without one), the part of its plan
    that is carried out, and its files. key: what `run_key` needs besides.
    """

    out: PathLike | None
    planned: Sequence[PlannedTensor]
    files: OutputPlan
    key: dict[str, Any]

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Path and bytes of every file that is written; none if there is nothing to do."""
        return [(layout.path, layout.n_bytes) for layout in self.files.written]

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of every file that is written; none in a dry run without a name."""
        return tuple(path for path, _ in self.sizes) if self.out is not None else ()


def plan_outputs(
    model: Source,
    source: Source,
    wanted: Sequence[tuple[PathLike | None, Recipe, Sequence[PlannedTensor]]],
    imatrix: Imatrix | None,
    changes: Changes,
    shards: Shards,
    *,
    provenance: bool = True,
    threads: int = 0,
    rounded: Sequence[Mapping[str, Value]] = (),
    calibrated: str = "",
) -> list[PlannedOutput]:
    """Plan what is written for every (file, recipe, plan). Some rows of the model are read. source:
    the model with `changes`. rounded: for each output the metadata keys that record the second
    moments it is rounded with, if with any. calibrated: what moments depend on that are collected
    during the run, besides that.

    Raise OutputError for a file that is an input or could not be valid, UsageError for impossible
    shards.
    """
    from ..formats.tools.sharding import ShardLimits, plan_output
    from ..quantize.plan.metadata import quantized_metadata
    from ..quantize.run.parallel import thread_count
    from ..quantize.run.provenance import (
        provenance_keys,
        recipe_text,
        source_fingerprint,
        with_provenance,
    )
    from ..quantize.run.run_key import source_key

    note, fingerprint = (
        imatrix_note(imatrix, provenance, changes.hide_imatrix),
        source_fingerprint(model, thread_count(threads)),
    )
    inputs = [*source.files, *([imatrix.path] if imatrix is not None and imatrix.path else [])]
    key = {
        "source": source_key(model, fingerprint),
        "imatrix": None if imatrix is None else imatrix.digest(),
        "version": __version__,
    }
    outputs = []
    for number, (out, recipe, planned) in enumerate(wanted):
        metadata = quantized_metadata(
            changes.metadata(model, source),
            recipe.file_type(planned, source.metadata),
            note,
            changes.overrides(recipe.rules),
        )
        keys = provenance_keys(recipe, fingerprint, __version__, changes) if provenance else {}
        rounding = None
        if rounded:
            record = rounded[number]
            rounding = str({name: value.data for name, value in record.items()}) + calibrated
            keys |= dict(record) if provenance else {}
        metadata = with_provenance(
            metadata, keys, imatrix=note is not None, imatrix_sha256=note.sha256 if note else None
        )
        groups = _groups(source, planned) if shards.keep_split else None
        limits = ShardLimits(shards.max_tensors, shards.max_size)
        files = plan_output(
            Path(out or ""), metadata, [plan.target for plan in planned], limits, inputs, groups
        )
        if shards.partial and out is not None:
            files = replace(files, skip=_finished(out, files.paths))
            left_out = {tensor.name for index in files.skip for tensor in files.groups[index]}
            planned = [plan for plan in planned if plan.target.name not in left_out]
        outputs.append(
            PlannedOutput(
                out,
                planned,
                files,
                key | {"recipe": recipe_text(recipe, changes), "rounding": rounding},
            )
        )
    return outputs


def _groups(source: Source, planned: Sequence[PlannedTensor]) -> list[list[TensorInfo]]:
    """Return the targets by the source's shards."""
    groups: list[list[TensorInfo]] = []
    for plan in planned:
        origin, stored = source.origin, source.locate(plan.source)
        if not isinstance(origin, GGUFFile):
            raise UsageError(
                "keep_split (--keep-split) takes a GGUF model, whose shards are kept",
                file=source.path,
            )
        groups = groups or [[] for _ in origin.shards]
        groups[origin.shards.index(origin.location(stored.name)[0])].append(plan.target)
    return groups


def _finished(out: PathLike, paths: Sequence[Path]) -> frozenset[int]:
    """Return the numbers of the files that an earlier run has finished."""
    from ..quantize.run.earlier_run import unfinished_files

    unfinished = unfinished_files(out)
    existing = frozenset(
        index
        for index, path in enumerate(paths)
        if path.exists() and Path(real_output(path)).name not in unfinished
    )
    for index in sorted(existing):
        log.info("%s already exists and is kept", printable(paths[index], 400))
    return existing


def open_outputs(
    outputs: Sequence[PlannedOutput], *, devices: bool = False, restart: bool = False
) -> Iterator[ResumableOutput]:
    """Yield the sinks of planned outputs, opened one after the other, once the names of all and the
    space for all have been checked.

    Raise UsageError for a file that is named twice or not at all, OutputError for one that cannot
    be written or a disk that is too small, ResumeError where an earlier run left something with
    another key, unless `restart` drops it. Outputs with nothing to do are left out.
    """
    from ..quantize.run.resume import ResumableOutput
    from ..quantize.run.run_key import run_key

    outs: list[PathLike] = []
    for output in outputs:
        if output.out is None:
            raise UsageError("an output file is needed")
        if real_output(output.out) in map(real_output, outs):
            raise UsageError("is given as output twice", file=output.out)
        outs.append(output.out)
    if len(outputs) > 1:  # a single one is checked when it is opened
        check_disks(
            [
                (path, n_bytes - size_on_disk(f"{path}.part"))
                for output in outputs
                for path, n_bytes in output.sizes
            ]
        )
    for out, output in zip(outs, outputs):
        if not output.sizes:
            continue
        names = [real_output(layout.path) for layout in output.files.written]
        key = run_key(output.planned, output.files.headers, names, devices=devices, **output.key)
        yield ResumableOutput(out, names, output.files.open, output.planned, key, restart)


def save_plan(
    file: PathLike,
    recipe: Recipe,
    planned: Sequence[PlannedTensor],
    inputs: Sequence[PathLike],
    out: PathLike | None,
) -> None:
    """Write a plan for `load_plan`. Raise UsageError or OutputError for a file that is an input or
    the output.
    """
    from ..formats.output import refuse_same_file
    from ..quantize.plan import saved_plan

    refuse_same_file(file, inputs)
    if out is not None and real_output(file) == real_output(out):
        raise UsageError("cannot be both the output and the plan", file=file)
    saved_plan.save_plan(file, recipe, planned, __version__)
