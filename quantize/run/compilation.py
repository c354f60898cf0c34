"""Compile searches and decoders before they are used, in several processes.

The first use of a type on a machine compiles its search, which takes seconds; numba keeps the code
on disk for later runs. `compile_ahead` compiles what is missing in that cache before a run begins,
so that compiling is announced and does not count as quantizing. numba holds one lock for all
threads of a process, so compiling two searches at once takes two processes; they fill the cache,
from which this process loads the code.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

from ...errors import UnsupportedTypeError
from ...formats.codecs.codec import decodable_types
from ...formats.kernel import Code
from ...formats.types import GGMLType, ggml_type
from ..plan.plan import PlannedTensor
from ..searches import encodable_types
from .compile_task import CompileProgress, CompileTask
from .parallel import default_threads
from .piece import ImportanceLookup, runs_on_device

log = logging.getLogger(__name__)

_MOST_PROCESSES = 8  # each takes about 250 MB
_WORTH_PROCESSES = 4.0  # seconds of compiling; starting a process takes about one
_TICK = 0.5  # seconds


def tasks_of_plans(
    plans: Iterable[Sequence[PlannedTensor]],
    lookups: Iterable[ImportanceLookup | None],
    with_devices: bool = False,
) -> list[CompileTask]:
    """Return the tasks of a run with these plans on the CPU."""
    tasks: dict[CompileTask, None] = {}
    for planned, lookup in zip(plans, lookups, strict=True):
        for plan in planned:
            if plan.kept or (with_devices and runs_on_device(plan)):
                continue
            source, target = plan.source, plan.target.type
            weighted = lookup is not None and lookup(source.name, source.shape) is not None
            tasks[CompileTask("decode", source.type.name)] = None
            tasks[CompileTask("search", target.name, weighted)] = None
            tasks[CompileTask("decode", target.name, as_weights=True)] = None
    return list(tasks)


def tasks_of_types(types: Sequence[str], weighted: Sequence[bool] = (True,)) -> list[CompileTask]:
    """Return the tasks of quantizing to these types and measuring the errors. Raise
    UnsupportedTypeError for a type without a search.
    """
    names = [ggml_type(name).name for name in types]
    known, decodable = set(encodable_types()), set(decodable_types())
    for name in names:
        if name not in known:
            raise UnsupportedTypeError(f"there is no quantizer for {name}")
    tasks = [CompileTask("search", name, own) for name in names for own in weighted]
    return tasks + [
        CompileTask("decode", name, as_weights=own)
        for name in names
        if name in decodable
        for own in (False, True)
    ]


def tasks_of_rounding(types: Iterable[GGMLType]) -> list[CompileTask]:
    """Return the tasks of rounding to these types with second moments on the CPU, as far as they
    guide them.
    """
    from ..rounding.methods import guides

    names = sorted({type.plain.name for type in types if guides(type)})
    return [CompileTask("round", name) for name in names] + [
        CompileTask("decode", name, as_weights=own) for name in names for own in (False, True)
    ]


def missing_tasks(tasks: Iterable[CompileTask]) -> list[CompileTask]:
    """Return the tasks that need code that is not compiled yet, the longest first. Tasks that only
    need the code of others are left out.
    """
    seen: set[Code] = set()
    found = []
    for task in tasks:
        missing = [code for code in task.missing() if code not in seen]
        if missing:
            found.append(task)
        seen.update(missing)
    return sorted(found, key=lambda task: -task.seconds)


def compile_ahead(
    tasks: Iterable[CompileTask], progress: CompileProgress | None = None, processes: int = 0
) -> list[CompileTask]:
    """Compile the code that the tasks need and that is not compiled yet. Return the tasks that
    needed it.

    processes: the largest number of processes, 0 for one per core.
    """
    missing, progress = missing_tasks(tasks), progress or CompileProgress()
    if not missing:
        return []
    processes = _process_count(missing, processes)
    progress.compiling(missing, compile_seconds(missing, processes))
    started = time.perf_counter()
    try:
        _compile(missing, processes, progress)
    finally:
        progress.compile_end()
    log.debug("%d compiled in %.1f s", len(missing), time.perf_counter() - started)
    return missing


def compile_seconds(missing: Sequence[CompileTask], processes: int = 0) -> float:
    """Return about how long `compile_ahead` takes for tasks as `missing_tasks` returns them."""
    if not missing:
        return 0.0
    processes = _process_count(missing, processes)
    total = sum(task.seconds for task in missing)
    return max(total / processes, missing[0].seconds) + (processes > 1)


def _process_count(missing: Sequence[CompileTask], processes: int) -> int:
    if sum(task.seconds for task in missing) < _WORTH_PROCESSES:
        return 1
    return min(processes or default_threads(), len(missing), _MOST_PROCESSES)


def _compile(tasks: Sequence[CompileTask], processes: int, progress: CompileProgress) -> None:
    queue = deque(tasks)
    workers = [_Worker() for _ in range(processes)] if processes > 1 else []
    with ThreadPoolExecutor(max(1, len(workers)), thread_name_prefix="compile") as pool:
        doing = {}
        idle: list[_Worker | None] = [*workers] or [None]
        try:
            while queue or doing:
                while queue and idle:
                    worker, task = idle.pop(), queue.popleft()
                    run = _compile_here if worker is None else worker.compile
                    doing[pool.submit(run, task)] = worker, task
                done, _ = wait(doing, timeout=_TICK, return_when=FIRST_COMPLETED)
                if not done:
                    progress.compile_waiting()
                for future in done:
                    worker, task = doing.pop(future)
                    if future.result():
                        idle.append(worker)
                    else:  # its process has ended, so this one compiles
                        _compile_here(task)
                        idle += [] if idle or doing else [None]
                    progress.compiled(task)
        finally:
            for worker in workers:
                worker.close()
    for task in tasks:  # code that processes could not store, as on a full disk
        _compile_here(task)


def _compile_here(task: CompileTask) -> bool:
    for code in task.missing():
        code.compile()
    return True


class _Worker:
    """A process that compiles one task after another."""

    def __init__(self) -> None:
        package = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=package.parent,  # where the import finds the package
            text=True,
        )

    def compile(self, task: CompileTask) -> bool:
        """Return False if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(asdict(task)) + "\n")
            self._process.stdin.flush()
        except OSError:
            return False
        return bool(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def serve() -> None:
    """Compile tasks that arrive as lines of JSON on stdin; answer each with a line on stdout."""
    for line in sys.stdin:
        _compile_here(CompileTask(**json.loads(line)))
        print("done", flush=True)
