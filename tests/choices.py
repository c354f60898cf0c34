"""The discrete choices of a model while it runs: experts of routers, positions of indexers.

Rounding can change a choice between nearly equal experts, and with it all that follows, so results
of two precisions can only be compared where all choices were the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from iqforge.cuda_kernels.attention import index
from iqforge.cuda_kernels.prompt import experts as prompt_experts
from iqforge.cuda_kernels.step.router import StepRouter
from iqforge.runtime.cuda.prompt.common import graphs as prompt_graphs
from iqforge.runtime.cuda.step.path import StepPath
from iqforge.runtime.layers import indexer
from iqforge.runtime.layers.moe import MoE

Choices = list[torch.Tensor]  # what each call chose for its rows, in the order of calls


@contextmanager
def recorded(monkeypatch) -> Iterator[Choices]:
    """While the context is open, gather int64[rows, chosen], ascending, of every router and indexer
    that runs, on the reference path or on kernels. Nothing is captured, as a graph chooses unseen.
    """
    found: Choices = []

    def keep(ids: torch.Tensor) -> None:
        found.append(ids.long().cpu().sort(dim=-1).values)

    with monkeypatch.context() as patch:
        mix, group, route = MoE.mix, prompt_experts.group_rows, StepRouter.__call__
        best, select, path = indexer.best_positions, index.index_select, StepPath.__init__

        def mixed(self, x, chosen, weights):
            keep(chosen)
            return mix(self, x, chosen, weights)

        def grouped(ids, *rest):
            keep(ids)
            group(ids, *rest)

        def routed(self, h, norm, eps, matrix, ids, *rest):
            route(self, h, norm, eps, matrix, ids, *rest)
            keep(ids)

        def positions(scores, top_k, *counts):
            seen = best(scores, top_k, *counts)
            numbers = torch.arange(seen.shape[1], device=seen.device)
            chosen = torch.where(seen, numbers, -1).sort(dim=-1, descending=True).values
            missing = top_k - chosen.shape[1]
            keep(torch.nn.functional.pad(chosen, (0, max(0, missing)), value=-1)[:, :top_k])
            return seen

        def selected(shape, scores, position, chosen, **options):
            select(shape, scores, position, chosen, **options)
            keep(chosen)

        def uncaptured(self, *args):
            path(self, *args)
            self.captures = False

        patch.setattr(MoE, "mix", mixed)
        patch.setattr(prompt_experts, "group_rows", grouped)
        patch.setattr(StepRouter, "__call__", routed)
        patch.setattr(indexer, "best_positions", positions)
        patch.setattr(index, "index_select", selected)
        patch.setattr(StepPath, "__init__", uncaptured)
        patch.setattr(prompt_graphs, "can_capture", lambda device: False)
        yield found


def by_token(found: Choices, pieces: list[int]) -> list[torch.Tensor]:
    """Return int64[tokens, chosen] for every router and indexer, of calls for pieces of so many
    tokens each. Pieces in which all positions are seen have no choice of positions: see `Index`.
    """
    if not found:
        return []
    n_each, rest = divmod(len(found), len(pieces))
    assert not rest, "every piece takes as many choices"
    rows = [torch.cat(found[i::n_each]) for i in range(n_each)]
    assert all(len(x) == sum(pieces) for x in rows)
    return rows


def comparable(one: list[torch.Tensor], other: list[torch.Tensor], n: int) -> torch.Tensor:
    """Return bool[n]: whether the results of a token follow from the same choices, of the token and
    of those that it sees.

    The last choice must be that of the router of the last layer: other tokens do not see it.
    """
    assert len(one) == len(other)
    same = torch.ones(n, dtype=torch.bool)
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        alike = (a == b).all(1)
        same &= alike if number == len(one) - 1 else alike.cumprod(0).bool()
    return same
