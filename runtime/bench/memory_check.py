"""What a model of random weights takes, checked before anything long begins."""

from __future__ import annotations

from dataclasses import replace

from ..memory import DeviceMemory, check
from ..model import Model
from ..weights.stacked_linear import ExpertLinear
from .synthetic import SyntheticSource


def synthetic_memory(model: Model, *, context: int = 0, rows: int = 0) -> list[DeviceMemory]:
    """Return what a model of a `SyntheticSource` takes on each device, for a sequence of `context`
    tokens of which `rows` are evaluated at a time (see `Model.memory`).

    On the CPU its weights take the pools of random rows and the decoded matrices that will be kept,
    not the size that a file of them would have.
    """
    source = model.source
    if not isinstance(source, SyntheticSource):
        raise TypeError(f"{source.path} is not a model of random weights")
    decoded = sum(
        4 * p.rows * p.cols * (len(p.matrices) if isinstance(p, ExpertLinear) else 1)
        for p in model.weights.parameters
        if p.device.type == "cpu"
    )
    cache = model.weights.store.cache
    held = source.pool_bytes + min(decoded, cache.capacity) - cache.used
    return [
        replace(m, weights=held) if m.device.type == "cpu" else m
        for m in model.memory(rows, context=context)
    ]


def check_cpu_memory(model: Model, *, context: int = 0, rows: int = 0) -> None:
    """DeviceError with the numbers if a model of random weights does not fit the CPU's memory.
    Other models are not checked: the CPU reads their weights from the file. GPUs are checked when
    the model is loaded.
    """
    if isinstance(model.source, SyntheticSource):
        found = synthetic_memory(model, context=context, rows=rows)
        check([m for m in found if m.device.type == "cpu"], cpu=True)
