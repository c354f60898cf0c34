"""Experts of many rows on the CPU in compiled code: see `many_rows`, within whose context it is
used. Each function returns None where it is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..weights.ranges import opened
from ..weights.rounded import Rounded, RoundedRows
from . import many_rows
from .ffn import gated
from .specs import RouterSpec

if TYPE_CHECKING:
    from .moe import Experts, MoE


@functools.cache
def _operations():
    from ..simd import tiles
    from ..simd.operations import packed
    from ..simd.prompt import experts, rounded
    from ..simd.step.experts import routing

    return experts, routing, packed, (tiles, rounded)


def ask_for_operations(specs: Iterable[RouterSpec]) -> None:
    """Ask for the operations of experts that are chosen so (see `simd.operations.rehearsed`)."""
    experts, routing, _, (tiles, rounded) = _operations()
    for spec in specs:
        routing(spec.score, spec.groups > 1)
        experts.grouping()
        experts.combination()
        if tiles.available():
            rounded.gathering()


def choose(
    logits: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what `Router.choose` does, for logits float32[rows, n_experts], as steps do it."""
    if not many_rows.usable(logits):
        return None
    (_, routing, packed, _), n = _operations(), len(logits)
    logits, size = logits.contiguous(), 4 * spec.n_experts + 16
    bias = bias if bias is None else bias.contiguous()
    chosen = torch.empty(n, spec.n_used, dtype=torch.int64)
    weights, buffer = torch.empty(n, spec.n_used), torch.empty(torch.get_num_threads(), size)
    arguments = packed(
        *(logits.data_ptr(), 0 if bias is None else bias.data_ptr(), spec.n_experts, spec.n_used),
        *(spec.groups, spec.groups_used, spec.group_best, int(spec.norm), float(spec.scale)),
        *(chosen.data_ptr(), weights.data_ptr(), buffer.data_ptr(), 4 * size),
        *(spec.n_used, 0.0, n),
    )
    many_rows.run(routing(spec.score, spec.groups > 1), *arguments)
    return chosen, weights


def mix(
    moe: MoE,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    always: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]] | None = None,
) -> torch.Tensor | None:
    """Return what `MoE.mix` does. always: gives for x what is added, float32[rows, width], and
    float32[rows, 1] whose sigmoid multiplies that before, or None.
    """
    width, cpu = moe.experts.down.rows, moe.experts.down.device.type == "cpu"
    if not cpu or not many_rows.usable(x, width) or chosen.device != x.device:
        return None
    (experts, *_), (n, used) = _operations(), chosen.shape
    weights, (places, sources, counts) = weights.contiguous(), _grouped(moe, chosen, weights)
    each = counts.tolist()
    sources = sources[: sum(each)]
    found = _in_8_bits(moe.experts, x, sources, each)
    if found is None:
        found = moe.experts(x.index_select(0, sources), torch.from_numpy(counts))
    added = (None, None) if always is None else always(x)
    added = [y if y is None else y.contiguous() for y in added]
    found, out = found.contiguous(), torch.empty(n, width)
    many_rows.run(
        experts.combination(),
        *(found.data_ptr(), width, places.data_ptr(), weights.data_ptr(), n, used),
        *(0 if y is None else y.data_ptr() for y in added),
        out.data_ptr(),
    )
    return out


def _grouped(
    moe: MoE, chosen: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Return the places of slots among those that are grouped by expert, -1 for none, int64[slots];
    the rows of these, int64[slots]; and how many each expert has, int64[experts].
    """
    first, end = moe.owned or (0, moe.spec.n_experts)
    chosen, (experts, *_) = chosen.contiguous(), _operations()
    places, sources = torch.empty_like(chosen), torch.empty_like(chosen.view(-1))
    counts, ends = np.empty((2, end - first), dtype=np.int64)
    positive = 0 if moe.router.reduction is None else weights.data_ptr()
    many_rows.run(
        experts.grouping(),
        *(chosen.data_ptr(), chosen.numel(), chosen.shape[1], first, end - first, positive),
        *(places.data_ptr(), sources.data_ptr(), counts.ctypes.data, ends.ctypes.data),
    )
    return places, sources, counts


def _in_8_bits(
    experts: Experts, x: torch.Tensor, sources: torch.Tensor, counts: list[int]
) -> torch.Tensor | None:
    """Return what experts give for the rows of x with these numbers, if all products are in 8 bits.
    Each row of x is rounded once, for whatever experts.
    """
    if not all(linear.multiplies_rounded(counts) for linear in experts.linears):
        return None
    if not experts.spec.gated:
        return None
    with opened(*experts.range):
        rows = experts.down.matrices[0].round_rows(x).gathered(sources)
        if experts.gate_up is not None:
            gate, up = experts.gate_up.of_rounded(rows, counts).chunk(2, dim=-1)
        elif experts.gate is not None and experts.up is not None:
            gate, up = (y.of_rounded(rows, counts) for y in (experts.gate, experts.up))
        else:
            raise TypeError("experts need gate and up, or both merged")
        if experts.spec.is_silu:
            inner = Rounded.gated(gate, up)
        else:
            inner = RoundedRows(gated(experts.spec, gate, up))
        return experts.down.of_rounded(inner, counts)
