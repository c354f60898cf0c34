"""Compute statistics of an importance matrix per tensor and per layer: the figures of llama.cpp's
`--show-statistics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import printable
from ..formats.tensor_names import TensorName
from .data import Entry, Imatrix
from .experts import with_experts

_ACTIVE = 1e-5  # mean squares above count as active


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of a, the mean squared inputs of one tensor: all columns of all matrices that saw
    anything.

    layer is None outside of layers. total, minimum, maximum, mean, deviation: of a; active:
    percentage of a above 1e-5; n: how many; entropy: that of a / sum(a) in bits, and normed to
    log2(n) in percent; zd: percentage more than a deviation above the mean; similarity: cosine
    between the raw sums and those of this tensor in the layer before, 0 if there is none.
    """

    name: str
    layer: int | None
    tensor: str
    total: float
    minimum: float
    maximum: float
    mean: float
    deviation: float
    active: float
    n: int
    entropy: float
    normed_entropy: float
    zd: float
    similarity: float


@dataclass(frozen=True)
class LayerStatistics:
    """Means over the tensors of a layer, weighted by their `n`."""

    layer: int
    total: float
    zd: float
    similarity: float


def tensor_statistics(imatrix: Imatrix) -> list[TensorStatistics]:
    """Return statistics by kind of tensor, then by falling total; none of unseen entries."""
    entries = with_experts(imatrix).entries
    found = [
        _statistics(name, entry, entries) for name, entry in entries.items() if entry.counts.any()
    ]
    return sorted(found, key=lambda s: (s.tensor, -s.total, s.name))


def layer_statistics(tensors: Sequence[TensorStatistics]) -> list[LayerStatistics]:
    """Return the statistics of all layers, in order."""
    found = []
    for layer in sorted({s.layer for s in tensors if s.layer is not None}):
        own = [s for s in tensors if s.layer == layer]
        n = [s.n for s in own]
        found.append(
            LayerStatistics(
                layer,
                *(
                    float(np.average([getattr(s, what) for s in own], weights=n))
                    for what in ("total", "zd", "similarity")
                ),
            )
        )
    return found


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the cosine of two vectors; 0 if one of them is all zeros."""
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.vdot(a, b)) / norm if norm else 0.0


def statistics_lines(tensors: Sequence[TensorStatistics], path: str | None) -> list[str]:
    """Return both tables of an importance matrix at `path`, with columns in the order of
    llama.cpp.
    """
    titles = (
        "Layer",
        "Tensor",
        "Σ(Act²)",
        "Min",
        "Max",
        "μ",
        "σ",
        "% Active",
        "N",
        "Entropy",
        "E (norm)",
        "ZD",
        "CosSim",
    )
    rows = [
        (
            _layer(s.layer),
            printable(s.tensor),
            f"{s.total:.2f}",
            f"{s.minimum:.4f}",
            f"{s.maximum:.4f}",
            f"{s.mean:.4f}",
            f"{s.deviation:.4f}",
            f"{s.active:.2f}%",
            str(s.n),
            f"{s.entropy:.4f}",
            f"{s.normed_entropy:.2f}%",
            f"{s.zd:.2f}%",
            f"{s.similarity:.4f}",
        )
        for s in tensors
    ]
    layers = [
        (str(s.layer), f"{s.total:.2f}", f"{s.zd:.4f}%", f"{s.similarity:.4f}")
        for s in layer_statistics(tensors)
    ]
    return [
        f"statistics of {printable(path or 'what was collected')} ({len(tensors)} tensors)",
        "",
        *aligned(titles, rows, left=(1,)),
        "",
        f"averages per layer, weighted by N ({len(layers)} layers)",
        "",
        *aligned(("Layer", "μΣ(Act²)", "μZD", "μCosSim"), layers),
    ]


def aligned(
    titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()
) -> list[str]:
    """Return the lines of a table; columns `left` are aligned to the left."""
    widths = [max(len(row[i]) for row in (titles, *rows)) for i in range(len(titles))]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in (titles, *rows)
    ]


def _statistics(name: str, entry: Entry, entries: Mapping[str, Entry]) -> TensorStatistics:
    parsed = TensorName.parse(name)
    layer, tensor, before = None, name, None
    if parsed.is_weight:
        layer, tensor = parsed.layer, parsed.stem
        before = None if layer is None else entries.get(parsed.in_layer(layer - 1))
    a = (entry.sums / np.maximum(entry.counts, 1)[:, None])[entry.counts > 0].ravel()
    mean, total = float(a.mean()), float(a.sum())
    deviation = max(0.0, float((a * a).mean()) - mean**2) ** 0.5
    p = a[a > 0] / total if total > 0 else a[:0]
    entropy = float(-(p * np.log2(p)).sum()) + 0.0  # never -0
    same = before if before is not None and before.size == entry.size else None
    return TensorStatistics(
        name,
        layer,
        tensor,
        total,
        float(a.min()),
        float(a.max()),
        mean,
        deviation,
        100 * float((a > _ACTIVE).mean()),
        a.size,
        entropy,
        100 * entropy / math.log2(a.size) if a.size > 1 else 0.0,
        100 * float((a - mean > deviation).mean()) if deviation else 0.0,
        0.0 if same is None else cosine(entry.sums.ravel(), same.sums.ravel()),
    )


def _layer(layer: int | None) -> str:
    return "-" if layer is None else str(layer)
