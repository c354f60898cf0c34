"""Predict the errors of types that are rounded with second moments, to choose types for a size.

An error is tr(dW H dW^T) with held-out moments H, relative to the energy sum w x^2 that errors of
searches are relative to. A search leaves errors of which hardly two have to do with each other, so
that tr(dW H dW^T) is about the sum of w e^2 over its errors e: both kinds have one scale. How much
less rounding leaves is measured on a few matrices of every role; that ratio times the estimated
error of the search is the error of a tensor.

Ratios of the types of a role differ by few percent. So only types in contention are rounded on
trial: those that would be chosen, if what was not tried had nine tenths of the ratio of the type
nearest in size. What is chosen then was tried, and what was not would have to be better than that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ...formats.source import Source, TensorInfo
from ...formats.tensor_names import TensorName
from ...formats.types import GGMLType, ggml_type
from ..plan.type_errors import ErrorSums, TensorStats
from .choice import DEFAULT_PASSES, DEFAULT_SHRINK
from .methods import ON_CPU, Rounders, guides
from .moments import MomentsLookup
from .tensor_moments import TensorMoments
from .trials import in_threads, trials

MATRICES, ROWS = 2, 32  # of a role that are tried; rows in four groups, evenly spaced
_UNTRIED = 0.9  # of the ratio of the nearest type, what one that was not tried is taken for
_FIRST = 0.6  # the ratio of types of a role of which none was tried


@dataclass
class _Role:
    """Tensors of a role with rows of one length. usable: those that have moments; ratios: of the
    types that were tried; wanted: those to try next.
    """

    stats: list[TensorStats]
    usable: list[tuple[TensorInfo, TensorMoments]]
    ratios: dict[str, float] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)

    @property
    def n_cols(self) -> int:
        return self.stats[0].tensor.n_cols

    @property
    def n_elements(self) -> int:
        """About how many elements the trials of the wanted types round."""
        return MATRICES * ROWS * self.n_cols * len(self.wanted)

    def ratio(self, name: str) -> float:
        """Return the ratio of a type; of one that was not tried that of the nearest in size."""
        if name in self.ratios:
            return self.ratios[name]
        size = _size(name)
        tried = min(self.ratios, key=lambda one: (abs(_size(one) - size), one), default=None)
        return _FIRST if tried is None else _UNTRIED * self.ratios[tried]


class RoundedErrors:
    """`stats`, the errors of searches, and how much less rounding leaves of them for tensors and
    types that have second moments with a held-out fold.

    announce: called with the types that are going to be tried, and the number of elements to round.
    begin, advance: called with that number, and with those that are done. Reads some rows of the
    source.
    """

    def __init__(
        self,
        source: Source,
        stats: Sequence[TensorStats],
        moments: MomentsLookup,
        importance: Callable[[str, tuple[int, ...]], np.ndarray | None] | None,
        *,
        shrink: float | None = None,
        refine: bool = True,
        threads: int = 1,
        rounders: Rounders = ON_CPU,
        announce: Callable[[Sequence[GGMLType], int], None] = lambda types, n: None,
        begin: Callable[[int], None] = lambda n: None,
        advance: Callable[[int], None] = lambda n: None,
    ):
        self._source, self._stats, self._importance = source, list(stats), importance
        self._shrink = DEFAULT_SHRINK if shrink is None else shrink
        self._passes = DEFAULT_PASSES if refine else 0
        self._threads, self._rounders = threads, rounders
        self._announce, self._begin, self._advance = announce, begin, advance
        by_role: dict[tuple[str, int], list[TensorStats]] = defaultdict(list)
        for one in stats:
            by_role[TensorName.parse(one.tensor.name).role, one.tensor.n_cols].append(one)
        self._roles: list[_Role] = []
        self._role_of: dict[str, _Role] = {}  # of tensors that have moments
        for own in by_role.values():
            found = [(one.tensor, moments(one.tensor.name, one.tensor.shape)) for one in own]
            role = _Role(own, [(tensor, m) for tensor, m in found if m is not None])
            self._roles.append(role)
            self._role_of |= {tensor.name: role for tensor, _ in role.usable}

    @property
    def tried(self) -> int:
        """Return how many pairs of a role and a type were tried."""
        return sum(len(role.ratios) for role in self._roles)

    def all(self) -> list[TensorStats]:
        """Return the errors of rounding, every type tried."""
        for role in self._roles:
            names = {name for one in role.stats for name in one.errors}
            role.wanted = {name for name in names if guides(ggml_type(name))} - set(role.ratios)
        self._try()
        return self._estimated()

    def for_choice(
        self, choose: Callable[[Sequence[TensorStats]], Sequence[GGMLType]]
    ) -> list[TensorStats]:
        """Return the errors of rounding; the types that `choose` returns for them, one for each
        tensor, were tried.
        """
        while True:
            made = self._estimated()
            for one, type in zip(made, choose(made), strict=True):
                role = self._role_of.get(one.tensor.name)
                if role is not None and guides(type) and type.name not in role.ratios:
                    role.wanted.add(type.name)
            if not any(role.wanted for role in self._roles):
                return made
            self._try()

    def _estimated(self) -> list[TensorStats]:
        def rounded(tensor: str, sums: ErrorSums) -> ErrorSums:
            role = self._role_of.get(tensor)
            if role is None or not guides(sums.type):
                return sums
            return replace(sums, we2=sums.we2 * role.ratio(sums.type.name))

        return [
            replace(
                one,
                errors={name: rounded(one.tensor.name, sums) for name, sums in one.errors.items()},
            )
            for one in self._stats
        ]

    def _try(self) -> None:
        """Round what is wanted on trial."""
        roles = [role for role in self._roles if role.wanted]
        names = sorted({name for role in roles for name in role.wanted})
        n_elements = sum(role.n_elements for role in roles)
        self._announce([ggml_type(name) for name in names], n_elements)
        self._begin(n_elements)
        for role in roles:
            types = sorted(map(ggml_type, role.wanted), key=lambda type: type.id)
            rounders = self._rounders.for_many_types()
            given = role.usable, self._importance, MATRICES, ROWS, rounders
            tried = list(trials(self._source, *given))
            work = [
                partial(trial.ratio_to_diagonal, type, self._shrink, self._passes)
                for trial in tried
                for type in types
            ]
            logs = np.reshape(
                in_threads(work, self._threads, role.n_cols), (len(tried), len(types))
            )
            ratios = np.exp(logs.mean(axis=0)) if tried else np.ones(len(types))
            for type, ratio in zip(types, ratios, strict=True):
                role.ratios[type.name] = min(float(ratio), 1.0)
            self._advance(role.n_elements)
            role.wanted = set()


def _size(name: str) -> float:
    """Return bytes per element of a type, without those of a row."""
    type = ggml_type(name)
    return type.block_bytes / type.block_size
