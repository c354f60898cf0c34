"""Figures of a file of second moments, one line per input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...errors import printable
from .data import FOLDS
from .file import MomentsFile

_LARGEST = 2048  # columns up to which eigenvalues are computed


@dataclass(frozen=True)
class InputFigures:
    """Figures of an input: tokens of each fold (of experts: the fewest that one saw), columns that
    are always zero, the condition number of the correlations (None for a wide input), and how many
    directions the vectors fill (trace^2 / sum of squared elements). Both are of the `fit` fold; of
    experts, the worst one counts.
    """

    name: str
    n_tensors: int
    n_matrices: int
    n_cols: int
    tokens: tuple[int, int]
    fewest: tuple[int, int]
    dead: int
    condition: float | None
    directions: float


def input_figures(file: MomentsFile) -> Iterator[InputFigures]:
    """Yield the figures of every input of a file."""
    for name, one in file.inputs.items():
        fit, hold = (file.counts(name, fold) for fold in FOLDS)
        dead = int((file.diagonal(name, FOLDS[0]) == 0).sum())
        conditions, directions = [], []
        for index in range(one.n_matrices):
            if fit[index] == 0:
                continue
            h = file.matrix(name, FOLDS[0], index)
            directions.append(float(np.trace(h) ** 2 / max(float((h * h).sum()), 1e-300)))
            if one.n_cols <= _LARGEST:
                conditions.append(_condition(h))
        yield InputFigures(
            name,
            len(one.tensors),
            one.n_matrices,
            one.n_cols,
            (int(fit.sum()), int(hold.sum())),
            (int(fit.min()), int(hold.min())),
            dead,
            max(conditions) if conditions else None,
            min(directions, default=0.0),
        )


def _condition(h: np.ndarray) -> float:
    """Return the condition number of the correlations of the columns that are not always zero."""
    scale = np.sqrt(np.diagonal(h))
    alive = scale > 0
    if not alive.any():
        return float("inf")
    values = np.linalg.eigvalsh(h[np.ix_(alive, alive)] / np.outer(scale[alive], scale[alive]))
    return float(values[-1] / values[0]) if values[0] > 0 else float("inf")


def figure_lines(file: MomentsFile) -> Iterator[str]:
    """Yield a table of all inputs, and a line for each text."""
    yield (
        f"{'input':<34s} {'tensors':>7s} {'matrices':>8s} {'columns':>7s} {'fit':>9s} {'hold':>8s}"
        f" {'fewest':>7s} {'dead':>5s} {'directions':>10s} {'condition':>9s}"
    )
    for one in input_figures(file):
        condition = "-" if one.condition is None else f"{one.condition:.2g}"
        yield (
            f"{printable(one.name):<34s} {one.n_tensors:7d} {one.n_matrices:8d} {one.n_cols:7d}"
            f" {one.tokens[0]:9d} {one.tokens[1]:8d} {one.fewest[0]:7d} {one.dead:5d}"
            f" {one.directions:10.1f} {condition:>9s}"
        )
    for text in file.texts:
        yield (
            f"text: {printable(str(text.get('name') or '(given as text)'), 200)},"
            f" {text.get('tokens', 0)} tokens, sha256 {str(text.get('sha256', ''))[:16]}"
        )
    if len(file.texts) == 1:
        yield "note: there is one text, so that quantize shrinks correlations by 0.75"
