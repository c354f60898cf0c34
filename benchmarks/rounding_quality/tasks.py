"""What is made of each model: the types, guides and threads of its files."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

GUIDES = ("hessian", "imatrix")
# Seconds for rounding a million weights with rows of 512 on one core; others take about 2.
_SLOW = "IQ1_M 9 IQ1_S 6.7 IQ2_S 5.6 IQ4_KSS 4.8 IQ2_KT 4.8 IQ3_S 4.5 IQ4_KT 4.3 IQ1_KT 3.4"
_SLOW += " IQ3_KT 3.3 IQ5_KS 3.3 IQ2_XS 3.2 IQ4_KS 3.1 IQ2_KL 3 IQ3_XXS 2.8 IQ5_K 2.6 IQ4_K 2.6"
_FAST = "IQ2_K 1 Q5_1 0.9 NVFP4 0.9 Q4_1 0.8 Q5_0 0.8 IQ4_NL 0.7 Q4_0 0.6 TQ1_0 0.5 TQ2_0 0.5"
_FAST += " Q2_0 0.5 IQ2_BN 0.4 Q1_0_G128 0.4 MXFP4 0.3"
_WORDS = f"{_SLOW} {_FAST}".split()
_SECONDS: dict[str, float] = dict(zip(_WORDS[::2], map(float, _WORDS[1::2]), strict=True))
_OTHER = 2.0
_NEAR_TARGET = 0.6  # bits per weight
_TURN = 25.0  # seconds that a file should take at most, by using more threads


@dataclass(frozen=True)
class Settings:
    """How a run measures; see the options of `better_bits.py`. `calibrate`: texts."""

    work: Path
    texts: list[str]
    calibrate: list[str]
    calibration_chunks: int
    chunks: int
    tasks: int
    shrink: float | None
    jobs: int
    judges: int
    round_jobs: int
    only_gpus: bool
    devices: list[str]


@dataclass(frozen=True)
class Task:
    """A model that becomes a type with a guide. rank: smaller ones come first."""

    model: str
    name: str
    guide: str
    threads: int
    rank: int

    @property
    def is_for_gpu(self) -> bool:
        """Return whether GPUs have kernels that round the type, or the mix, with moments."""
        from iqforge.formats.types import ggml_type
        from iqforge.quantize.rounding.cuda.place import rounder_there
        from iqforge.quantize.rounding.ternary_rounder import TWINS

        if self.guide != "hessian":
            return False
        if self.has_target:
            return True
        name = self.name
        if name.startswith("mix:"):
            name = name.removeprefix("mix:").removesuffix("_M")
        return rounder_there(ggml_type(TWINS.get(name, name))) is not None

    @property
    def has_target(self) -> bool:
        """Return whether types are chosen for a size."""
        return self.name.startswith("bpw:")

    def out(self, work: Path) -> Path:
        """Return the path of this task's GGUF file in the folder `work`."""
        return work / f"{self.name.replace(':', '-')}-{self.guide}.gguf"

    def chosen(self, work: Path) -> Path:
        """Return the path of the types that were chosen for a size."""
        return self.out(work).with_suffix(".types.json")


def seconds_of(name: str) -> float:
    """Return the seconds that rounding a million weights to a type takes on one core, about."""
    return _SECONDS.get(name, _OTHER)


def tasks_of(model: str, names: list[str], done: set[tuple[str, str]], jobs: int) -> list[Task]:
    """Return what is missing of a model in the order of `names`, with threads by how long it takes,
    at most `jobs`.
    """
    millions = os.path.getsize(model) / 2e6
    found = []
    for rank, name in enumerate(names):
        plain = ":" not in name
        cost = seconds_of(name) * millions * (1 if plain else 1.5)
        for guide in GUIDES:
            if (name, guide) not in done:
                slow = guide == "hessian" or name.endswith("_KT")
                took = cost if guide == "hessian" else cost / 4 if slow else cost / 10
                threads = max(1, min(8, jobs, math.ceil(took / _TURN)))
                found.append(Task(model, name, guide, threads, rank))
    return found


def target_types(bpw: float | None = None) -> list[str]:
    """Return the types that are chosen from for a size, or those of about `bpw` that are guided."""
    from iqforge.formats.types import ggml_type
    from iqforge.quantize.plan.budget import DEFAULT_TYPES, SHORT_ROW_TYPES
    from iqforge.quantize.rounding.methods import guides

    if bpw is None:
        return [*DEFAULT_TYPES, *SHORT_ROW_TYPES]
    types = [type for type in map(ggml_type, DEFAULT_TYPES) if guides(type)]
    sizes = {type.name: 8 * type.block_bytes / type.block_size for type in types}
    return [name for name, size in sizes.items() if abs(size - bpw) < _NEAR_TARGET]
