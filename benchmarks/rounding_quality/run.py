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
import math
import multiprocessing
import os
import queue
import time
import traceback
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GUIDES = ("hessian", "imatrix")
# Seconds for rounding a million weights with rows of 512 on one core; others take about 2.
_SLOW = "IQ1_M 9 IQ1_S 6.7 IQ2_S 5.6 IQ4_KSS 4.8 IQ2_KT 4.8 IQ3_S 4.5 IQ4_KT 4.3 IQ1_KT 3.4"
_SLOW += " IQ3_KT 3.3 IQ5_KS 3.3 IQ2_XS 3.2 IQ4_KS 3.1 IQ2_KL 3 IQ3_XXS 2.8 IQ5_K 2.6 IQ4_K 2.6"
_FAST = "IQ2_K 1 Q5_1 0.9 NVFP4 0.9 Q4_1 0.8 Q5_0 0.8 IQ4_NL 0.7 Q4_0 0.6 TQ1_0 0.5 TQ2_0 0.5"
_FAST += " Q2_0 0.5 IQ2_BN 0.4 Q1_0_G128 0.4 MXFP4 0.3"
_WORDS = f"{_SLOW} {_FAST}".split()
SECONDS: dict[str, float] = dict(zip(_WORDS[::2], map(float, _WORDS[1::2]), strict=True))
_OTHER = 2.0
_FIXED = {"token_embedding_type": "q8_0", "output_tensor_type": "q8_0"}
PRESETS = {"Q1_0_G128": "Q1_0", "IQ2_S": "IQ2_M"}  # types whose preset has another name
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
        from iqforge.quantize.rounding.cuda.rounders import rounder_there
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


def tasks_of(model: str, names: list[str], done: set[tuple[str, str]], jobs: int) -> list[Task]:
    """Return what is missing of a model in the order of `names`, with threads by how long it takes,
    at most `jobs`.
    """
    millions = os.path.getsize(model) / 2e6
    found = []
    for rank, name in enumerate(names):
        plain = ":" not in name
        cost = SECONDS.get(name, _OTHER) * millions * (1 if plain else 1.5)
        for guide in GUIDES:
            if (name, guide) not in done:
                slow = guide == "hessian" or name.endswith("_KT")
                took = cost if guide == "hessian" else cost / 4 if slow else cost / 10
                threads = max(1, min(8, jobs, math.ceil(took / _TURN)))
                found.append(Task(model, name, guide, threads, rank))
    return found


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
    warm = deque(sorted(plain, key=lambda name: -SECONDS.get(name, _OTHER)))
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


def compile_type(name: str, rounds: bool) -> None:
    """Compile what a type needs, for all processes. rounds: also what rounds to it on the CPU."""
    import numpy as np
    from iqforge.formats.types import ggml_type
    from iqforge.quantize.rounding.factor import factored
    from iqforge.quantize.rounding.methods import guides, rounder_of
    from iqforge.quantize.run.compilation import compile_ahead, tasks_of_types
    from iqforge.quantize.run.compile_task import CompileTask

    type = ggml_type(name)
    compile_ahead([CompileTask("decode", "BF16"), *tasks_of_types([name])], processes=1)
    if guides(type) and rounds:
        x = np.random.default_rng(1).standard_normal((4, 512)).astype(np.float32)
        out = np.empty((4, type.row_bytes(512)), dtype=np.uint8)
        rounder_of(type, 512, factored(np.eye(512), 0.25), 2)(x, out)


def compile_type_on(name: str, device: str) -> None:
    """Compile what rounds to a type, or to those of about a size, on a GPU in this process."""
    import numpy as np
    from iqforge.api.rounding import rounders_of
    from iqforge.formats.types import ggml_type
    from iqforge.quantize.rounding.tensor_moments import MatrixMoments

    rounders = rounders_of([int(device.removeprefix("cuda:"))])
    moments = MatrixMoments(_Identity(), 0)
    x = np.random.default_rng(1).standard_normal((4, 512)).astype(np.float32)
    names = [name.removesuffix("_M")]
    if name.startswith("bpw:"):
        names = target_types(float(name.removeprefix("bpw:")))
    for type in map(ggml_type, names):
        out = np.empty((4, type.row_bytes(512)), dtype=np.uint8)
        rounders.search(type, 512, np.ones(512, dtype=np.float32))(x, out)
        rounders.rounder(type, 512, moments, 0.25, 2, name)(x, out)


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


class _Identity:
    """Second moments of vectors without correlations."""

    def fit(self, index: int) -> Any:
        import numpy as np

        return np.eye(512)

    def hold(self, index: int) -> Any:
        return self.fit(index)

    def tokens(self, index: int) -> int:
        return 1 << 20

    def origin(self, index: int) -> str:
        return "nothing"

    def on_device(self, index: int, hold: bool) -> None:
        return None


def quantize(task: Task, settings: Settings, threads: int, device: str) -> dict[str, Any]:
    """Write the file of a task in F32, and return what is known of it."""
    known: dict[str, Any] = {"model": task.model, "type": task.name, "guide": task.guide}
    known["round_on"] = device
    out = task.out(settings.work / Path(task.model).stem)
    plain = out.with_suffix(".f32.gguf")
    try:
        started = time.monotonic()
        _quantize(task, settings, out, threads=threads, device=device)
        seconds = round(time.monotonic() - started, 1)
        if task.has_target:
            known["choosing"] = json.loads(task.chosen(out.parent).read_text())["seconds"]
        import iqforge

        iqforge.quantize_model(out, plain, "F32", allow_requantize=True, threads=1, restart=True)
        size = os.path.getsize(out)
        out.unlink()
    except Exception:  # one type that fails must not end the others
        return {**known, "failed": traceback.format_exc(limit=-4)}
    return {**known, "path": str(plain), "seconds": seconds, "threads": threads, "size": size}


def choose_types(task: Task, settings: Settings) -> dict[str, Any]:
    """Choose the types of a task with a size, and write them down."""
    known = {"model": task.model, "type": task.name, "guide": task.guide}
    work = settings.work / Path(task.model).stem
    try:
        import iqforge

        started = time.monotonic()
        bpw = total_bpw(task.model, float(task.name.removeprefix("bpw:")))
        guide = {task.guide: work / "hessian.safetensors"}
        fitted = iqforge.recipe_for_target(
            task.model, bpw=bpw, threads=task.threads, **guide, **_FIXED
        )
        seconds = round(time.monotonic() - started, 1)
        recipe = {"type": fitted.recipe.type, "tensor_types": fitted.recipe.tensor_types}
        path = task.chosen(work)
        made = path.with_suffix(".part")
        made.write_text(json.dumps({"recipe": recipe, "seconds": seconds}))
        made.rename(path)
    except Exception:  # one that fails must not end the others
        return {**known, "failed": traceback.format_exc(limit=-4)}
    return {"chosen": task}


def _quantize(task: Task, settings: Settings, out: Path, **how: Any) -> None:
    import iqforge
    from iqforge.quantize.plan.recipe import Recipe

    keywords: dict[str, Any] = {task.guide: out.parent / "hessian.safetensors"}
    recipe: Any = task.name
    if task.has_target:
        recipe = Recipe(**json.loads(task.chosen(out.parent).read_text())["recipe"])
    elif task.name.startswith("mix:"):
        recipe = task.name.removeprefix("mix:")
        keywords |= _FIXED
    else:
        recipe = PRESETS.get(task.name, task.name)
        keywords |= {**_FIXED, "pure": True}
    if task.guide == "hessian":
        keywords["hessian_shrink"] = settings.shrink
    iqforge.quantize_model(task.model, out, recipe, restart=True, **keywords, **how)


def total_bpw(model: str, bpw: float) -> float:
    """Return the bits per weight of a whole model whose matrices have `bpw`, and whose embeddings
    and output are Q8_0.
    """
    from iqforge.formats.gguf.reader import open_gguf

    with open_gguf(model) as source:
        sizes = {one.name: one.n_elements for one in source.tensors}
    fixed = sum(sizes.get(name, 0) for name in ("token_embd.weight", "output.weight"))
    return (bpw * (sum(sizes.values()) - fixed) + 8.5 * fixed) / sum(sizes.values())


def judge_files(
    model: str, settings: Settings, device: str, collects: bool, inbox: Any, out: Any
) -> None:
    """Collect second moments if asked to, then answer files with their figures until None comes."""
    import iqforge
    import torch

    from rounding_quality.judge import Judge

    started = time.monotonic()
    work = settings.work / Path(model).stem
    if device != "cpu":
        torch.set_num_threads(1)
    if collects:
        hessian = work / "hessian.safetensors"
        if not hessian.exists():
            iqforge.collect_hessian(
                model,
                settings.calibrate,
                hessian,
                chunks=settings.calibration_chunks,
                device=device,
                precision="f32",
                batch_tokens=2048 if device == "cpu" else 8192,
            )
        seconds = round(time.monotonic() - started, 1)
        said = {"model": Path(model).stem, "collected": seconds, "texts": texts_of(hessian)}
        out.put(("collected", model, said))
    judge = Judge(model, settings.texts, settings.chunks, settings.tasks, device)
    if collects:
        said = {"model": Path(model).stem, "base": round(time.monotonic() - started, 1)}
        write_result(work, {"type": "base", "guide": "", "tasks": judge.own_answers})
        out.put(("ready", model, said))
    while (made := inbox.get()) is not None:
        began = time.monotonic()
        known = {k: v for k, v in made.items() if k not in ("model", "path")}
        figures = judge.figures(made["path"])
        os.unlink(made["path"])
        figures["judged"] = round(time.monotonic() - began, 2)
        out.put(("result", model, {**known, **figures}))


def texts_of(hessian: Path) -> int:
    """Return how many tokens the calibration texts have together."""
    import iqforge

    return sum(int(text["tokens"]) for text in iqforge.load_hessian(hessian).texts)


def read_results(work: Path) -> list[dict[str, Any]]:
    """Return what was measured so far."""
    path = work / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_result(work: Path, result: dict[str, Any]) -> None:
    """Append one line."""
    with open(work / "results.jsonl", "a") as file:
        file.write(json.dumps(result) + "\n")
