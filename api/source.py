"""Open models of every kind and importance matrices, for the other modules here."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..errors import IqforgeError, NotFoundError, UsageError
from ..formats.options import Options, from_keywords, unknown_option
from ..formats.tensor_names import EXTRA_OUTPUT, OUTPUT, TOKEN_EMBEDDING

if TYPE_CHECKING:
    from ..convert.checkpoint.folder import Checkpoint
    from ..formats.source import Source
    from ..imatrix.data import Imatrix
    from ..quantize.plan.changes import Changes
    from ..quantize.plan.metadata import ImatrixNote
    from ..quantize.plan.plan import PlannedTensor
    from ..quantize.plan.recipe import Recipe
    from ..quantize.run.piece import ImportanceLookup

PathLike = str | os.PathLike
O = TypeVar("O", bound=Options)


def open_source(
    path: PathLike, *, pre: str | None = None, name: str | None = None, **layout: Any
) -> Source:
    """Open a model as a `Source`: a GGUF file (or the first shard of a split one), a folder with a
    Hugging Face checkpoint, or `hf://organization/model[@revision]`, a checkpoint on the Hub of
    which only the rows that are read are fetched.

    pre, name: the pre-tokenizer and `general.name` of a checkpoint. layout: fields of
    `convert.architectures.layout_options.LayoutOptions`, for a checkpoint.
    """
    if layout:
        from ..convert.architectures.layout_options import LayoutOptions

        check_fields(open_source, layout, LayoutOptions)
    options = {"pre": pre, "name": name, **layout}
    if os.fspath(path).startswith("hf://"):
        from ..convert.hub.checkpoint import open_remote

        return _checkpoint_source(open_remote(os.fspath(path)), options)
    if not os.path.exists(path):
        raise NotFoundError("no such file or folder", file=path)
    if os.path.isdir(path):
        from ..convert.checkpoint.folder import open_checkpoint

        return _checkpoint_source(open_checkpoint(path), options)
    if _is_part_of_checkpoint(path):
        raise IqforgeError("is a file of a checkpoint: name its folder instead", file=path)
    from ..formats.gguf.reader import open_gguf

    return open_gguf(path)


def check_model_path(path: PathLike) -> None:
    """Raise what `open_source` raises for a path where no model begins: nothing is there, a file of
    a checkpoint, or a file that is no GGUF file. Reads four bytes.
    """
    if os.fspath(path).startswith("hf://") or os.path.isdir(path):
        return
    if not os.path.exists(path):
        raise NotFoundError("no such file or folder", file=path)
    if _is_part_of_checkpoint(path):
        raise IqforgeError("is a file of a checkpoint: name its folder instead", file=path)
    from ..formats.gguf.header import check_magic

    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError:
        return  # the reader says why
    check_magic(magic, os.fspath(path))


def _is_part_of_checkpoint(path: PathLike) -> bool:
    """Return whether `path` is named like a file of a checkpoint and is no GGUF file."""
    name = os.path.basename(os.fspath(path))
    if not name.endswith((".safetensors", ".bin", ".json")):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(4) != b"GGUF"
    except OSError:
        return False  # the reader says why


def _checkpoint_source(checkpoint: Checkpoint, options: dict[str, Any]) -> Source:
    from ..convert.source import CheckpointSource

    try:
        return CheckpointSource(checkpoint, **options)
    except BaseException:
        checkpoint.close()
        raise


def preset_recipe(
    type: Recipe | str, options: Mapping[str, Any], function: Callable[..., Any]
) -> Recipe:
    """Return the recipe, or that of a preset with the `options` that `function` was called with.
    Raise UsageError for an unknown one.
    """
    from ..quantize.plan.recipe import Recipe

    check_fields(function, options, Recipe)
    return type if isinstance(type, Recipe) else Recipe(type, **options)


def split_recipe(
    function: Callable[..., Any], keywords: Mapping[str, Any], cls: type[O], options: O | None
) -> tuple[O, dict[str, Any]]:
    """Return `options` with the keywords that are its fields, and the others, which are those of a
    recipe. Raise UsageError for an unknown one.
    """
    from ..quantize.plan.recipe import Recipe

    check_fields(function, keywords, cls, Recipe)
    own = {name: value for name, value in keywords.items() if name in cls.field_names()}
    [made] = from_keywords(function, own, (cls, options))
    return made, {name: value for name, value in keywords.items() if name not in own}


def check_fields(function: Callable[..., Any], options: Mapping[str, Any], *classes: Any) -> None:
    """Raise UsageError for an option of `function` that none of the dataclasses has either."""
    known = [field.name for cls in classes for field in fields(cls)]
    for name in options:
        if name not in known:
            raise unknown_option(function, name, known)


def with_gate_up(source: Source, gate_up: str | None) -> Source:
    """Return the source with gate and up of experts merged ("merge") or split ("split"; "part" is
    the old name), or as it is (None). Raise UsageError for another word.
    """
    from ..formats.tools.gate_up_source import GateUpSource

    if gate_up is None:
        return source
    if gate_up not in ("merge", "split", "part"):
        raise UsageError(f"gate_up is '{gate_up}', expected merge or split")
    return GateUpSource(source, undo=gate_up != "merge")


@overload
def loaded_imatrix(imatrix: PathLike | Imatrix) -> Imatrix: ...
@overload
def loaded_imatrix(imatrix: None) -> None: ...
@overload
def loaded_imatrix(imatrix: PathLike | Imatrix | None) -> Imatrix | None: ...
def loaded_imatrix(imatrix: PathLike | Imatrix | None) -> Imatrix | None:
    """Return the importance matrix of a file, the one that is given, or None for None. Raise the
    errors of `load_imatrix` for a file that is missing or damaged.
    """
    from ..imatrix.data import Imatrix
    from ..imatrix.files.load import load_imatrix

    return imatrix if imatrix is None or isinstance(imatrix, Imatrix) else load_imatrix(imatrix)


def imatrix_note(
    imatrix: Imatrix | None, provenance: bool = False, hidden: bool = False
) -> ImatrixNote | None:
    """Return what a quantized file says about the importance matrix that was used: with
    `provenance` its file name without the folder, and its hash. hidden: say only that there was
    one.
    """
    from ..quantize.plan.metadata import ImatrixNote
    from ..quantize.run.provenance import file_sha256

    if imatrix is None:
        return None
    path, dataset = os.fspath(imatrix.path or ""), imatrix.datasets[0] if imatrix.datasets else None
    if not provenance or hidden:
        return ImatrixNote(path, dataset, len(imatrix.entries), imatrix.chunk_count, hidden=hidden)
    sha256 = file_sha256(path) if os.path.isfile(path) else None  # one made in memory has no file
    return ImatrixNote(
        os.path.basename(path), dataset, len(imatrix.entries), imatrix.chunk_count, sha256
    )


def selected_imatrix(imatrix: Imatrix | None, changes: Changes) -> Imatrix | None:
    """Return the importance matrix with the entries that are used."""
    if imatrix is None:
        return None
    return replace(
        imatrix,
        entries={
            name: entry for name, entry in imatrix.entries.items() if changes.uses_entry(name)
        },
    )


def renamed_imatrix(imatrix: Imatrix | None, changes: Changes) -> Imatrix | None:
    """Return the importance matrix with names that tensors have after the changes. A second copy of
    the output matrix takes the entry of the first.
    """
    if imatrix is None:
        return None
    entries = {
        after: entry
        for name, entry in imatrix.entries.items()
        if (after := changes.name_after(name)) is not None
    }
    original = next((name for name in (OUTPUT, TOKEN_EMBEDDING) if name in entries), None)
    if changes.extra_output and original:
        entries[EXTRA_OUTPUT] = entries[original]
    return replace(imatrix, entries=entries)


def changed_imatrix(
    imatrix: Imatrix | None, changes: Changes, model: Source, changed: Source
) -> Imatrix | None:
    """Return the importance matrix with the entries that are used, under the names that tensors
    have after the changes. Raise ImatrixError if it belongs to another model than `changed`, which
    is `model` after the changes, unless `changes.force_imatrix` is set.
    """
    from ..imatrix.belongs import check_belongs

    used = renamed_imatrix(selected_imatrix(imatrix, changes), changes)
    if used is None:
        return None
    excluded = excluded_names(changes, model)
    return check_belongs(used, changed.tensors, excluded=excluded, force=changes.force_imatrix)


def excluded_names(changes: Changes, model: Source) -> set[str]:
    """Return the tensors, by their names after the changes, whose entries are not to be used."""
    names = (changes.name_after(t.name) for t in model.tensors if not changes.uses_entry(t.name))
    return {name for name in names if name is not None}


def importance_lookup(
    imatrix: Imatrix | None, planned: Sequence[PlannedTensor], excluded: Collection[str] = ()
) -> ImportanceLookup | None:
    """Return how `stream` looks up importances. Warns about tensors that have none, except the
    `excluded` ones. Raise ImatrixError for an entry that does not fit its tensor, before any work.
    """
    from ..imatrix.belongs import warn_missing

    if imatrix is None:
        return None
    users = [p.source for p in planned if not p.kept and p.target.type.is_quantized]
    warn_missing(imatrix, [tensor for tensor in users if tensor.name not in excluded])
    return imatrix.importance
