"""How a split plan divides the tensors of each role, such as `attn_q`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..formats.source import TensorInfo
from ..formats.tensor_names import OUTPUT, TensorName
from .weights.shard import local_tensor
from .weights.split_plan import SplitPlan


@dataclass(frozen=True)
class RoleSplit:
    """The tensors of one role, of all layers.

    kind: as that of `TensorSplit`; several are joined by "/". whole: elements of the dimension that
    is split; 0 if none is. unit: of which all cuts are multiples. sizes: the least and the largest
    number of elements in a layer, for each rank. n_bytes: of all layers, for each rank.
    """

    role: str
    kind: str
    whole: int
    unit: int
    sizes: tuple[tuple[int, int], ...]
    n_bytes: tuple[int, ...]


def roles_of(tensors: Sequence[TensorInfo], plan: SplitPlan) -> tuple[RoleSplit, ...]:
    """Return the split of every role, in the order of the file; the output is last."""
    groups: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        groups.setdefault(_role(tensor), []).append(tensor)
    if (split := plan.tensors.get(OUTPUT)) is not None and split.tied:
        [table] = [tensor for tensor in tensors if tensor.name == split.tied]
        groups["output"] = [TensorInfo(OUTPUT, table.shape, table.type)]
    found = []
    for role, members in groups.items():
        cuts, kinds, whole = [], {}, 0
        sizes: list[list[int]] = [[] for _ in range(plan.n_ranks)]
        n_bytes = [0] * plan.n_ranks
        for tensor in members:
            one = plan.of(tensor.name)
            kinds[one.kind] = True
            n = tensor.shape[one.axis] if one.ranges else 0
            whole = max(whole, n)
            cuts += [end for ranges in one.ranges for both in ranges for end in both]
            for rank in range(plan.n_ranks):
                local = local_tensor(tensor, one, rank)
                n_bytes[rank] += 0 if local is None else local.n_bytes
                sizes[rank].append(one.size(rank, n) if one.ranges else 0)
        spans = tuple((min(each), max(each)) for each in sizes)
        found.append(
            RoleSplit(role, "/".join(kinds), whole, math.gcd(*cuts), spans, tuple(n_bytes))
        )
    return tuple(found)


def _role(tensor: TensorInfo) -> str:
    """Return the name of a tensor without its layer; vectors that are copied are one role."""
    name = TensorName.parse(tensor.name)
    return name.stem if name.suffix == "weight" else name.local
