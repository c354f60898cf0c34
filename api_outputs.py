"""The roof: the files of a quantization, what they say of themselves, and how a later run can go on with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .api_source import PathLike, imatrix_note
from .errors import UsageError
from .formats.output import check_disks, real_output, size_on_disk

if TYPE_CHECKING:
    from .convert.output import OutputPlan
    from .formats.source import Source
    from .imatrix.data import Imatrix
    from .quantize.changes import Changes
    from .quantize.plan import PlannedTensor
    from .quantize.recipe import Recipe
    from .quantize.resume import ResumableOutput


@dataclass(frozen=True)
class PlannedOutput:
    """An output as the user calls it (None in a dry run that names none), its plan and its files. key: what `run_key` needs besides."""

    out: PathLike | None
    planned: Sequence[PlannedTensor]
    files: OutputPlan
    key: dict[str, Any]

    @property
    def sizes(self) -> list[tuple[Path, int]]:
        """Path and bytes of every file."""
        return [(layout.path, layout.n_bytes) for layout in self.files.layouts]


def plan_outputs(model: Source, source: Source, wanted: Sequence[tuple[PathLike | None, Recipe, Sequence[PlannedTensor]]],
                 imatrix: Imatrix | None, changes: Changes, *, provenance: bool = True, threads: int = 0) -> list[PlannedOutput]:
    """What is written for every (file, recipe, plan); reads some rows of the model, writes nothing. source: the model with `changes`.

    OutputError for a file that is an input or could not be valid."""
    from .convert.output import plan_output
    from .quantize.metadata import quantized_metadata
    from .quantize.provenance import provenance_keys, recipe_text, source_fingerprint, with_provenance
    from .quantize.run import thread_count
    from .quantize.run_key import source_key

    note, fingerprint = imatrix_note(imatrix, provenance, changes.hide_imatrix), source_fingerprint(model, thread_count(threads))
    inputs = [*source.files, *([imatrix.path] if imatrix is not None and imatrix.path else [])]
    key = {"source": source_key(model, fingerprint), "imatrix": None if imatrix is None else imatrix.digest(), "version": __version__}
    outputs = []
    for out, recipe, planned in wanted:
        metadata = quantized_metadata(changes.metadata(model, source), recipe.file_type(planned, source.metadata), note,
                                      changes.overrides(recipe.rules))
        keys = provenance_keys(recipe, fingerprint, __version__, changes) if provenance else {}
        metadata = with_provenance(metadata, keys, imatrix=note is not None, imatrix_sha256=note.sha256 if note else None)
        files = plan_output(Path(out or ""), metadata, [plan.target for plan in planned], inputs=inputs)
        outputs.append(PlannedOutput(out, planned, files, key | {"recipe": recipe_text(recipe)}))
    return outputs


def open_outputs(outputs: Sequence[PlannedOutput], *, devices: bool = False, restart: bool = False) -> Iterator[ResumableOutput]:
    """The sinks of planned outputs, opened one after the other, once the names of all and the space for all have been looked at.

    UsageError for a file that is named twice or not at all, OutputError for one that cannot be written or a disk that is too small,
    ResumeError where an earlier run left something that has another key, unless `restart` drops it.
    """
    from .quantize.resume import ResumableOutput
    from .quantize.run_key import run_key

    for number, output in enumerate(outputs):
        if output.out is None:
            raise UsageError("an output file is needed")
        if real_output(output.out) in [real_output(other.out) for other in outputs[:number]]:
            raise UsageError("is named as output twice", file=output.out)
    if len(outputs) > 1:  # each alone is looked at when it is opened
        check_disks([(path, n_bytes - size_on_disk(f"{path}.part")) for output in outputs for path, n_bytes in output.sizes])
    for output in outputs:
        names = [real_output(path) for path in output.files.paths]
        key = run_key(output.planned, output.files.headers, names, devices=devices, **output.key)
        yield ResumableOutput(output.out, names, output.files.open, output.planned, key, restart)
