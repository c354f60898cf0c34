"""Choose shrinking and refinement for each role and type by held-out moments.

Some rows of some tensors of each role are rounded with every combination. The held-out error is
tr(dW H dW^T) with the moments of text that no rounding has seen, relative to the error of the
search with the importance matrix. Of the combinations whose geometric mean is within 3 % of the
least, the one that shrinks most wins, as it loses less on other kinds of text. Where nothing is
below 1, the search with the importance matrix is used. Held-out text of the only kind there is says
nothing of other kinds, so with one text correlations are always shrunk by `ONE_TEXT_SHRINK`, and
types of fewer than `ONE_TEXT_BITS` (Q1_0) are searched. Errors are of rows that are not stretched.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ...formats.source import Source
from ...formats.tensor_names import TensorName
from ..plan.plan import PlannedTensor
from .methods import ON_CPU, UNGUIDED, Rounders, guides
from .moments import MomentsLookup, Rounding
from .rows import RowMetrics
from .stretch import factor_for
from .tensor_moments import TensorMoments
from .trials import in_threads, trials

SHRINKS = (0.1, 0.25, 0.5, 0.75)
PASSES = 2
ONE_TEXT_SHRINK, ONE_TEXT_BITS = 0.75, 1.5
DEFAULT_SHRINK, DEFAULT_PASSES = 0.3, 1  # without held-out text
COUPLED = "; rows together"
_MATRICES = 4  # of a role that are tried
_TOLERANCE = 1.03
_TOKENS_PER_COLUMN = 8  # below which nothing is refined


@dataclass(frozen=True)
class RoleChoice:
    """How the tensors of a role that become `type` are rounded.

    shrink: None for the search with the importance matrix. error: the held-out error relative to
    that search, None if there is no held-out text. matrices: how many were tried. why: why the
    search is used, "" where it is not. experts: how many matrices of tensors of experts are rounded
    by whose moments. coupled: whether rows of some of the tensors are rounded together. stretch:
    what scales are multiplied by in the end, see `stretch.py`.
    """

    role: str
    type: str
    tensors: tuple[str, ...]
    shrink: float | None
    passes: int = 0
    error: float | None = None
    matrices: int = 0
    why: str = ""
    experts: dict[str, int] = field(default_factory=dict)
    coupled: bool = False
    stretch: float = 1.0

    def line(self) -> str:
        """Return one line about the choice."""
        count = f"{len(self.tensors)} tensor{'s' * (len(self.tensors) != 1)}"
        start = f"{self.role:<24s} {self.type:<8s} {count:>11s}: "
        if self.shrink is None:
            return f"{start}search with the importance matrix, {self.why}"
        judged = (
            "no held-out text"
            if self.error is None
            else f"held-out error x {self.error:.3f} of the search ({self.matrices} tried)"
        )
        if self.coupled:
            judged += COUPLED
        whose = ", ".join(f"{n} {origin}" for origin, n in self.experts.items())
        experts = f"; moments of experts: {whose}" if whose else ""
        passes = f"{self.passes} refinement{'s' * (self.passes != 1)}"
        if self.stretch != 1:
            passes += f", scales x {self.stretch:.3f}"
        return f"{start}shrink {self.shrink:g}, {passes}, {judged}{experts}"


@dataclass
class RoundingPlan:
    """How tensors are rounded, by name of the target; others are searched. `choices` say why."""

    roundings: dict[str, Rounding] = field(default_factory=dict)
    choices: list[RoleChoice] = field(default_factory=list)


def plan_rounding(
    source: Source,
    planned: Sequence[PlannedTensor],
    moments: MomentsLookup,
    importance: Callable[[str, tuple[int, ...]], np.ndarray | None] | None,
    *,
    shrink: float | None = None,
    refine: bool = True,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
    rounders: Rounders = ON_CPU,
    one_text: bool = False,
    rows: RowMetrics | None = None,
    stretch: bool = True,
) -> RoundingPlan:
    """Return how each tensor of a plan is rounded.

    shrink: this instead of a choice; refine: whether codes and scales may be refined. progress:
    called with (combinations done, all). rounders: where rows are rounded. one_text: whether the
    moments are of a single text. rows: how rows are rounded together, None for each on its own.
    stretch: whether scales are multiplied in the end. Reads some rows of the source.
    """
    groups: dict[tuple[str, str], list[PlannedTensor]] = defaultdict(list)
    for plan in planned:
        if not plan.kept and plan.target.type.is_quantized:
            role = TensorName.parse(plan.target.name).role
            groups[role, plan.target.type.plain.name].append(plan)
    made = RoundingPlan()
    for done, ((role, type), plans) in enumerate(groups.items()):
        if progress is not None:
            progress(done, len(groups))
        found = [(plan, moments(plan.source.name, plan.source.shape)) for plan in plans]
        usable = [(plan, m) for plan, m in found if m is not None and not plan.symmetric]
        left = tuple(plan.target.name for plan, m in found if m is None or plan.symmetric)
        if not guides(plans[0].target.type):
            names = tuple(plan.target.name for plan in plans)
            why = UNGUIDED.get(plans[0].target.type.plain.name, "")
            made.choices.append(RoleChoice(role, type, names, None, why=why))
            continue
        if left:
            why = "as there are no second moments of these inputs"
            made.choices.append(RoleChoice(role, type, left, None, why=why))
        if not usable:
            continue
        choice = choose(
            role,
            source,
            usable,
            importance,
            shrink,
            refine,
            threads,
            rounders,
            one_text=one_text,
            stretch=stretch,
        )
        coupled = rows is not None and any(rows.couples(plan.source) for plan, _ in usable)
        if choice.shrink is not None and coupled:
            choice = replace(choice, coupled=True)
        made.choices.append(choice)
        if choice.shrink is not None:
            for plan, m in usable:
                name = plan.target.name
                made.roundings[name] = Rounding(
                    name,
                    m,
                    choice.shrink,
                    choice.passes,
                    rounders,
                    plan.source,
                    rows,
                    choice.stretch,
                )
    if progress is not None:
        progress(len(groups), len(groups))
    return made


def choose(
    role: str,
    source: Source,
    usable: Sequence[tuple[PlannedTensor, TensorMoments]],
    importance: Callable[[str, tuple[int, ...]], np.ndarray | None] | None,
    shrink: float | None,
    refine: bool,
    threads: int = 1,
    rounders: Rounders = ON_CPU,
    one_text: bool = False,
    stretch: bool = True,
) -> RoleChoice:
    """Return how tensors of a role that become one type are rounded; see `plan_rounding`."""
    type = usable[0][0].target.type.plain
    names = tuple(plan.target.name for plan, _ in usable)
    if shrink is None and one_text:
        if type.bits_per_weight < ONE_TEXT_BITS:
            why = f"as one text says too little for {type.bits_per_weight:g} bits"
            return RoleChoice(role, type.name, names, None, why=why)
        shrink = ONE_TEXT_SHRINK
    shrinks = SHRINKS if shrink is None else (shrink,)
    tried_of = [(plan.source, m) for plan, m in usable]
    found = list(trials(source, tried_of, importance, _MATRICES, rounders=rounders))
    few = any(trial.tokens < _TOKENS_PER_COLUMN * trial.x.shape[1] for trial in found)
    if not found:  # nothing is held out
        tokens = [m.tokens(i) for plan, m in usable for i in range(plan.source.n_matrices)]
        few = max(tokens) < _TOKENS_PER_COLUMN * usable[0][0].source.n_cols
    passes = PASSES if refine else 0
    work = [partial(trial.errors, type, one, passes) for trial in found for one in shrinks]
    errors = in_threads(work, threads, usable[0][0].source.n_cols)
    tried = [np.array(errors[at : at + len(shrinks)]) for at in range(0, len(work), len(shrinks))]
    most = 0 if few or not refine else PASSES
    if not tried:
        passes = min(DEFAULT_PASSES, most) if refine else 0
        used = DEFAULT_SHRINK if shrink is None else shrink
        return RoleChoice(role, type.name, names, used, passes, experts=_origins(usable))
    means = np.mean(tried, axis=0)[:, 0, : most + 1]
    enough = np.flatnonzero(means.min(axis=1) <= means.min() + np.log(_TOLERANCE))
    row = enough[np.argmax([shrinks[i] for i in enough])]
    best = row, int(np.argmin(means[row]))
    error = float(np.exp(means[best]))
    if error >= 1:
        why = f"as rounding with second moments is no better on held-out text (x {error:.3f})"
        return RoleChoice(role, type.name, names, None, error=error, matrices=len(tried), why=why)
    missing = [one[best[0], 1, best[1]] for one in tried]
    return RoleChoice(
        role,
        type.name,
        names,
        shrinks[best[0]],
        int(best[1]),
        error,
        len(tried),
        experts=_origins(usable),
        stretch=factor_for(type, missing) if stretch else 1.0,
    )


def _origins(usable: Sequence[tuple[PlannedTensor, TensorMoments]]) -> dict[str, int]:
    """Return how many matrices of tensors of experts have moments of which origin."""
    return Counter(
        moments.origin(index)
        for plan, moments in usable
        if "exps" in TensorName.parse(plan.target.name).role
        for index in range(plan.source.n_matrices)
    )
