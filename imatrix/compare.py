"""Compare two importance matrices of the same model."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from ..errors import ImatrixError, printable
from .data import Entry, Imatrix
from .experts import split_experts, with_experts, with_same_names
from .statistics import aligned, cosine


@dataclass(frozen=True)
class TensorComparison:
    """The comparison of the mean squared inputs of one tensor, over the matrices that both have
    seen.

    lowest, cosine: the least and the mean cosine over the matrices; 1 if both are all zeros.
    difference: norm of the difference relative to that of the first, or of the second if the first
    is all zeros. compared, matrices: how many matrices were compared, of how many.
    """

    name: str
    lowest: float
    cosine: float
    difference: float
    compared: int
    matrices: int


@dataclass(frozen=True)
class Comparison:
    """The comparison of two files. `tensors` starts with the worst; only_in_a and only_in_b name
    entries that only one file has.
    """

    a: str
    b: str
    tensors: tuple[TensorComparison, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]

    def as_dict(self) -> dict:
        """Return the comparison for JSON."""
        return asdict(self)


def compare(a: Imatrix, b: Imatrix) -> Comparison:
    """Compare all entries, also those of gate and up of experts that are merged in one of the
    files. Raise ImatrixError naming both files for an entry of another size.
    """
    first, second = with_same_names([with_experts(a), with_experts(b)])
    found = []
    for name, entry in first.entries.items():
        if (other := second.entries.get(name)) is not None:
            n_matrices = max(len(entry.counts), len(other.counts))
            if entry.size != other.size or any(
                len(e.counts) not in (1, n_matrices) for e in (entry, other)
            ):
                raise ImatrixError(
                    f"has {other.size} values in {len(other.counts)} matrices, in {a.path} it has"
                    f" {entry.size} in {len(entry.counts)}",
                    file=b.path,
                    tensor=name,
                )
            found.append(
                _compared(name, split_experts(entry, n_matrices), split_experts(other, n_matrices))
            )
    return Comparison(
        a.path or "",
        b.path or "",
        tuple(sorted(found, key=lambda t: (t.lowest, t.name))),
        *(
            tuple(sorted(x.keys() - y.keys()))
            for x, y in ((first.entries, second.entries), (second.entries, first.entries))
        ),
    )


def comparison_lines(comparison: Comparison, limit: int = 0) -> list[str]:
    """Return a table, of at most `limit` lines if that is positive, and the names that only one
    file has.
    """
    shown = comparison.tensors[:limit] if limit > 0 else comparison.tensors
    rows = [
        (
            printable(t.name),
            f"{t.lowest:.6f}",
            f"{t.cosine:.6f}",
            f"{t.difference:.6f}",
            f"{t.compared}" if t.compared == t.matrices else f"{t.compared} of {t.matrices}",
        )
        for t in shown
    ]
    lines = aligned(
        ("tensor", "lowest cosine", "mean cosine", "difference", "matrices"), rows, left=(0,)
    )
    if len(shown) < len(comparison.tensors):
        lines.append(f"and {len(comparison.tensors) - len(shown)} tensors that are closer")
    for path, names in ((comparison.a, comparison.only_in_a), (comparison.b, comparison.only_in_b)):
        lines += [f"only in {printable(path, 400)}: {printable(name)}" for name in names]
    if comparison.tensors:
        lines.append(
            f"{len(comparison.tensors)} tensors, mean cosine"
            f" {np.mean([t.cosine for t in comparison.tensors]):.6f}, lowest"
            f" {comparison.tensors[0].lowest:.6f}"
        )
    return lines


def _compared(name: str, a: Entry, b: Entry) -> TensorComparison:
    seen = (a.counts > 0) & (b.counts > 0)
    x, y = a.means[seen], b.means[seen]
    cosines = [cosine(row, other) if row.any() or other.any() else 1.0 for row, other in zip(x, y)]
    norm = float(np.linalg.norm(x)) or float(np.linalg.norm(y))
    difference = float(np.linalg.norm(x - y)) / norm if norm else 0.0
    mean = float(np.mean(cosines)) if cosines else 0.0
    return TensorComparison(
        name, min(cosines, default=0.0), mean, difference, len(cosines), len(a.counts)
    )
