"""A rank with a GPU: `python parallel_on_gpus.py [layers] FOLDER SHARES SPEC...`. Compares what the
ranks give with what one GPU gives, on the reference path and on the fast one, and writes
FOLDER/<rank>.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import iqforge
import numpy as np
import pytest
import torch
from iqforge.cuda_kernels import prompt
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cuda.prompt import graphs as prompt_graphs
from iqforge.runtime.cuda.step.links import SharedMemoryLinks
from iqforge.runtime.model import Model
from iqforge.runtime.network.sampling import Sampling
from iqforge.runtime.parallel.ranks import Ranks

GREEDY = Sampling(temperature=0.0)
N_PROMPT, N_STEPS, UBATCH = 150, 24, 64


def evaluated(model: Model, seed: int = 4) -> dict[str, torch.Tensor]:
    """Return logits of a prompt, of the last row after pieces, of steps, and drawn tokens."""
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, model.n_vocab, N_PROMPT))
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


def prompt_with_choices(model: Model, seed: int = 4) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits of the prompt of `evaluated`, and int64[rows, used], ascending, the experts
    that each router chose. Nothing is captured, as a graph chooses unseen.
    """
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, model.n_vocab, N_PROMPT))
    found, route = [], prompt.route

    def routed(logits, ids, *rest):
        route(logits, ids, *rest)
        found.append(ids.long().cpu().sort(dim=-1).values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt, "route", routed)
        patch.setattr(prompt_graphs, "can_capture", lambda device: False)
        logits = model.logits(model.hidden(tokens[None, :100])[0])
    return logits.float().cpu(), found


def compared(spec: str, ranks: Ranks, shares: str, precision: str, reduce_type: str) -> dict:
    options = {"device": "cuda", "precision": precision, "ubatch": UBATCH}
    told: list[str] = []
    begun = time.monotonic()
    split = {"split_mode": "graph", "tensor_split": shares, "reduce_type": reduce_type}
    model = iqforge.random_model(spec, verbose=told.append, **options, **split)
    with model:
        model.load()
        first, second = evaluated(model), evaluated(model)
        logits, choices = prompt_with_choices(model)
        shared = model.engine is not None and isinstance(
            model.engine.steps._links, SharedMemoryLinks
        )
    found = {
        "slow": told,
        "shared memory": shared,
        "twice": all(torch.equal(first[name], second[name]) for name in first),
        "digits": {n: x.contiguous().view(torch.int32).sum().item() for n, x in first.items()},
    }
    if ranks.rank == 0:
        device = torch.device("cuda", ranks.local_rank)
        with Model(SyntheticSource(spec), device, precision=precision, ubatch=UBATCH) as whole:
            whole.load()
            wanted = evaluated(whole)
            wanted_logits, wanted_choices = prompt_with_choices(whole)
        # A row follows from the same choices if its own and those of all rows before are the same.
        alike = torch.ones(len(logits), dtype=torch.bool)
        flips = []
        for layer, (a, b) in enumerate(zip(choices, wanted_choices, strict=True)):
            same = (a == b).all(1)
            flips += [[layer, row] for row in (~same).nonzero()[:, 0].tolist()]
            alike &= same if layer == len(choices) - 1 else same.cumprod(0).bool()
        errors = (logits - wanted_logits).abs().amax(1) / wanted_logits.abs().max()
        found |= {
            "flips (layer, row)": flips,
            "rows with the same choices": int(alike.sum()),
            "their error": float(errors[alike].max()),
            "worst row": int(errors.argmax()),
            "its error": float(errors.max()),
        }
        for name in ("prompt", "pieces", "steps"):
            error = (first[name] - wanted[name]).abs().max() / wanted[name].abs().max()
            found[f"{name} error"] = float(error)
        for name in ("drawn", "sampled"):
            found[f"{name} equal"] = int((first[name] == wanted[name]).sum())
    found["seconds"] = time.monotonic() - begun
    return found


def by_layers(spec: str, ranks: Ranks, shares: str, precision: str) -> dict:
    """Return what ranks with whole layers give, and how far it is from one GPU. The second time,
    steps are replayed from graphs.
    """
    options = {"device": "cuda", "precision": precision, "ubatch": UBATCH}
    split = {"split_mode": "layer", "tensor_split": shares}
    told: list[str] = []
    with iqforge.random_model(spec, verbose=told.append, **options, **split) as model:
        model.load()
        first, second = evaluated(model), evaluated(model)
        layers = list(model.network.layers)
    found = {
        "slow": told,
        "layers": layers,
        "twice": all(torch.equal(first[name], second[name]) for name in first),
        "digits": {n: x.contiguous().view(torch.int32).sum().item() for n, x in first.items()},
    }
    if ranks.rank == 0:
        device = torch.device("cuda", ranks.local_rank)
        with Model(SyntheticSource(spec), device, precision=precision, ubatch=UBATCH) as whole:
            wanted = evaluated(whole)
        for name in ("prompt", "pieces", "steps"):
            error = (first[name] - wanted[name]).abs().max() / wanted[name].abs().max()
            found[f"{name} error"] = float(error)
        for name in ("drawn", "sampled"):
            found[f"{name} equal"] = int((first[name] == wanted[name]).sum())
    return found


def main_by_layers() -> None:
    _, folder, shares, *specs = sys.argv[1:]
    ranks = Ranks.here()
    assert ranks is not None
    report = {
        f"{spec} {precision}": by_layers(spec, ranks, shares, precision)
        for spec in specs
        for precision in ("f32", "bf16")
    }
    Path(folder, f"{ranks.rank}.json").write_text(json.dumps(report))


def main() -> None:
    folder, shares, *specs = sys.argv[1:]
    ranks = Ranks.here()
    assert ranks is not None
    report = {}
    for spec in specs:
        for precision, reduce_type in (("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32")):
            one = compared(spec, ranks, shares, precision, reduce_type)
            report[f"{spec} {precision} {reduce_type}"] = one
            if ranks.rank == 0:
                shown = {k: v for k, v in one.items() if k != "digits"}
                print(spec, precision, reduce_type, json.dumps(shown), flush=True)
    Path(folder, f"{ranks.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    if sys.argv[1] == "layers":
        main_by_layers()
    else:
        main()
