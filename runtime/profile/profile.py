"""Running a model under torch.profiler: some prompts, some tokens one by one."""

from __future__ import annotations

import json
import os
import tempfile

import torch

from ..bench.bench import first_token
from ..state.cache import CacheSettings
from ..weights.ranges import RangeName, recording
from .quiet import without_log_lines
from .trace import PASS, Pass, passes_of

WARM_PROMPTS, PROMPTS = 1, 3  # passes of a prompt before and while something is recorded
WARM_TOKENS = 3  # at most, before


def profile_model(
    model,
    n_prompt: int = 512,
    n_gen: int = 16,
    *,
    n_depth: int = 0,
    settings: CacheSettings = CacheSettings(),
    seed: int = 0,
) -> dict[str, list[Pass]]:
    """Passes by label: `pp<n_prompt>` (several prompts from an empty context) and `tg` (n_gen
    tokens after n_depth others, one by one).

    The first passes of a kind may compile kernels or capture a graph; see
    `profile_report.measured`.
    """
    generator = torch.Generator().manual_seed(seed)
    device = torch.device(model.device)
    bos = first_token(model)

    def tokens(n: int, first: bool) -> torch.Tensor:
        drawn = torch.randint(0, model.n_vocab, (n,), generator=generator)
        if first and bos is not None:
            drawn[0] = bos
        return drawn

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def extend(drawn: torch.Tensor, state, label: str) -> None:
        with torch.profiler.record_function(str(RangeName(PASS, label))):
            model.extend(drawn, state)
            wait()

    labels = ([f"pp{n_prompt}"] if n_prompt else []) + (["tg"] if n_gen else [])
    # Kernels are compiled, and buffers have their size, before anything is recorded.
    for warm in (True, False):
        prompt_state = model.new_state(n_prompt, settings) if n_prompt else None
        # Fresh: its graph is captured while it is recorded.
        token_state = model.new_state(n_depth + n_gen, settings) if n_gen else None
        if n_depth and n_gen:
            model.extend(tokens(n_depth, True), token_state)
        activities = [torch.profiler.ProfilerActivity.CPU] + (
            [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
        )
        with (
            without_log_lines(),
            recording(),
            torch.profiler.profile(activities=activities, acc_events=True) as recorded,
        ):
            for _ in range(WARM_PROMPTS if warm else PROMPTS):
                if prompt_state is None:
                    break
                prompt_state.clear()
                extend(tokens(n_prompt, True), prompt_state, labels[0])
            for i in range(min(n_gen, WARM_TOKENS) if warm else n_gen):
                extend(tokens(1, i == 0 and not n_depth), token_state, labels[-1])
    passes = passes_of(_trace(recorded))
    return {label: [p for p in passes if p.label == label] for label in labels}


def _trace(recorded) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        recorded.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            return json.load(file)
