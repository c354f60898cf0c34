"""Quantize models to many types at once and judge every file: the work of `better_bits.py`.

Workers quantize on the CPU, slow types with several threads, and write each file once more with
its values in F32, so that nothing needs a decoder of its type. With `--round-jobs`, as many more
workers for each GPU round types there that have kernels; the bytes are the same. Judges, `--judges`
for each model, compare these files with their model on the devices. The first judge of a model also
collects its second moments. Results are appended as they come.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import queue
import time
import traceback
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rounding_quality.judging import judge_files, read_results, write_result
from rounding_quality.quantizing import choose_types, compile_type, compile_type_on, quantize
from rounding_quality.tasks import Settings, Task, seconds_of, target_types, tasks_of


def run(models: list[str], names: list[str], settings: Settings) -> None:
    """Append to MODEL/results.jsonl in the working folder what they lack."""
    spawn = multiprocessing.get_context("spawn")
    out: Any = spawn.Queue()
    judges = []
    waiting: dict[str, list[Task]] = {}
    inbox: dict[str, Any] = {}
    for number, model in enumerate(models):
        work = settings.work / Path(model).stem
        work.mkdir(parents=True, exist_ok=True)
        done = {(one["type"], one["guide"]) for one in read_results(work)}
        if not (missing := tasks_of(model, names, done, settings.jobs)):
            continue
        waiting[model], inbox[model] = missing, spawn.Queue()
        for judge in range(settings.judges):
            device = settings.devices[(number + judge * len(models)) % len(settings.devices)]
            given = (model, settings, device, judge == 0, inbox[model], out)
            judges.append(spawn.Process(target=judge_files, args=given, daemon=True))
    for judge in judges:
        judge.start()
    if judges:
        _schedule(waiting, inbox, out, settings)
    for model in inbox:
        for _ in range(settings.judges):
            inbox[model].put(None)
    for judge in judges:
        judge.join()


class _Lane:
    """A process that rounds on a GPU, one file at a time."""

    def __init__(self, device: str):
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, mp_context=spawn)
        self.device, self.name, self.busy = device, "", False
        self.task: Task | None = None

    def choose(self, ready: list[Task], others: set[str]) -> Task | None:
        """Return the next file: of the type that this process has compiled, else of one that the
        `others` have not, else the first.
        """
        suitable = [task for task in ready if task.is_for_gpu]
        same = [task for task in suitable if task.name == self.name]
        new = [task for task in suitable if task.name not in others]
        return (same or new or suitable or [None])[0]


def _schedule(
    waiting: dict[str, list[Task]], inbox: dict[str, Any], out: Any, settings: Settings
) -> None:
    """Quantize what is waiting, as many at a time as there are cores, and write results down."""
    started, free = time.monotonic(), settings.jobs
    wanted = sum(map(len, waiting.values()))
    ready: list[Task] = []
    finished: queue.Queue[tuple[int, _Lane | None, Future]] = queue.Queue()
    names = {t.name for tasks in waiting.values() for t in tasks}
    plain = {name for name in names if ":" not in name}
    if any(name.startswith("bpw:") for name in names):
        plain |= set(target_types())
    warm = deque(sorted(plain, key=lambda name: -seconds_of(name)))
    spawn = multiprocessing.get_context("spawn")
    devices = [one for one in settings.devices if one != "cpu"]
    lanes = [_Lane(device) for _ in range(settings.round_jobs) for device in devices]
    for_gpu = {t.name: t for tasks in waiting.values() for t in tasks if t.is_for_gpu}
    with ProcessPoolExecutor(settings.jobs, mp_context=spawn) as pool:

        def folder(task: Task) -> Path:
            return settings.work / Path(task.model).stem

        def kept(task: Task) -> bool:
            chosen = not task.has_target or task.chosen(folder(task)).exists()
            return settings.only_gpus and bool(lanes) and chosen and task.is_for_gpu

        def start(lane: _Lane | None, threads: int, function: Any, *args: Any) -> None:
            nonlocal free
            free -= threads
            future = (lane.pool if lane else pool).submit(function, *args)
            future.add_done_callback(lambda one: finished.put((threads, lane, one)))

        for lane, task in zip(lanes, for_gpu.values(), strict=False):
            lane.busy, lane.name = True, task.name
            start(lane, 0, compile_type_on, task.name.removeprefix("mix:"), lane.device)
        while wanted:
            while warm and free > 0:
                start(None, 1, compile_type, warm.popleft(), not settings.only_gpus)
            ready.sort(key=lambda task: task.rank)
            open_ones = [t for t in ready if t.has_target and not t.chosen(folder(t)).exists()]
            for lane in lanes:
                others = {other.name for other in lanes if other is not lane}
                decided = [task for task in ready if task not in open_ones]
                if not lane.busy and (task := lane.choose(decided, others)) is not None:
                    ready.remove(task)
                    lane.busy, lane.task, lane.name = True, task, task.name
                    start(lane, 0, quantize, task, settings, 2, lane.device)
            while not warm and (fitting := [t for t in ready if t.threads <= free and not kept(t)]):
                task = fitting[0]
                ready.remove(task)
                if task in open_ones:
                    start(None, task.threads, choose_types, task, settings)
                else:
                    start(None, task.threads, quantize, task, settings, task.threads, "cpu")
            with contextlib.suppress(queue.Empty):
                threads, lane, future = finished.get(timeout=0.05)
                free += threads
                made = _result(future)
                if lane is not None:
                    lane.busy = False
                    if "failed" in made:  # the CPU does what this process would have done
                        lanes.remove(lane)
                        ready += [lane.task] if lane.task is not None else []
                    lane.task = None
                if "failed" in made:
                    wanted -= lane is None and "model" in made
                    print(json.dumps(made), flush=True)
                elif "chosen" in made:
                    ready.append(made["chosen"])
                elif made:
                    inbox[made["model"]].put(made)
            while not out.empty():
                kind, model, result = out.get()
                if kind == "collected":
                    ready += waiting.pop(model)
                elif kind == "result":
                    wanted -= 1
                    result["at"] = round(time.monotonic() - started, 1)
                    write_result(settings.work / Path(model).stem, result)
                print(json.dumps(result), flush=True)


def _result(future: Future) -> dict[str, Any]:
    """Return what a worker returned, or how it failed."""
    try:
        return future.result() or {}
    except Exception:  # the others go on
        return {"failed": traceback.format_exc(limit=-4)}
