"""Round tensors whose second moments are collected when their turn comes.

The choice that `choice.py` makes for a role over all layers is made for each tensor alone here: the
moments of other layers are dropped already, or not collected yet.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from ...formats.source import Source
from ...formats.tensor_names import TensorName
from ...formats.types import GGMLType
from ..plan.plan import PlannedTensor
from .choice import COUPLED, RoleChoice, choose
from .methods import ON_CPU, UNGUIDED, Encoder, Rounders, guides
from .moments import LazyEncoder, Rounding
from .rows import RowMetrics
from .tensor_moments import TensorMoments
from .trials import some_rows


class Targets(Protocol):
    """What the rows of a matrix are rounded to, where its inputs have errors of the layers before:
    rows whose products with these inputs are close to those without errors.
    """

    def share(self, x: np.ndarray) -> float:
        """Return how far rows like x float32[rows, n_cols] go there, from 0 to 1."""
        ...

    def moved(self, x: np.ndarray, share: float) -> np.ndarray:
        """Return rows x, float32[rows, n_cols], moved by this share of the way."""
        ...


@dataclass(frozen=True)
class Late:
    """What is known of a tensor when its turn comes: its moments, None if there are none,
    importances float32[n_matrices, n_cols], and targets, None for the rows as they are.
    """

    moments: TensorMoments | None
    importance: np.ndarray | None
    targets: Targets | None = None


class LateRounding:
    """How a tensor is rounded. `find` collects what is needed, and `done` says that it is not
    needed any more; both are called by the thread that plans the run.

    shrink: instead of a choice on held-out text; refine: whether codes and scales may be refined;
    threads: that try combinations; rounders: where rows are rounded; one_text: whether all moments
    are of a single text; rows: how rows are rounded together, None for each on its own; stretch:
    whether scales are multiplied in the end.
    """

    def __init__(
        self,
        source: Source,
        plan: PlannedTensor,
        find: Callable[[], Late],
        done: Callable[[], None],
        *,
        shrink: float | None = None,
        refine: bool = True,
        threads: int = 1,
        rounders: Rounders = ON_CPU,
        one_text: bool = False,
        rows: RowMetrics | None = None,
        stretch: bool = True,
    ):
        self.source, self.plan, self.shrink, self.refine = source, plan, shrink, refine
        self.threads, self.rounders, self.one_text, self.rows = threads, rounders, one_text, rows
        self.stretch = stretch
        self.choice: RoleChoice | None = None  # once a row has been rounded
        self.shares: list[float] = []  # of `Targets`, of the matrices so far
        self._find, self._done = find, done
        self._found: Late | None = None
        self._lock = threading.Lock()

    @property
    def large_pieces(self) -> bool:
        """See `methods.Rounders`."""
        return self.rounders.large_pieces

    @property
    def whole_matrices(self) -> bool:
        """Whether rows are rounded together, so that all rows of a matrix are needed in one
        call.
        """
        return self.rows is not None and self.rows.couples(self.plan.source)

    def encoder(self, type: GGMLType, n_cols: int, index: int) -> Encoder:
        """Return run(x float32[rows, n_cols], out uint8[rows, row_bytes]) for rows of matrix
        `index` and the plain `type`. Matrices come in order.
        """
        found = self._found = self._found or self._find()
        if index == self.plan.source.n_matrices - 1:
            self._found = None  # what is returned keeps what it needs
            self._done()
        return _LateRounder(self, found, type, n_cols, index)

    def chosen(self, found: Late) -> RoleChoice:
        """Return how the tensor is rounded."""
        with self._lock:
            if self.choice is None:
                self.choice = self._choose(found)
            return self.choice

    def _choose(self, found: Late) -> RoleChoice:
        target = self.plan.target
        role, type = TensorName.parse(target.name).role, target.type.plain.name
        if found.moments is None:
            why = "as there are no second moments of these inputs"
            return RoleChoice(role, type, (target.name,), None, why=why)
        chosen = choose(
            role,
            self.source,
            [(self.plan, found.moments)],
            lambda name, shape: found.importance,
            self.shrink,
            self.refine,
            self.threads,
            self.rounders,
            one_text=self.one_text,
            stretch=self.stretch,
        )
        return replace(chosen, coupled=self.whole_matrices and chosen.shrink is not None)


class _LateRounder(LazyEncoder):
    def __init__(
        self, rounding: LateRounding, found: Late, type: GGMLType, n_cols: int, index: int
    ):
        super().__init__()
        self._rounding, self._found = rounding, found
        self._type, self._n_cols, self._index = type, n_cols, index

    def _make(self) -> Encoder:
        found, choice = self._found, self._rounding.chosen(self._found)
        if choice.shrink is None or found.moments is None:
            weights = None if found.importance is None else found.importance[self._index]
            return self._rounding.rounders.search(self._type, self._n_cols, weights)
        late = self._rounding
        rounding = Rounding(
            late.plan.target.name,
            found.moments,
            choice.shrink,
            choice.passes,
            late.rounders,
            late.plan.source,
            late.rows,
            choice.stretch,
        )
        return self._to_targets(rounding.encoder(self._type, self._n_cols, self._index))

    def _to_targets(self, encode: Encoder) -> Encoder:
        """Return what rounds rows after moving them."""
        rounding, targets = self._rounding, self._found.targets
        if targets is None:
            return encode
        share = targets.share(some_rows(rounding.source, rounding.plan.source, self._index))
        rounding.shares.append(share)
        if not share:
            return encode
        return lambda x, out: encode(targets.moved(x, share), out)


@dataclass(frozen=True)
class LayerChoices:
    """How the tensors of a role that became `type` were rounded, layer by layer. shares: how far
    their matrices were moved, see `Targets`.
    """

    role: str
    type: str
    choices: tuple[RoleChoice, ...]
    shares: tuple[float, ...] = ()

    def line(self) -> str:
        """Return one line about the choices."""
        n = len(self.choices)
        count = f"{n} tensor{'s' * (n != 1)}"
        start = f"{self.role:<24s} {self.type:<8s} {count:>11s}: "
        rounded = [one for one in self.choices if one.shrink is not None]
        if not rounded:
            return f"{start}search with the importance matrix, {self.choices[0].why}"
        shrinks = sorted({one.shrink for one in rounded if one.shrink is not None})
        passes = sorted({one.passes for one in rounded})
        said = f"shrink {_span(shrinks)}, {_span(passes)} refinement{'s' * (passes != [1])}"
        factors = sorted({one.stretch for one in rounded})
        if factors != [1]:
            said += f", scales x {_span([round(one, 3) for one in factors])}"
        errors = [one.error for one in rounded if one.error]
        if errors:
            mean = float(np.exp(np.mean(np.log(errors))))
            said += f", held-out error x {mean:.3f} of the search"
        if len(rounded) < n:
            said += f"; {n - len(rounded)} by search with the importance matrix"
        if any(one.coupled for one in rounded):
            said += COUPLED
        if self.shares:
            said += f"; moved by x {np.mean(self.shares):.2f} to make up for earlier layers"
        whose = sum((Counter(one.experts) for one in rounded), Counter[str]())
        if whose:
            said += "; moments of experts: "
            said += ", ".join(f"{number} {origin}" for origin, number in whose.items())
        return start + said


class Made(Protocol):
    """How a tensor was rounded, None for one that was not."""

    @property
    def choice(self) -> RoleChoice | None:
        """How the tensor's role was rounded, None if it was searched."""
        ...

    @property
    def shares(self) -> list[float]:
        """How far each matrix was moved to make up for earlier layers, see `Targets`."""
        ...


@dataclass(frozen=True)
class MadeBefore:
    """How a tensor was rounded by an earlier run, or that it is searched."""

    choice: RoleChoice
    shares: list[float] = field(default_factory=list)

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> MadeBefore:
        """Return what `record_of` was made from."""
        choice = dict(record["choice"])
        return cls(RoleChoice(**{**choice, "tensors": tuple(choice["tensors"])}), record["shares"])


def record_of(made: Made | None) -> dict[str, Any] | None:
    """Return how a tensor was rounded as JSON takes it."""
    if made is None or made.choice is None:
        return None
    choice = {**vars(made.choice), "experts": dict(made.choice.experts)}
    return {"choice": choice, "shares": made.shares}


def searched(
    planned: Sequence[PlannedTensor], has_moments: Callable[[PlannedTensor], bool]
) -> dict[str, MadeBefore]:
    """Return, by name of the target, which tensors of a plan the search makes, and why."""
    found = {}
    for plan in planned:
        type, name = plan.target.type.plain, plan.target.name
        if plan.kept or not type.is_quantized:
            continue
        why = "as there are no second moments of these inputs"
        if not guides(type):
            why = UNGUIDED.get(type.name, "")
        elif has_moments(plan):
            continue
        role = TensorName.parse(name).role
        found[name] = MadeBefore(RoleChoice(role, type.name, (name,), None, why=why))
    return found


def layer_choices(roundings: Sequence[Made]) -> list[LayerChoices]:
    """Return the choices by role and type, of tensors that are rounded or searched."""
    found: dict[tuple[str, str], list[RoleChoice]] = defaultdict(list)
    shares: dict[tuple[str, str], list[float]] = defaultdict(list)
    for rounding in roundings:
        if rounding.choice is not None:
            key = rounding.choice.role, rounding.choice.type
            found[key].append(rounding.choice)
            shares[key] += rounding.shares
    return [LayerChoices(*key, tuple(made), tuple(shares[key])) for key, made in found.items()]


def _span(values: Sequence[float]) -> str:
    first, last = values[0], values[-1]
    return f"{first:g}" if first == last else f"{first:g} to {last:g}"
