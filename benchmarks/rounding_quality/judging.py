"""Judges, which collect second moments and compare files with their model, and the results file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from rounding_quality.tasks import Settings


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
