"""Add up importance matrices of the same model, from files of either layout, each with a weight.

Where counts are tokens, sums and counts add up. Counts of `.dat` files are calls, and there are two
ways to add them to counts of tokens:

- `tokens`: a call is `chunk_size` tokens, as in llama.cpp. Every token counts the same in all
  files. An expert sees only some of them, and `.dat` files do not say how many: it is assumed to be
  the mean share of an expert of this tensor in the parts that count tokens. (llama.cpp assumes all,
  so that a `.dat` file outweighs others.) Ones, which mean that an expert saw nothing, add nothing.

- `calls`: a call counts as much as one token, as in ik_llama.cpp's `--in-file`. What is collected
  then outweighs what comes from files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..errors import ImatrixError, UsageError
from ..formats.arguments import number
from .data import Entry, Imatrix
from .experts import split_experts, with_experts, with_same_names
from .options import WEIGHTINGS
from .stored import ComputedEntries

MOST_WEIGHT = 1e6  # so that counts stay far below 2^63
DEFAULT_CHUNK = 512  # tokens of a call, where nothing says it


def merge_imatrices(
    parts: Sequence[Imatrix],
    weights: Sequence[float] | None = None,
    *,
    chunk_size: int | None = None,
    weighting: str = "tokens",
) -> Imatrix:
    """Return the sum of `parts`, as if the text of each had been seen `weights` times (1 by
    default). Entries are in order of their names.

    chunk_size: tokens of the result's chunks, and of a call of a `.dat` file; by default those of
    the first part that counts tokens, else 512. Where all parts count calls, and no weight is a
    fraction, the result counts calls. weighting: how calls and tokens add up, see above. The number
    of chunks is the largest count in chunks, with `calls` that of calls. Raise UsageError for
    weights that are not positive, or fractions with `calls`; ImatrixError for sizes that differ,
    naming both files.
    """
    weights = [1.0] * len(parts) if weights is None else list(weights)
    check_arguments(parts, weights, chunk_size, weighting)
    given = parts
    known = next((part.chunk_size for part in parts if not part.counts_calls), None)
    if weighting == "tokens":
        parts = [with_experts(part) for part in parts]
        if known or any(weight % 1 for weight in weights):
            chunk_size = chunk_size or known or DEFAULT_CHUNK
            parts = [as_tokens(part, chunk_size) for part in parts]
    parts = with_same_names(parts)
    seen = [
        (
            None
            if part.counts_calls
            else max((int(entry.counts.max()) for entry in part.entries.values()), default=0)
        )
        for part in given
    ]
    names = sorted({name for part in parts for name in part.entries})
    entries = ComputedEntries(names, lambda name: _added_up(name, parts, weights, weighting, seen))
    size = 1 if all(part.counts_calls for part in parts) else chunk_size or known or DEFAULT_CHUNK
    merged = Imatrix(entries, 0, size, tuple(name for part in parts for name in part.datasets))
    merged.chunk_count = max(
        (
            entry.calls or max(1, int(entry.counts.max()) // merged.chunk_size)
            for entry in entries.values()
        ),
        default=0,
    )
    return merged


def as_tokens(imatrix: Imatrix, chunk_size: int) -> Imatrix:
    """Return `imatrix` with counts of tokens: if it counts calls, each is assumed to be
    `chunk_size` tokens. Its experts are split.
    """
    if not imatrix.counts_calls:
        return imatrix
    calls = with_experts(imatrix).entries

    def scaled(name: str) -> Entry:
        entry = calls[name]
        return Entry(entry.sums * chunk_size, entry.counts * chunk_size)

    return replace(imatrix, entries=ComputedEntries(calls, scaled), chunk_size=chunk_size)


def check_arguments(
    parts: Sequence[Imatrix], weights: Sequence[float], chunk_size: int | None, weighting: str
) -> None:
    """Raise UsageError for arguments that `merge_imatrices` refuses."""
    if weighting not in WEIGHTINGS:
        raise UsageError(f"the weighting is '{weighting}', expected {' or '.join(WEIGHTINGS)}")
    if not parts:
        raise UsageError("there is no importance matrix to merge")
    if len(weights) != len(parts):
        raise UsageError(f"{len(weights)} weights are given for {len(parts)} importance matrices")
    if chunk_size is not None and chunk_size < 2:
        raise UsageError(f"the chunk size is {chunk_size}, expected at least 2 tokens")
    for weight in weights:
        if not 0 < number("a weight", weight) <= MOST_WEIGHT:
            raise UsageError(
                f"a weight is {weight:g}, expected a positive number, at most {MOST_WEIGHT:g}"
            )
        if weighting == "calls" and weight % 1:
            raise UsageError(f"a weight is {weight:g}: calls can only be counted whole")


def _weighted(entry: Entry, weight: float) -> Entry:
    return (
        entry
        if weight == 1
        else Entry(entry.sums * weight, entry.counts * weight, entry.calls).whole()
    )


def _added_up(
    name: str,
    parts: Sequence[Imatrix],
    weights: Sequence[float],
    weighting: str,
    seen: Sequence[int | None],
) -> Entry:
    """Add up one entry. `seen`: tokens of each part, None for those that count calls."""
    total: Entry | None = None
    first = parts[0]  # of those that have the entry
    share = _share(
        [
            (part.entries[name].counts, tokens)
            for part, tokens in zip(parts, seen)
            if tokens and name in part.entries
        ]
    )
    for part, weight, tokens in zip(parts, weights, seen):
        if name in part.entries:
            entry = _weighted(
                part.entries[name],
                weight * share if tokens is None and weighting == "tokens" else weight,
            )
            if weighting == "calls":
                entry = Entry(entry.sums, entry.counts, _calls(part, entry, weight))
            if total is None:
                total, first = entry, part
            else:
                total = _sum(*_alike(total, entry, name, first, part, weighting == "tokens"))
    if total is None:
        raise KeyError(name)
    return total


def _share(counts: Sequence[tuple[np.ndarray, int]]) -> float:
    """Return the share of all tokens that an expert has seen on average, from what each expert and
    the whole model saw; 1 if nothing tells.
    """
    counts = [(experts, tokens) for experts, tokens in counts if len(experts) > 1]
    return (
        sum(float(experts.mean()) for experts, _ in counts) / sum(tokens for _, tokens in counts)
        if counts
        else 1.0
    )


def _calls(part: Imatrix, entry: Entry, weight: float) -> int:
    """Return what ik_llama.cpp would have counted: every tensor sees every call."""
    if entry.calls is not None:
        return entry.calls * int(weight)
    return int(entry.counts.max()) if part.counts_calls else part.chunk_count * int(weight)


def _alike(
    a: Entry, b: Entry, name: str, first: Imatrix, second: Imatrix, find_missing: bool
) -> tuple[Entry, Entry]:
    """Return both with as many matrices as the one that has more; a single count is that of every
    matrix.
    """
    n_matrices = max(len(a.counts), len(b.counts))
    if a.size != b.size or any(len(entry.counts) not in (1, n_matrices) for entry in (a, b)):
        raise ImatrixError(
            f"has {_size(b)}, in {first.path or 'what was collected'} it has {_size(a)}",
            file=second.path,
            tensor=name,
        )
    if find_missing:
        return split_experts(a, n_matrices), split_experts(b, n_matrices)
    return a.matrices(n_matrices), b.matrices(n_matrices)


def _sum(a: Entry, b: Entry) -> Entry:
    return Entry(
        a.sums + b.sums,
        a.counts + b.counts,
        None if a.calls is None or b.calls is None else a.calls + b.calls,
    )


def _size(entry: Entry) -> str:
    return (
        f"{entry.size} values in {len(entry.counts)}"
        f" matri{'x' if len(entry.counts) == 1 else 'ces'}"
    )
