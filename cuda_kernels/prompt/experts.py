"""The choice of experts in prompts, and their rows in order, at torch level."""

from __future__ import annotations

import numpy as np
import torch

from ..common.routing import Routing
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .overlap import overlap

_PER_LANE = (1, 2, 4, 8, 16)
_ROUTE_WARPS = 4
_GROUP_THREADS, _GROUPED = 1024, 4  # experts of a block
_EXPERTS_SPEC = KernelSpec(
    "prompt_experts", ("prompt/experts.cu",), (), (*(f"route_{n}" for n in _PER_LANE), "group_rows")
)


def specs() -> list[KernelSpec]:
    """Return all kernels of this module."""
    return [_EXPERTS_SPEC]


def route_fits(n_experts: int, n_used: int, routing: Routing = Routing()) -> bool:
    """Return whether `route` takes this many experts and groups."""
    return (
        n_experts <= 32 * _PER_LANE[-1]
        and n_used <= 32
        and routing.groups <= 32
        and n_experts % routing.groups == 0
        and routing.group_best <= 2
    )


def route(
    logits: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    ser: tuple[int, float] | None = None,
    routing: Routing = Routing(),
    choice_bias: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Choose the experts of each token from router logits float32[T, n_experts], or from parts
    float32[n, T, n_experts] that are added in order, plus bias float32[n_experts]: ids int32[T, k]
    and weights float32[T, k].

    They are the k with the largest scores, plus choice_bias float32[n_experts], in descending
    order, equal ones by ascending index; see `Routing`. With `ser` = (K, t) the experts from slot
    K on count only if their score exceeds t times that of the first; otherwise they have id -1 and
    weight 0.
    """
    tokens, n_experts = logits.shape[-2:]
    n_used = ids.shape[1]
    per_lane = next(n for n in _PER_LANE if 32 * n >= n_experts)
    always, threshold = ser or (n_used, 0.0)
    launch(
        function(_EXPERTS_SPEC, f"route_{per_lane}", logits.device),
        -(-tokens // _ROUTE_WARPS),
        32 * _ROUTE_WARPS,
        logits,
        np.int32(logits.numel() // (tokens * n_experts)),
        bias,
        np.int32(tokens),
        np.int32(n_experts),
        np.int32(n_used),
        np.int32(always),
        np.float32(threshold),
        np.int32(routing.sigmoid),
        np.int32(routing.norm),
        np.float32(routing.scale),
        np.int32(routing.groups),
        np.int32(routing.groups_used),
        np.int32(routing.group_best),
        choice_bias,
        ids,
        weights,
        pdl=overlap(tokens),
    )


def group_rows(
    ids: torch.Tensor, ends: torch.Tensor, sources: torch.Tensor, rows: torch.Tensor
) -> None:
    """Sort ids int32[T, k] by expert, stably: rows of one expert follow each other in (token, slot)
    order.

    ends int32[n_experts]: rows of experts 0..e; sources int32[T * k]: which flat (token, slot) a
    grouped row is, -1 after the last; rows int32[T, k]: the grouped row of each, -1 where the id
    is below 0.
    """
    launch(
        function(_EXPERTS_SPEC, "group_rows", ids.device),
        -(-len(ends) // _GROUPED),
        _GROUP_THREADS,
        ids,
        np.int32(ids.numel()),
        np.int32(len(ends)),
        ends,
        sources,
        rows,
        pdl=overlap(len(ids)),
    )
