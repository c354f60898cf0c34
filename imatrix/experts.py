"""Assign values of the `.dat` layout to experts. The layout does not store the number of experts,
but it follows from the sizes of the entries of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..formats.tensor_names import ROUTER, TensorName
from .data import Entry, Imatrix, alternatives, sees_latent_vectors
from .stored import ComputedEntries

_GATE_UP = "ffn_gate_up_exps.weight"
_SEE_THE_ROUTERS_INPUT = ("ffn_up_exps.weight", "ffn_gate_exps.weight", _GATE_UP)


def with_experts(imatrix: Imatrix) -> Imatrix:
    """Return `imatrix` with entries of experts as [n_experts, n_cols], if counts are calls and the
    sizes of the layer's entries give the number of experts.

    The router (`ffn_gate_inp`) and the up and gate matrices of experts see rows of the same length,
    which gives the number of experts. An expert whose means are all exactly 1 saw nothing, as the
    layout has ones for these. Its count becomes 0.
    """
    if not imatrix.counts_calls:
        return imatrix
    entries = imatrix.entries
    found = ComputedEntries(
        entries, lambda name: split_experts(entries[name], _n_experts(entries, name))
    )
    return replace(imatrix, entries=found)


def split_experts(entry: Entry, n_experts: int) -> Entry:
    """Return a flat entry with one count as that of `n_experts` matrices, if the size allows it.
    Matrices whose means are all exactly 1 saw nothing.
    """
    if len(entry.counts) > 1 or n_experts <= 1 or entry.size % n_experts:
        return entry
    sums, count = entry.sums.reshape(n_experts, -1), int(entry.counts[0])
    missing = (sums == count).all(axis=1)
    return Entry(np.where(missing[:, None], 0.0, sums), np.where(missing, 0, count), entry.calls)


def with_same_names(parts: Sequence[Imatrix]) -> list[Imatrix]:
    """Return `parts` of one model with the same names for tensors that see the same input.

    Gate and up of experts can be merged (`ffn_gate_up_exps`) in some files of a model and split in
    others: then all parts get two entries. If a fused gate was not observed (ik_llama.cpp), it gets
    the entry of up, in layers where another part has both.
    """
    names = {name for part in parts for name in part.entries}
    names -= {
        name
        for name in names
        if TensorName.parse(name).local == _GATE_UP and not names.isdisjoint(alternatives(name))
    }

    def renamed(part: Imatrix) -> Imatrix:
        owners = {name: name if sees_latent_vectors(name) else part.find(name) for name in names}
        found = {name: own for name, own in owners.items() if own is not None}
        found = {name: own for name, own in found.items() if own in part.entries}
        order = [name for name in part.entries if name in found] + sorted(
            found.keys() - part.entries.keys()
        )
        return replace(part, entries=ComputedEntries(order, lambda name: part.entries[found[name]]))

    return [part if part.entries.keys() == names else renamed(part) for part in parts]


def _n_experts(entries: Mapping[str, Entry], name: str) -> int:
    """Return 1 for tensors that are not of experts, and if the layer does not tell the number."""
    parsed = TensorName.parse(name)
    router = entries.get(parsed.sibling(ROUTER))
    if not parsed.is_stacked or not parsed.is_weight or router is None:
        return 1
    for other in _SEE_THE_ROUTERS_INPUT:
        entry = entries.get(parsed.sibling(other))
        if entry is not None and entry.size % router.size == 0:
            return entry.size // router.size
    return 1
