"""Check that an importance matrix belongs to a model, and that several belong to the same one.

An importance matrix does not name its model. These differences show that it belongs to another one:
the number of layers, the size of an entry (also the number of experts), and entries for tensors
that the model does not have.

These do not: entries that are missing because an expert saw no input, because the output matrix was
not collected, or because nothing runs the layers for multi-token prediction (MTP); gate and up of
experts merged in one file and split in the other; the ways to store the matrices of latent
attention; and entries of encoders for images or sound.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ..errors import ImatrixError, printable
from ..formats.source import TensorInfo
from ..formats.tensor_names import EXTRA_OUTPUT, OUTPUT, TOKEN_EMBEDDING, TensorName
from .data import Entry, Imatrix, alternatives
from .experts import with_same_names

log = logging.getLogger(__name__)

_OFTEN_MISSING = (TOKEN_EMBEDDING, OUTPUT, EXTRA_OUTPUT)
_MOST_NAMED = 3


def check_belongs(
    imatrix: Imatrix,
    tensors: Sequence[TensorInfo],
    *,
    excluded: Collection[str] = (),
    force: bool = False,
) -> Imatrix:
    """Return `imatrix` if it can belong to the model with these `tensors`.

    Otherwise raise an ImatrixError that says what differs. With `force` only warn, and leave out
    the entries whose size does not fit. excluded: the names of tensors whose entries have been left
    out on purpose.
    """
    names = {tensor.name for tensor in tensors}
    mtp = _mtp_blocks([*names, *imatrix.entries])
    misfits = _misfits(imatrix, tensors)
    problems = [
        *_layers_of_model(imatrix.entries, names, names.difference(excluded), mtp),
        *_first_misfit(misfits),
        *_unknown_entries(imatrix.entries, names, mtp),
    ]
    if not problems:
        return imatrix
    message = f"{imatrix.kind} seems to belong to another model: {'; '.join(problems)}"
    if not force:
        raise ImatrixError(f"{message} (--force uses the entries that fit)", file=imatrix.path)
    log.warning("%s; the entries that fit are used anyway", message)
    unusable = {name for name, _ in misfits.values()}
    return replace(
        imatrix,
        entries={name: entry for name, entry in imatrix.entries.items() if name not in unusable},
    )


def warn_missing(imatrix: Imatrix, tensors: Sequence[TensorInfo]) -> None:
    """Warn if `imatrix` has no entry for some of these tensors, which are about to use it. Matrices
    that are rarely collected (embedding, output, MTP layers) do not count.
    """
    mtp = _mtp_blocks(tensor.name for tensor in tensors)
    expected = [
        tensor
        for tensor in tensors
        if tensor.name not in _OFTEN_MISSING and _block(tensor.name) not in mtp
    ]
    missing = [t.name for t in expected if imatrix.entry(t.name, t.shape) is None]
    if not missing:
        return
    log.warning(
        "%s has no entry for %d of %d tensors to be quantized (%s): they are quantized without"
        " importances.%s",
        _name(imatrix),
        len(missing),
        len(expected),
        _shown(missing),
        " Does it belong to another model?" if len(missing) > len(expected) / 2 else "",
    )


def check_same_model(parts: Sequence[Imatrix], *, force: bool = False) -> None:
    """Raise ImatrixError if two of `parts` cannot belong to the same model, or only warn with
    `force`. Warn about entries that a part lacks.

    Two parts are of different models if they have another number of layers, or if both have an
    entry in the same layer that the other one lacks.
    """
    for part in (named := with_same_names(parts))[1:]:
        first = named[0]
        mtp = _mtp_blocks([*first.entries, *part.entries])
        problems = _layers_of_part(part, first, mtp)
        only = [_lacking(*pair, mtp) for pair in ((part, first), (first, part))]
        both = {_block(name) for name in only[0]} & {_block(name) for name in only[1]}
        if both and not problems:
            own, theirs = ([name for name in names if _block(name) in both] for names in only)
            problems = [f"only it has {_shown(own)}, only the other has {_shown(theirs)}"]
        if problems:
            message = (
                f"the importance matrix seems to belong to another model than {_name(first)}:"
                f" {problems[0]}"
            )
            if not force:
                raise ImatrixError(f"{message} (--force merges them)", file=part.path)
            log.warning("%s; they are merged anyway", message)
            continue
        for names, has, lacks in ((only[0], part, first), (only[1], first, part)):
            if names:
                log.warning(
                    "%s has no entry for %d tensors of %s (%s)",
                    _name(lacks),
                    len(names),
                    _name(has),
                    _shown(names),
                )


def _layers_of_model(
    entries: Iterable[str], names: Iterable[str], expected: Iterable[str], mtp: Collection[int]
) -> list[str]:
    here, all_, least = (_n_layers(some, mtp) for some in (entries, names, expected))
    if not here or not all_ or least <= here <= all_:
        return []
    return [f"it has entries for {_layers(here)}, the model has {_layers(all_)}"]


def _layers_of_part(part: Imatrix, first: Imatrix, mtp: Collection[int]) -> list[str]:
    here, there = _n_layers(part.entries, mtp), _n_layers(first.entries, mtp)
    if not here or not there or here == there:
        return []
    return [f"it has entries for {_layers(here)}, the other for {_layers(there)}"]


def _layers(n: int) -> str:
    return "1 layer" if n == 1 else f"{n} layers"


def _n_layers(names: Iterable[str], mtp: Collection[int]) -> int:
    return 1 + max((block for name in names if (block := _block(name)) not in mtp), default=-1)


def _misfits(
    imatrix: Imatrix, tensors: Sequence[TensorInfo]
) -> dict[str, tuple[str, ImatrixError]]:
    """Return, by tensor, the entry whose size is not that of the tensor, and the error that says
    so.
    """
    found = {}
    for tensor in tensors:
        # The token embedding is looked up, not multiplied: its entry is that of another matrix.
        # Entries of latent attention depend on who collected them; `Imatrix.entry` knows the ways.
        if len(tensor.shape) > 1 and tensor.name != TOKEN_EMBEDDING and not _latent(tensor.name):
            try:
                imatrix.entry(tensor.name, tensor.shape)
            except ImatrixError as error:
                found[tensor.name] = imatrix.find(tensor.name) or tensor.name, error
    return found


def _first_misfit(misfits: Mapping[str, tuple[str, ImatrixError]]) -> list[str]:
    if not misfits:
        return []
    name, (_, error) = next(iter(misfits.items()))
    more = f" ({len(misfits)} entries do not fit)" if len(misfits) > 1 else ""
    return [f"tensor '{printable(name)}': {error.message}{more}"]


def _unknown_entries(
    entries: Mapping[str, Entry], names: Collection[str], mtp: Collection[int]
) -> list[str]:
    only_mtp = _n_layers(names, mtp) == 0  # some files have no other layers
    unknown = [
        name
        for name in entries
        if name not in names
        and not (only_mtp and _block(name) >= 0)
        and not any(other in names for other in alternatives(name))
        and name not in _OFTEN_MISSING
        and not TensorName.parse(name).is_of_other_modality
        and not _latent(name)
        and _block(name) not in mtp
    ]
    if not unknown:
        return []
    return [
        f"the model has no tensor for {len(unknown)} of {len(entries)} entries ({_shown(unknown)})"
    ]


def _lacking(has: Imatrix, lacks: Imatrix, mtp: Collection[int]) -> list[str]:
    """Return the names of entries that only one has, without those that are often missing."""
    return [
        name
        for name in has.entries
        if name not in lacks.entries
        and name not in _OFTEN_MISSING
        and not _latent(name)
        and _block(name) not in mtp
    ]


def _latent(name: str) -> bool:
    return TensorName.parse(name).is_latent


def _mtp_blocks(names: Iterable[str]) -> set[int]:
    """Return the blocks for multi-token prediction, which have tensors `nextn.*`."""
    return {_block(name) for name in names if TensorName.parse(name).is_mtp}


def _block(name: str) -> int:
    """Return the number of the block of a tensor; -1 for tensors outside of blocks."""
    layer = TensorName.parse(name).layer
    return -1 if layer is None else layer


def _name(imatrix: Imatrix) -> str:
    return printable(imatrix.path, 400) if imatrix.path else "an importance matrix in memory"


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
