"""Count how many tokens each expert saw. An importance matrix says little about experts that saw
few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..formats.tensor_names import TensorName
from .data import Entry, Imatrix
from .experts import with_experts
from .options import DEFAULT_LEAST

_MOST_NAMED = 12  # experts, in a summary


@dataclass(frozen=True)
class LayerCoverage:
    """Token counts of the experts of one layer: `tokens` int64[n_experts], the same for all
    `tensors`.
    """

    layer: str
    tensors: tuple[str, ...]
    tokens: np.ndarray


@dataclass(frozen=True)
class Coverage:
    """Token counts of all layers with experts.

    least: experts with fewer tokens are cold. counts_calls: the counts come from a `.dat` file,
    which only tells which experts saw nothing.
    """

    layers: tuple[LayerCoverage, ...]
    least: int
    counts_calls: bool

    @property
    def n_experts(self) -> int:
        """Return the number of experts in all layers."""
        return sum(len(layer.tokens) for layer in self.layers)

    def cold(self, layer: LayerCoverage) -> np.ndarray:
        """Return the indices of experts that saw fewer tokens than `least`, the coldest first; for
        a file that counts calls, of those that saw nothing.
        """
        cold = np.flatnonzero(layer.tokens < (1 if self.counts_calls else self.least))
        return cold[np.argsort(layer.tokens[cold], kind="stable")]

    def _named(self) -> Iterator[str]:
        for layer in self.layers:
            for expert in self.cold(layer):
                yield f"{layer.layer} expert {expert} ({layer.tokens[expert]})"

    def summary(self) -> list[str]:
        """Return one or two lines; none without experts."""
        if not self.layers:
            return []
        cold, unseen = (
            list(self._named()),
            sum(int((layer.tokens == 0).sum()) for layer in self.layers),
        )
        n_layers = len({layer.layer for layer in self.layers})
        of_all = f"{self.n_experts} experts in {n_layers} layer{'s' if n_layers > 1 else ''}"
        if self.counts_calls:
            return [
                f"{unseen} of {of_all} saw no input; how much the others saw is not in a .dat file"
            ]
        if not cold:
            coldest = min(self.layers, key=lambda layer: layer.tokens.min())
            return [
                f"each of {of_all} saw at least {coldest.tokens.min()} tokens (the least in"
                f" {coldest.layer})"
            ]
        more = f", and {len(cold) - _MOST_NAMED} more" if len(cold) > _MOST_NAMED else ""
        return [
            f"{len(cold)} of {of_all} saw fewer than {self.least} tokens, {unseen} of them none:",
            f"  {', '.join(cold[:_MOST_NAMED])}{more}",
        ]

    def table(self) -> list[str]:
        """Return a line per layer: the number of experts, of unseen and of cold ones; least, median
        and most tokens; the cold experts.
        """
        unit = "calls" if self.counts_calls else "tokens"
        lines = [
            f"{'layer':<10} {'tensors':<20} {'experts':>7} {'unseen':>6} {'cold':>5} {'least':>9}"
            f" {'median':>9} {'most':>9}  cold experts ({unit})"
        ]
        for layer in self.layers:
            tokens, cold = layer.tokens, self.cold(layer)
            named = " ".join(f"{expert}({tokens[expert]})" for expert in cold)
            lines.append(
                f"{layer.layer:<10} {','.join(layer.tensors):<20} {len(tokens):7d}"
                f" {int((tokens == 0).sum()):6d} {len(cold):5d} {tokens.min():9d}"
                f" {int(np.median(tokens)):9d} {tokens.max():9d}  {named}".rstrip()
            )
        return lines

    def as_dict(self) -> dict:
        """Return the coverage for JSON."""
        layers = [
            {
                "layer": layer.layer,
                "tensors": list(layer.tensors),
                "tokens": layer.tokens.tolist(),
                "cold": self.cold(layer).tolist(),
            }
            for layer in self.layers
        ]
        return {
            "least": self.least,
            "counts": "calls" if self.counts_calls else "tokens",
            "experts": self.n_experts,
            "layers": layers,
        }


def measure_coverage(imatrix: Imatrix, least: int = DEFAULT_LEAST) -> Coverage:
    """Return the coverage of all entries of experts. Tensors of a layer that saw the same rows are
    reported together.
    """
    groups: dict[tuple, list[str]] = {}
    numbers: dict[str, int] = {}  # of layers
    entries = with_experts(imatrix).entries
    filled = _filled_experts(entries)
    for name, entry in entries.items():
        parsed = TensorName.parse(name)
        if len(entry.counts) > 1 and parsed.is_stacked:
            counts = entry.counts.copy()
            if (unseen := filled.get(parsed.prefix)) is not None and len(unseen) == len(counts):
                counts[unseen] = 0
            key = parsed.prefix, tuple(counts.tolist())
            groups.setdefault(key, []).append(parsed.expert_part)
            numbers[parsed.prefix] = -1 if parsed.layer is None else parsed.layer
    ordered = sorted(groups, key=lambda key: (numbers[key[0]], key[0]))
    layers = tuple(
        LayerCoverage(layer, tuple(groups[layer, counts]), np.array(counts))
        for layer, counts in ordered
    )
    return Coverage(layers, least, imatrix.counts_calls)


def _filled_experts(entries: Mapping[str, Entry]) -> dict[str, np.ndarray]:
    """Return, by the prefix of their layer, bool[n_experts]: experts that saw nothing, although
    they have counts, as the collector filled them in (`cold_experts`).

    What it fills in for an unseen expert's down projection has the same value in every column,
    which inputs do not have.
    """
    found = {}
    for name, entry in entries.items():
        parsed = TensorName.parse(name)
        if parsed.role == "ffn_down_exps" and len(entry.counts) > 1 and entry.sums.shape[1] > 1:
            uniform = (entry.sums == entry.sums[:, :1]).all(axis=1)
            if not uniform.all():
                found[parsed.prefix] = uniform
    return found
