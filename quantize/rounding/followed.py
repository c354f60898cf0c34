"""Which tensors of an output later layers read the errors of, for `calibrate` with `sequential`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import UsageError
from ...formats.tensor_names import PER_LAYER_EMBEDDING, TOKEN_EMBEDDING
from ..plan.plan import PlannedTensor

# What a model reads before its first layer.
_EMBEDDINGS = (TOKEN_EMBEDDING, PER_LAYER_EMBEDDING, "per_layer_model_proj.weight")


@dataclass
class Followed:
    """The tensors of a plan that are rounded when the next layer begins, as (name in the model,
    plan) by layer; None for embeddings. waits: targets that begin a layer, before which those that
    come earlier must be written. late: targets that come after one of a later layer.
    """

    tensors: dict[int | None, list[tuple[str, PlannedTensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    waits: set[str] = field(default_factory=set)
    late: list[str] = field(default_factory=list)


def followed_tensors(
    planned: Sequence[PlannedTensor],
    name_of: Callable[[PlannedTensor], str],
    layer_of: Callable[[PlannedTensor], int | None],
    shapes: Mapping[str, tuple[int, ...]],
) -> Followed:
    """Return what is followed of a plan. name_of, layer_of: of a tensor in the model, whose tensors
    have `shapes`.

    Raise UsageError for a tensor of a layer that the model does not have in this form.
    """
    found, last = Followed(), -1
    for plan in planned:
        name, layer = name_of(plan), layer_of(plan)
        if layer is not None and layer > last:
            last = layer
            found.waits.add(plan.target.name)
        if plan.kept or not plan.target.type.is_quantized:
            continue
        if layer is not None and shapes.get(name) != plan.target.shape:
            raise UsageError(
                "sequential (--sequential) needs tensors in the form that the model has",
                tensor=plan.target.name,
            )
        if layer is None and name not in _EMBEDDINGS:
            continue
        if layer == last or (layer is None and last < 0):
            found.tensors[layer].append((name, plan))
        else:
            found.late.append(plan.target.name)
    return found
