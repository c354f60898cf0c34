"""What workers do: compile what a type needs, choose types for a size, quantize a file."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

from rounding_quality.tasks import Settings, Task, target_types

_FIXED = {"token_embedding_type": "q8_0", "output_tensor_type": "q8_0"}
PRESETS = {"Q1_0_G128": "Q1_0", "IQ2_S": "IQ2_M"}  # types whose preset has another name


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
