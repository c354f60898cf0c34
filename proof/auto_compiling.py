"""What `iqforge auto` compiles in its first run on a machine, and how long that takes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

import numpy as np

from ..formats.source import Source
from ..formats.tensor_names import OUTPUT, TOKEN_EMBEDDING
from ..formats.types import GGMLType, ggml_type
from ..quantize.plan.budget import candidates, is_free
from ..quantize.plan.plan import PlannedTensor
from ..quantize.plan.roles import is_candidate
from ..quantize.plan.type_errors import fits
from ..quantize.report.probe import PROBE_TYPES
from ..quantize.report.stats import tasks_of_stats
from ..quantize.run.compilation import compile_seconds, missing_tasks
from ..quantize.run.compile_task import CompileTask
from ..quantize.run.parallel import default_threads
from ..quantize.run.report import RunProgress

_OPERATION_SECONDS = 0.6  # of one that runs a model on the CPU
_TYPE_SECONDS = 1.1  # of the product with a type, and of its decoder
_MOST_TYPES = 8  # that a result usually has


class CompileWatch(RunProgress):
    """Compares compiling with its estimate. `factor`: how many times as long it takes on this
    machine, by what was compiled, or else by other work that is running.
    """

    def __init__(self) -> None:
        self._expected = self._spent = self._started = 0.0

    @property
    def factor(self) -> float:
        """How much longer compiling takes than was estimated; before anything is compiled, what the
        machine's load suggests.
        """
        if self._expected:
            return self._spent / self._expected
        return max(1.0, os.getloadavg()[0] / default_threads())

    def compiling(self, tasks: Sequence[CompileTask], seconds: float) -> None:
        self._expected += seconds
        self._started = time.perf_counter()

    def compile_end(self) -> None:
        self._spent += time.perf_counter() - self._started


def tasks_of_choice(
    draft: Iterable[PlannedTensor], types: Sequence[GGMLType], chosen_by_user: bool
) -> list[CompileTask]:
    """Return the tasks of choosing among these types on the CPU. They include those of quantizing,
    whatever is chosen.
    """
    tasks: dict[CompileTask, None] = {}
    for plan in draft:
        if is_free(plan):
            own = candidates(plan.source, True, types, chosen_by_user)
            tasks |= dict.fromkeys(tasks_of_stats([plan.source], own, _importance))
    return list(tasks)


def tasks_of_probes(source: Source) -> list[CompileTask]:
    """Return the tasks of measuring sensitivities."""
    tasks: dict[CompileTask, None] = {}
    for tensor in source.tensors:
        if is_candidate(tensor):
            own = [type for type in map(ggml_type, PROBE_TYPES) if fits(type, tensor)]
            tasks |= dict.fromkeys(tasks_of_stats([tensor], own[:1], _importance))
    return list(tasks)


def seconds_of_compiling(tasks: Iterable[CompileTask], n_operations: int, factor: float) -> float:
    """Return about how long the tasks that are missing take, and operations that run a model, of
    which `n_operations` are missing. factor: how much slower this machine is than usual.
    """
    missing = missing_tasks(tasks)
    # A type without a compiled search has no compiled product either.
    new = len({task.type for task in missing if task.kind == "search"})
    running = n_operations * _OPERATION_SECONDS + min(new, _MOST_TYPES) * _TYPE_SECONDS
    return factor * (compile_seconds(missing) + running)


def _importance(name: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return importances, of any value, for tensors that a matrix of `auto` has."""
    return None if name in (TOKEN_EMBEDDING, OUTPUT) else np.ones(1, np.float32)
