"""What `iqforge auto` is going to do: its stages, with the time and the disk space that they
will take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UsageError, printable
from ..formats.commands.progress import duration
from ..formats.source import Source
from ..quantize.plan.budget import DEFAULT_TYPES, SAMPLED_ROWS
from ..quantize.plan.size_range import SizeRange
from ..quantize.plan.size_target import parse_size
from .auto_options import Target
from .figures import size_of

if TYPE_CHECKING:
    from ..runtime.options import LoadOptions

_COPIED, _FETCHED = 250e6, 50e6  # bytes/s that converting reaches, of a disk and of the Hub
_BYTES_PER_TOKEN = 4.0
_MOST_PROBES = 48  # measurements of sensitivities: more layers are measured together
PROBE_TOKENS = 4096  # that each of them evaluates
PROBE_BYTES = int(PROBE_TOKENS * _BYTES_PER_TOKEN)  # of text
# Times of searches, compared with IQ4_K's: docs/benchmarks/quantizers.md.
_COSTS = {"IQ1_KT": 5.5, "IQ2_KT": 6.5, "IQ3_KT": 10.0, "IQ4_KT": 15.0}
_OTHER_COST = 0.7
_MARGIN = 0.04  # of a GPU's memory, for the driver and for what torch keeps
_LEAST_MARGIN = 512 << 20


@dataclass(frozen=True)
class Aim:
    """A target in numbers. Either `n_bytes` of the file or `bpw` is set. `why`: how the number
    comes about.
    """

    n_bytes: int | None
    bpw: float | None
    why: str = ""

    def file_bytes(self, sizes: SizeRange) -> int:
        """Return about how large the file will be, if it can have one of these sizes."""
        wanted = self.n_bytes
        if wanted is None:
            wanted = sizes.files[0] - sizes.tensors[0] + int((self.bpw or 0) * sizes.n_elements / 8)
        return min(wanted, sizes.files[1])


@dataclass(frozen=True)
class Planned:
    """A stage that is to come, or that an earlier run has finished."""

    name: str
    title: str
    seconds: float
    n_bytes: int
    is_done: bool = False


def aim_of(target: Target, api, source: str, load: LoadOptions) -> Aim:
    """Return the numbers of a target. For a GPU the model's cache and buffers are subtracted, so
    that weights of the file and they fit together. Raise UsageError if nothing is left for weights.
    """
    if target.bpw is not None:
        return Aim(None, target.bpw)
    if target.size is not None:
        return Aim(parse_size(target.size), None)
    memory = parse_size(target.gpu or 0)
    with api.load_model(source, "cpu") as model:
        found = model.memory(context=target.context)
    others = sum(one.cache + one.compute for one in found)
    margin = max(_LEAST_MARGIN, int(_MARGIN * memory))
    left = memory - others - margin
    why = (
        f"{size_of(memory)} of the GPU, less {size_of(others)} for a context of"
        f" {target.context:,} tokens and {size_of(margin)} for the driver"
    )
    if left <= 0:
        raise UsageError(f"nothing is left for weights: {why}")
    return Aim(left, None, why)


def flops_per_second(device: str) -> float:
    """Return about how fast float32 matrices are multiplied on a device."""
    import torch

    n = 1024 if device == "cpu" else 8192
    a = torch.ones(n, n, device=device)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        (a @ a).sum().item()
        best = min(best, time.perf_counter() - started)
    return 2 * n**3 / best


def active_parameters(source: Source) -> float:
    """Return the weights that a token is multiplied with: of experts those that are used."""
    metadata = source.metadata
    name = str(metadata["general.architecture"].data)

    def number(key: str) -> float:
        value = metadata.get(f"{name}.{key}")
        found = 0 if value is None else np.max(value.data)
        return float(found)

    n, used = number("expert_count"), number("expert_used_count")
    share = used / n if n and used else 1.0
    return sum(
        tensor.n_elements * (share if "_exps." in tensor.name else 1.0)
        for tensor in source.tensors
        if len(tensor.shape) > 1
    )


def token_count(texts: dict[str, str], chunks: int, n_ctx: int) -> int:
    """Return about how many tokens of texts are evaluated, at most `chunks` of each if positive."""
    counts = [len(text.encode()) / _BYTES_PER_TOKEN for text in texts.values()]
    limit = chunks * n_ctx if chunks > 0 else float("inf")
    return int(sum(min(count, limit) for count in counts))


def probe_layers(n_probes: int) -> int:
    """Return of how many layers a tensor is replaced at a time when sensitivities are measured."""
    return max(1, math.ceil(n_probes / _MOST_PROBES))


def convert_seconds(n_bytes: int, remote: bool) -> float:
    """Return the seconds that converting `n_bytes` bytes takes, from a disk or from the Hub."""
    return n_bytes / (_FETCHED if remote else _COPIED)


def choose_seconds(source: Source, types: Sequence[str], quantize_seconds: float) -> float:
    """Return about how long errors of these types take (by default `DEFAULT_TYPES`), on sampled
    rows, when quantizing everything to IQ4_K takes `quantize_seconds`.
    """
    costs = (_COSTS.get(name.upper(), _OTHER_COST) for name in types or DEFAULT_TYPES)
    matrices = [tensor for tensor in source.tensors if len(tensor.shape) > 1]
    sampled = sum(min(t.n_elements, SAMPLED_ROWS * t.shape[-1]) for t in matrices)
    everything = max(1, sum(t.n_elements for t in matrices))
    return quantize_seconds * sum(costs) * sampled / everything


@dataclass(frozen=True)
class AutoPlan:
    """What a run will do: its source, the file that it makes, and its stages. `compiling`: seconds
    that the stages together compile, in the first run on a machine. `str` is a table.
    """

    source: str
    file: Path
    aim: Aim
    stages: tuple[Planned, ...]
    compiling: float = 0.0

    @property
    def seconds(self) -> float:
        """Return about how long the stages take that are not finished, with compiling."""
        return self.compiling + sum(one.seconds for one in self.stages if not one.is_done)

    @property
    def n_bytes(self) -> int:
        """Return the disk space of the stages that are not finished."""
        return sum(one.n_bytes for one in self.stages if not one.is_done)

    def __repr__(self) -> str:
        """Say the file, the time and the disk space, in a line."""
        left = sum(not one.is_done for one in self.stages)
        return (
            f"<AutoPlan {left} of {len(self.stages)} stages, about {duration(self.seconds)},"
            f" {size_of(self.n_bytes)}: {printable(self.file, 400)}>"
        )

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(plan: AutoPlan) -> list[str]:
    """Return a table of the stages, and the sums."""
    lines = [f"{'stage':<46} {'time':>10} {'disk':>11}"]
    for number, one in enumerate(plan.stages, 1):
        seconds = "done" if one.is_done else f"{duration(one.seconds)}"
        size = "-" if not one.n_bytes else size_of(one.n_bytes)
        lines.append(f"{f'{number}. {one.title}':<46} {seconds:>10} {size:>11}")
    if plan.compiling:
        lines.append(f"{'   compiling, once':<46} {duration(plan.compiling):>10} {'-':>11}")
    total = f"{duration(plan.seconds):>10} {size_of(plan.n_bytes):>11}"
    lines.append(f"{'in all, about':<46} {total}")
    if plan.aim.why:
        lines.append(f"the file may have {size_of(plan.aim.n_bytes or 0)}: {plan.aim.why}")
    return lines
