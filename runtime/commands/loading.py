"""Bring the model of a command to its devices, and say on stderr what it takes there. Imports
nothing heavy.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from ...formats.commands.progress import Meter

if TYPE_CHECKING:
    from ..model import Model
    from ..parallel.share import Meeting
    from ..parallel.stages import Line


def load_and_say(model: Model, rows: int = 0, chunk: int = 0, name: str = "") -> None:
    """Bring a model to its GPU, and say what it takes there (`load_on_gpu`); say of ranks on the
    CPU what each of them has. name: stands above these lines where a command has several models.
    """
    if name and (model.device.type != "cpu" or model.group is not None):
        print(f"{name}:", file=sys.stderr)
    if model.device.type != "cpu":
        load_on_gpu(model, rows, chunk)
    elif model.group is not None:
        _say_of_cpus(model, model.group, rows, chunk)


def _say_of_cpus(model: Model, group: Meeting | Line, rows: int, chunk: int) -> None:
    """Print a line for each rank. There is nothing to measure beside it, no bytes and no time:
    nothing is loaded. Weights stay in the file, whose pages ranks share, and the system reads and
    drops them as it likes.
    """
    memories = model.memory(rows, chunk)
    found = sum(m.weights for m in memories), sum(m.cache for m in memories)
    for rank, (weights, cache) in enumerate(group.exchange(found)):
        planned = f", cache of {cache / 2**20:.1f} MiB" if cache else ""
        print(
            f"rank {rank} on cpu: weights of {weights / 2**20:.1f} MiB, read from the file as they"
            f" are used{planned}",
            file=sys.stderr,
        )


def load_on_gpu(model: Model, rows: int = 0, chunk: int = 0) -> None:
    """Bring a model to its GPU: the table of memory first, then a bar. DeviceError if there is too
    little memory.
    """
    from ..memory import check, free_bytes, table

    memories = model.memory(rows, chunk)
    before = free_bytes(model.device)
    print("\n".join(table(memories)), file=sys.stderr)
    check(memories)
    started = time.perf_counter()
    with Meter("loading") as meter:
        model.load(meter.reach)
    seconds = time.perf_counter() - started
    n_bytes = sum(m.weights for m in memories if m.device.type != "cpu")
    print(
        f"loaded {n_bytes / 2**30:.2f} GiB in {seconds:.2f} s, {n_bytes / 2**30 / seconds:.2f}"
        " GiB/s",
        file=sys.stderr,
    )
    if model.group is not None:
        after = free_bytes(model.device)
        taken = 0 if before is None or after is None else before - after
        planned = sum(m.weights for m in memories if m.device == model.device)
        found = (str(model.device), planned, taken, seconds)
        for rank, one in enumerate(model.group.exchange(found)):
            device, planned, taken, seconds = one
            print(
                f"rank {rank} on {device}: weights of {planned / 2**20:.0f} MiB planned,"
                f" {taken / 2**20:.0f} MiB taken, in {seconds:.2f} s",
                file=sys.stderr,
            )
