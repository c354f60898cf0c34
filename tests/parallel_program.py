"""A rank of the tests of `test_parallel.py`: `python parallel_program.py CASE [FOLDER]`. Each rank
writes what it found to FOLDER/<rank>.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import product
from pathlib import Path

import iqforge
import numpy as np
import torch
from iqforge.runtime.network.sampling import Sampling
from iqforge.runtime.options import LoadOptions
from iqforge.runtime.parallel.group import Group
from iqforge.runtime.parallel.ranks import Ranks
from iqforge.runtime.start_ranks import joined

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.shared import shared  # pyright: ignore[reportMissingImports]  the folder above

TYPES = ("f32", "bf16", "f16", "q8_0")


def parts(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(40, 64, generator=generator) for _ in range(size)]


def collectives(group: Group) -> dict:
    size, rank = group.size, group.rank
    found, total = {}, torch.stack(parts(size)).double().sum(0)
    for kind in TYPES:
        group.reduce_type = kind
        y = group.sum(parts(size)[rank])
        found[kind] = {
            "error": float((y - total).abs().max()),
            "digits": y.view(torch.int32).sum().item(),
        }
    few = group.sum(parts(size)[rank][:8])
    found["few"] = float((few - total[:8]).abs().max())
    ends = [0, 3, 8][-size:]
    own = slice(ends[rank - 1] if rank else 0, ends[rank])
    whole = torch.arange(16.0).view(2, 8)
    found["gather"] = torch.equal(group.gather(whole[:, own], ends), whole)
    found["tokens"] = group.tokens(torch.tensor([rank + 7])).tolist()
    found["first"] = group.from_first({"rank": rank})
    found["all"] = group.exchange(rank)
    found["agree"] = [group.agree(rank == 1), group.agree(False)]
    return found


def models(names: list[str], ranks: Ranks) -> dict:
    """Return what each model gives on these ranks: twice the logits of a prompt, pieces and steps
    of a sequence.
    """
    shares = ("1", "1", "2")[-ranks.size :] if ranks.size < 4 else ("1",) * ranks.size
    options = {"device": "cpu", "tensor_split": ",".join(shares)}
    found = {}
    for mode, name in product(("graph", "layer"), names):
        path = shared(f"golden/convert/{name}/expected-f32.gguf")
        tokens = np.load(shared(f"golden/convert/{name}/logits.npz"))["input_ids"][:24]
        if ranks.rank:  # the first rank decides
            tokens = np.zeros_like(tokens)
        with iqforge.load_model(path, split_mode=mode, **options) as model:
            first, second = (model.forward(tokens) for _ in range(2))
            state = model.new_state(64)
            pieces = [model.extend(tokens[i : i + 7], state) for i in range(0, len(tokens), 7)]
            drawn = list(model.follow(5, state, 4, Sampling(seed=ranks.rank)))
        found[f"{mode} {name}"] = {
            "logits": first.tolist(),
            "twice": torch.equal(first, second),
            "digits": first.view(torch.int32).sum().item(),
            "last": pieces[-1].tolist(),
            "drawn": drawn,
        }
    return found


def combinations(options: dict[str, dict], ranks: Ranks) -> dict:
    """Return, for each set of options, logits after pieces of a sequence and after a step."""
    split = {"device": "cpu", "tensor_split": ",".join("1" * (ranks.size - 1) + "2")}
    return {
        f"{mode} {key}": after_pieces(one | split | {"split_mode": mode})
        for mode in ("graph", "layer")
        for key, one in options.items()
    }


def after_pieces(options: dict) -> list:
    [name] = options.pop("names")
    tokens = np.load(shared(f"golden/convert/{name}/logits.npz"))["input_ids"][:24]
    path = shared(f"golden/convert/{name}/expected-f32.gguf")
    with iqforge.load_model(path, **options) as model:
        state = model.new_state(64)
        model.extend(tokens[:20], state)
        return [model.extend(piece, state).tolist() for piece in (tokens[20:23], tokens[23:])]


def evaluated(job: dict) -> dict:
    """Return the logits of a file on these ranks, in float32."""
    tokens = np.array(job["tokens"])
    options = {"device": job["device"], "precision": "f32", "reduce_type": "f32"}
    options |= {"split_mode": job["mode"], "tensor_split": job["shares"]}
    with iqforge.load_model(job["path"], **options) as model:
        first, second = (model.forward(tokens).cpu() for _ in range(2))
    return {"logits": first.numpy(), "twice": torch.equal(first, second)}


def main() -> None:
    case = sys.argv[1]
    ranks = Ranks.here()
    assert ranks is not None
    torch.set_num_threads(1)
    if case == "several":  # exchange, models, and sets of options, in one start
        folder, text, *names = sys.argv[2:]
        found = {"models": models(names, ranks), "options": combinations(json.loads(text), ranks)}
        # The group that the models have shared: a process joins once.
        split = {"split_mode": "graph", "tensor_split": ",".join("1" * ranks.size)}
        group = joined(LoadOptions(device="cpu", **split), torch.device("cpu"))
        assert group is not None
        found["exchanged"] = collectives(group)
        Path(folder, f"{ranks.rank}.json").write_text(json.dumps(found))
        return
    if case == "files":
        folder = Path(sys.argv[2])
        found = [evaluated(job) for job in json.loads((folder / "jobs.json").read_text())]
        np.savez(folder / f"{ranks.rank}.npz", *(one["logits"] for one in found))
        twice = [one["twice"] for one in found]
        (folder / f"{ranks.rank}.json").write_text(json.dumps(twice))
        return
    if case == "models":
        folder, *names = sys.argv[2:]
        Path(folder, f"{ranks.rank}.json").write_text(json.dumps(models(names, ranks)))
        return
    # Long enough for ranks that start one after the other; without these two, longer than the test
    # allows.
    group = Group(ranks, torch.device("cpu"), timeout=20 if case in ("late", "stopped") else 600)
    if case == "collectives":
        Path(sys.argv[2], f"{ranks.rank}.json").write_text(json.dumps(collectives(group)))
    group.wait()
    if case == "killed" and ranks.rank == 1:
        os.kill(os.getpid(), 9)
    if case == "refused" and ranks.rank == 1:
        raise SystemExit("the file of rank 1 is broken")
    if case == "late" and ranks.rank == 1:
        time.sleep(600)
    if case == "stopped" and ranks.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.sum(torch.ones(4, 4))
    group.close()


if __name__ == "__main__":
    main()
