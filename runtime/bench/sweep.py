"""Speed of prompts and of generation as the context fills, like the tool of ik_llama.cpp that is
called sweep-bench.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..parallel.alike import check_alike
from .bench import Runner, short_collections
from .options import SweepOptions

if TYPE_CHECKING:
    from ..model import Model


@dataclass(frozen=True)
class SweepRow:
    """A prompt of pp tokens at once and tg generated ones, each after n_kv others; seconds."""

    pp: int
    tg: int
    n_kv: int
    t_pp: float
    t_tg: float

    @property
    def speed_pp(self) -> float:
        """Tokens per second of the prompt."""
        return self.pp / self.t_pp

    @property
    def speed_tg(self) -> float:
        """Tokens per second of generation."""
        return self.tg / self.t_tg


def sweep(
    model: Model, n_ctx: int, options: SweepOptions = SweepOptions(), *, seed: int = 0
) -> Iterator[SweepRow]:
    """Yield rows for n_kv = 0, ub, 2 ub, ... below n_ctx, with ub = `model.ubatch`; tg: tokens
    generated for each (0: ub/4).

    Generation is measured first, and what it left in the context is dropped. The prompt that is
    measured stays there for the next row. stride: only every such row is measured, the others fill
    the context. first_repetitions: of the first row.
    """
    ub, tg = model.ubatch, options.tg or max(1, model.ubatch // 4)
    if model.group is not None:
        check_alike(model.group, {"-c": str(n_ctx), "options": str(options)})
    state = model.new_state(positions(n_ctx, ub, tg))
    runner = Runner(model, state, ub, torch.Generator().manual_seed(seed))
    if options.warmup:
        runner.warm_up(ub, tg)
        if n_ctx > ub and model.engine is not None:  # passes after others have their own graphs
            runner.warm_up(ub, 0, before=ub)
        state.clear()

    def timed(run: Callable[[int], None], n: int) -> float:
        with short_collections():
            begin = time.perf_counter()
            run(n)
            return time.perf_counter() - begin

    for index, n_kv in enumerate(range(0, n_ctx, ub)):
        start = state.snapshot()
        for _ in range(options.first_repetitions if index == 0 else 1):
            state.restore(start)
            t_tg = timed(runner.generate, tg) if index % options.stride == 0 else 0.0
            state.restore(start)
            t_pp = timed(runner.prompt, ub)
            if index % options.stride == 0:
                yield SweepRow(ub, tg, n_kv, t_pp, t_tg)


def positions(n_ctx: int, ub: int, tg: int = 0) -> int:
    """Return the tokens that the context of a sweep must hold; tg as in `sweep`."""
    return -(-n_ctx // ub) * ub + (tg or max(1, ub // 4))
