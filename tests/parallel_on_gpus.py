"""What models give on GPUs, for `test_parallel_cuda.py`, which compares it.

    python parallel_on_gpus.py whole FOLDER SPEC...
    python parallel_on_gpus.py graph|layer FOLDER SHARES SPEC...

The first evaluates on one GPU; the second starts a rank for each of the SHARES. With `+cpu` after a
SPEC, experts are on the CPU. Results are files of FOLDER, named by `case`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import iqforge
import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.prompt import experts as prompt_experts
from iqforge.runtime.bench.mixer_sizes import KimiDeltaSizes, StateSpaceSizes
from iqforge.runtime.bench.shapes import SHAPES
from iqforge.runtime.cuda.prompt.common import graphs as prompt_graphs
from iqforge.runtime.cuda.step.links import SharedMemoryLinks
from iqforge.runtime.model import Model
from iqforge.runtime.network.sampling import Sampling
from iqforge.runtime.parallel.launch import run_ranks
from iqforge.runtime.parallel.ranks import Ranks

# Every expert is used: no near tie between experts is decided otherwise, so steps can be compared.
MOE = SHAPES["qwen3moe-tiny"]
SHAPES["every-expert-tiny"] = replace(MOE, n_used=MOE.n_experts)
SMALL: dict[str, Any] = {"width": 256, "n_heads": 4, "n_kv_heads": 2, "head": 64, "hidden": 512}
SMALL["n_vocab"] = 512
SHAPES["nemotron-tiny"] = replace(
    SHAPES["nemotron-h-8b"],
    n_layers=5,
    pattern="M-M*-",  # pyright: ignore[reportCallIssue]  a field of its class
    recurrent=StateSpaceSizes(8, 32, 64, 2),
    **SMALL,
)
SHAPES["lfm2-tiny"] = replace(SHAPES["lfm2-1.2b"], n_layers=3, attending=(1,), **SMALL)  # pyright: ignore[reportCallIssue]
SHAPES["gemma4-e-tiny"] = replace(
    SHAPES["gemma4-e4b"],
    n_layers=6,
    period=3,  # pyright: ignore[reportCallIssue]
    near_head=64,
    shared_kv=3,
    layer_input=256,
    **SMALL,
)
SHAPES["falcon-h1-tiny"] = replace(
    SHAPES["falcon-h1-7b"],
    n_layers=2,
    recurrent=StateSpaceSizes(8, 32, 64, 2, normed=False),  # pyright: ignore[reportCallIssue]
    **SMALL,
)
SHAPES["kimi-linear-tiny"] = replace(
    SHAPES["kimi-linear-48b-a3b"],
    n_layers=3,
    attending=(1,),  # pyright: ignore[reportCallIssue]
    recurrent=KimiDeltaSizes(4, 64),
    n_experts=8,
    n_used=8,
    dense_hidden=512,
    shared=256,
    **(SMALL | {"n_kv_heads": 1, "head": 192, "hidden": 256}),
)
GREEDY = Sampling(temperature=0.0)
# No piece of a prompt is so small that ranks, which take pieces one by one, compute it on the CPU.
N_PROMPT, N_STEPS, UBATCH = 160, 24, 64
# Of products, and of what is moved for sums of prompts.
PRECISIONS = {
    "whole": (("f32", ""), ("bf16", "")),
    "graph": (("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32")),
    "layer": (("f32", ""), ("bf16", "")),
}


def case(mode: str, shares: str, spec: str, precision: str, moved: str, rank: int = 0) -> str:
    """Return the name of a file of results."""
    return "-".join((mode, shares, spec.replace(":", "."), precision, moved, f"{rank}.pt"))


def tokens_of(model: Model) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(4).integers(0, model.n_vocab, N_PROMPT))


def evaluated(model: Model) -> dict[str, torch.Tensor]:
    """Return logits of a prompt, of the last row after pieces, of steps, and drawn tokens."""
    tokens = tokens_of(model)
    found = {"prompt": model.logits(model.hidden(tokens[None, :100])[0])}
    state = model.new_state(512)
    found["pieces"] = model.extend(tokens, state)[None]
    rows = []
    for piece in tokens[:N_STEPS].split([1] * 8 + [4] * 4):
        rows.append(model.extend(piece, state, all_logits=True))
    found["steps"] = torch.cat(rows)
    found["drawn"] = torch.tensor(list(model.follow(7, state, N_STEPS, GREEDY)))
    found["sampled"] = torch.tensor(list(model.follow(7, state, N_STEPS, Sampling(seed=3))))
    return {name: x.float().cpu() for name, x in found.items()}


def rows_with_choices(model: Model, name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits of all rows of the "prompt" or the "pieces" of `evaluated`, and for every
    router int64[rows, used], ascending, the experts that it chose. Nothing is captured, as a graph
    chooses unseen.
    """
    found, route, tokens = [], prompt_experts.route, tokens_of(model)

    def routed(logits, ids, *rest):
        route(logits, ids, *rest)
        found.append(ids.long().cpu().sort(dim=-1).values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_experts, "route", routed)
        patch.setattr(prompt_graphs, "can_capture", lambda device: False)
        if name == "prompt":
            logits, passes = model.logits(model.hidden(tokens[None, :100])[0]), [1]
        else:
            logits = model.extend(tokens, model.new_state(512), all_logits=True)
            engine = model.engine  # None in float32, where nothing is recorded
            passes = [1] if engine is None else list(map(len, engine.prompt.passes(tokens)))
    routers, routed_rows = len(found) // sum(passes), iter(found)
    choices = [[] for _ in range(routers)]
    for n_pieces in passes:  # a router sees all pieces of a pass before the next router does
        for of_router in choices:
            of_router += islice(routed_rows, n_pieces)
    return logits.float().cpu(), [torch.cat(rows) for rows in choices]


def results(mode: str, shares: str, spec: str, precision: str, moved: str) -> dict:
    """Return what one process gives. The second time, steps are replayed from graphs."""
    told: list[str] = []
    options = {"device": "cuda", "precision": precision, "ubatch": UBATCH}
    spec, _, beside = spec.partition("+")
    options |= {"cpu_moe": True} if beside else {}
    if mode != "whole":
        options |= {"split_mode": mode, "tensor_split": shares}
        options |= {"reduce_type": moved} if moved else {}
    with iqforge.random_model(spec, verbose=told.append, **options) as model:
        model.load()
        first = evaluated(model)
        found = {"values": first, "slow": [x for x in told if x.startswith("slow path")]}
        steps = None if model.engine is None else model.engine.steps
        found["graphs"] = steps is not None and steps.captures
        if mode != "layer":
            found["uncaptured"] = {n: rows_with_choices(model, n) for n in ("prompt", "pieces")}
        if mode != "whole":
            second = evaluated(model)
            found["twice"] = all(torch.equal(first[name], second[name]) for name in first)
            found["layers"] = list(model.network.layers)
            found["shared memory"] = model.engine is not None and isinstance(
                model.engine.steps._links, SharedMemoryLinks
            )
    return found


def main() -> int:
    mode, folder, *specs = sys.argv[1:]
    shares = "1" if mode == "whole" else specs.pop(0)
    ranks = Ranks.here()
    if mode != "whole" and ranks is None:
        return run_ranks([sys.executable, *sys.argv], shares.count(",") + 1)
    rank = 0 if ranks is None else ranks.rank
    for spec in specs:
        for precision, moved in PRECISIONS[mode]:
            name, started = case(mode, shares, spec, precision, moved, rank), time.monotonic()
            torch.save(results(mode, shares, spec, precision, moved), Path(folder, name))
            print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
