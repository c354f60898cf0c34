"""Tables of what `better_bits.py` measured, by model, by type and by family."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iqforge.formats.types import TYPES
from iqforge.quantize.rounding.methods import UNGUIDED

from rounding_quality.judging import read_results

MIXES = [
    "mix:IQ4_K",
    "bpw:3",
    "mix:Q4_K_M",
    "mix:IQ2_K",
    "mix:IQ3_K",
    "bpw:2.5",
    "bpw:3.5",
    "bpw:4",
]
# Types whose gains are given as one figure. All others form the last family.
FAMILIES = {
    "2 and 3 bits": ["IQ3_K", "Q2_K", "IQ2_KS", "IQ2_K", "IQ2_KL", "IQ3_KS", "Q3_K"],
    "4 and 5 bits": ["IQ4_K", "Q4_K", "IQ4_KS", "IQ4_XS", "IQ4_NL", "IQ5_K", "IQ5_KS", "Q5_K"]
    + ["IQ4_KSS"],
    "trellis": ["IQ2_KT", "IQ4_KT", "IQ3_KT", "IQ1_KT"],
    "grids": ["IQ2_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ2_S", "IQ1_S", "IQ1_M"],
    "mixes and targets": MIXES,
}
OTHERS = "others"


def families() -> dict[str, list[str]]:
    """Return the plain types that second moments guide, and mixes, by family."""
    types = [t for t in TYPES.values() if t.is_quantized and t.base is None]
    types.sort(key=lambda t: -t.bits_per_weight)
    known = {name for names in FAMILIES.values() for name in names}
    rest = [t.name for t in types if t.name not in UNGUIDED and t.name not in known]
    return FAMILIES | {OTHERS: rest}


def in_turns() -> list[str]:
    """Return all types and mixes: the first of every family, then the second of each, and so on."""
    by_turn = itertools.zip_longest(*families().values())
    return [name for turn in by_turn for name in turn if name is not None]


def print_tables(folders: list[Path]) -> None:
    """Print a table for each model, then one of types and one of families over all models."""
    pairs: dict[str, dict[str, Pair]] = {}  # by type and model
    for work in folders:
        found = {(one["type"], one["guide"]): one for one in read_results(work)}
        for name, guide in found:
            if guide == "hessian" and (name, "imatrix") in found:
                pair = Pair(found[name, "imatrix"], found[name, "hessian"])
                pairs.setdefault(name, {})[work.name] = pair
    families_of = families()
    order = [name for names in families_of.values() for name in names if name in pairs]
    for work in folders:
        rows = [(name, pairs[name][work.name]) for name in order if work.name in pairs[name]]
        if rows:
            print_model(work.name, rows)
    print_means("type", [(name, [pairs[name]]) for name in order], folders)
    by_family = {
        family: [pairs[name] for name in names if name in pairs]
        for family, names in families_of.items()
    }
    print_means("family", list(by_family.items()), folders)


@dataclass(frozen=True)
class Pair:
    """What was measured of a model and type, with importances and with second moments."""

    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def ratios(self) -> list[float]:
        """Return the ratio of the KL divergences on each text."""
        return [kld / self.before["kld"][text] for text, kld in self.after["kld"].items()]

    @property
    def top(self) -> list[float]:
        """Return by how much more often the same token is the most probable one, on each text."""
        return [top - self.before["top"][text] for text, top in self.after["top"].items()]

    @property
    def tasks(self) -> tuple[int, int, int]:
        """Return how many items are right only before, right only after, and all."""
        lost = gained = n = 0
        for text, answers in self.after.get("tasks", {}).items():
            both = list(zip(self.before["tasks"][text], answers, strict=True))
            lost, gained = lost + both.count(("1", "0")), gained + both.count(("0", "1"))
            n += len(both)
        return lost, gained, n


def print_model(name: str, rows: list[tuple[str, Pair]]) -> None:
    """Print KL divergences with importances, and the ratios, by type and text."""
    texts = list(rows[0][1].after["kld"])
    print(f"\n{name}\n\n| type | " + " | ".join(texts) + " | mean | worst | top | tasks |")
    print("|---" * (len(texts) + 5) + "|")
    for type, pair in rows:
        ratios = dict(zip(pair.after["kld"], pair.ratios, strict=True))
        cells = [f"{pair.before['kld'][text]:.5f} x {ratio:.3f}" for text, ratio in ratios.items()]
        cells += [f"{mean(pair.ratios):.3f}", f"{max(pair.ratios):.3f}"]
        print(f"| {type} | " + " | ".join([*cells, *gains([pair])]) + " |")


def print_means(
    what: str, found: list[tuple[str, list[dict[str, Pair]]]], folders: list[Path]
) -> None:
    """Print geometric means of each type or family by model and over all models, and of all."""
    models = [work.name for work in folders]
    head = [what, *models, "mean", "worst", "top", "tasks"]
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    everything = [by_model for _, types in found for by_model in types]
    for name, types in [*found, ("all", everything)]:
        if not types:
            continue
        cells = []
        for model in models:
            ratios = [ratio for one in types if model in one for ratio in one[model].ratios]
            cells.append(f"{mean(ratios):.3f}" if ratios else "-")
        pairs = [pair for one in types for pair in one.values()]
        ratios = [ratio for pair in pairs for ratio in pair.ratios]
        cells += [f"x {mean(ratios):.3f}", f"x {max(ratios):.3f}", *gains(pairs)]
        print(f"| {name} | " + " | ".join(cells) + " |")


def gains(pairs: list[Pair]) -> list[str]:
    """Return how much more often the most probable token is the base's, in percentage points, and
    the right answers to tasks gained, in percentage points with a standard error.
    """
    top = [one for pair in pairs for one in pair.top]
    lost, gained, n = (sum(counts) for counts in zip(*(pair.tasks for pair in pairs), strict=True))
    tasks = "-"
    if n:
        error = math.sqrt(max(0.0, lost + gained - (gained - lost) ** 2 / n)) / n
        tasks = f"{100 * (gained - lost) / n:+.2f} ± {100 * error:.2f} %"
    return [f"{100 * sum(top) / len(top):+.2f} %", tasks]


def mean(ratios: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
