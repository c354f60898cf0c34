"""Predict the errors of types that are rounded with second moments, to choose types for a size.

An error is tr(dW H dW^T) with held-out moments H, relative to the energy sum w x^2 that errors of
searches are relative to. A search leaves errors of which hardly two have to do with each other, so
that tr(dW H dW^T) is about the sum of w e^2 over its errors e: both kinds have one scale. How much
less rounding leaves is measured on a few matrices of every role and type; that ratio times the
estimated error of the search is the error of a tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ...formats.source import Source
from ...formats.tensor_names import TensorName
from ..plan.type_errors import ErrorSums, TensorStats
from .choice import DEFAULT_PASSES, DEFAULT_SHRINK
from .methods import ON_CPU, Rounders, guides
from .moments import MomentsLookup
from .trials import in_threads, trials

_MATRICES, _ROWS = 2, 32  # of a role that are tried with every type


def rounded_stats(
    source: Source,
    stats: Sequence[TensorStats],
    moments: MomentsLookup,
    importance: Callable[[str, tuple[int, ...]], np.ndarray | None] | None,
    *,
    shrink: float | None = None,
    refine: bool = True,
    threads: int = 1,
    rounders: Rounders = ON_CPU,
    begin: Callable[[int], None] = lambda n: None,
    advance: Callable[[int], None] = lambda n: None,
) -> list[TensorStats]:
    """Return `stats`, the errors of searches, with those of rounding in place of them for tensors
    and types that have second moments with a held-out fold.

    begin, advance: called with the number of elements to round on trial, and of those that are
    done. Reads some rows of the source.
    """
    by_role: dict[tuple[str, int], list[TensorStats]] = defaultdict(list)
    for one in stats:
        by_role[TensorName.parse(one.tensor.name).role, one.tensor.n_cols].append(one)
    ratios: dict[tuple[str, str], float] = {}  # by tensor and type
    begin(sum(_elements(own) for own in by_role.values()))
    for (_, n_cols), own in by_role.items():
        found = [(one.tensor, moments(one.tensor.name, one.tensor.shape)) for one in own]
        usable = [(tensor, m) for tensor, m in found if m is not None]
        tried = list(trials(source, usable, importance, _MATRICES, _ROWS, rounders))
        if not tried:
            advance(_elements(own))
            continue
        types = {sums.type for one in own for sums in one.errors.values() if guides(sums.type)}
        ordered = sorted(types, key=lambda type: type.id)
        used = DEFAULT_SHRINK if shrink is None else shrink
        passes = DEFAULT_PASSES if refine else 0
        work = [
            partial(trial.ratio_to_diagonal, type, used, passes)
            for type in ordered
            for trial in tried
        ]
        logs = np.reshape(in_threads(work, threads, n_cols), (len(ordered), len(tried)))
        for type, ratio in zip(ordered, np.exp(logs.mean(axis=1)), strict=True):
            ratios |= {(tensor.name, type.name): min(float(ratio), 1.0) for tensor, _ in usable}
        advance(_elements(own))

    def rounded(name: str, sums: ErrorSums) -> ErrorSums:
        ratio = ratios.get((name, sums.type.name), 1.0)
        return replace(sums, we2=sums.we2 * ratio)

    return [
        replace(
            one, errors={key: rounded(one.tensor.name, sums) for key, sums in one.errors.items()}
        )
        for one in stats
    ]


def _elements(stats: Sequence[TensorStats]) -> int:
    """Return about how many elements the trials of a role round."""
    types = {name for one in stats for name in one.errors}
    return _MATRICES * _ROWS * stats[0].tensor.n_cols * len(types)
