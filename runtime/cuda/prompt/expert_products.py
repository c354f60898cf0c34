"""Products of experts with rows that are grouped by expert.

On Hopper, they read packed weights. Elsewhere all experts are decoded first, used or not: with
hundreds of rows few are unused. There the host waits in every layer for the number of rows of each
expert, unless torch has grouped products for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....cuda_kernels.common.gating import ExpertTerms
from ....cuda_kernels.packed.matrix import PackedMatrix
from ....cuda_kernels.prompt import grouped as prompt_grouped
from ....cuda_kernels.prompt import rows as prompt_rows
from ...layers.moe import MoE
from ...weights.stacked_linear import ExpertLinear
from ...weights.taps import GroupedRows
from ..common.context import Context
from ..common.expert_terms import gating_of, inputs_of
from .common.decoded import stacked

Grouped = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ExpertProducts:
    """down(act(gate(x)) * up(x)) of each expert on its rows.

    packed: returns the matrices of all experts with their terms, the parts of merged ones if those
    are not next to each other. fused: weights are decoded within the products, which read rows in
    another order of columns (`places`).
    """

    def __init__(
        self,
        m: MoE,
        packed: Callable[[ExpertLinear], list[tuple[PackedMatrix, ExpertTerms]]],
        context: Context,
    ):
        self.m, self.context = m, context
        e = m.experts
        once = {linear: packed(linear) for linear in inputs_of(e)}  # up may be there twice
        pairs = [pair for linear in inputs_of(e) for pair in once[linear]]
        self.inputs = [matrix for matrix, _ in pairs]
        self.input_terms = [terms for _, terms in pairs]
        [(self.down, self.down_terms)] = packed(e.down)
        self.gating = gating_of(e.spec)
        self.fused = prompt_grouped.gate_up_fits(
            self.inputs, context.device
        ) and prompt_grouped.fits([self.down], context.device)
        self._grouped: Grouped | None = None

    def choose(self, layer: int) -> None:
        """Choose what multiplies decoded experts, and say so if that is slow. The last step of an
        executor's construction: one that is refused says something else.
        """
        if self.fused:
            return
        self._grouped = grouped_product(self.context, layer)
        if self._grouped is not _one_by_one:
            self.context.report(
                "MoE",
                "no products that read packed experts of this shape on this device: all are decoded"
                " first",
                layer,
            )

    def __call__(self, x: torch.Tensor, ends: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Return half[slots, width], grouped by expert, for rows x. ends, sources: what
        `group_rows` of the kernels gives.
        """
        if self.context.taps.fast:
            inputs = dict.fromkeys(inputs_of(self.m.experts))  # one of them may be there twice
            names = [name for linear in inputs for name in linear.observed]
            groups = GroupedRows(ends, sources, self.m.spec.n_used)
            self.context.taps.show(names, x, groups, self._places(self.inputs[0].cols))
        return (self._fused if self.fused else self._apart)(x, ends, sources)

    def _places(self, cols: int) -> torch.Tensor | None:
        """Return where columns are in rows of activations; None if they are in order."""
        return prompt_grouped.places(cols, self.context.device) if self.fused else None

    def _show_gated(self, gated: torch.Tensor, ends: torch.Tensor) -> None:
        """Show the input of the down matrices, whose rows are grouped by expert."""
        down = self.m.experts.down
        if self.context.taps.fast:
            places = self._places(self.down.cols)
            self.context.taps.show(down.observed, gated, GroupedRows(ends), places)

    def _fused(self, x: torch.Tensor, ends: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Weights are decoded within the products: half[rows grouped by expert, width]."""
        hidden = prompt_grouped.padded(self.down.cols)
        gated = self.context.buffer("gated", (len(sources), hidden), x.dtype)
        prompt_grouped.grouped_gate_up(
            self.inputs,
            ends,
            x,
            gated,
            sources,
            self.m.spec.n_used,
            self.gating,
            self.input_terms,
            self.m.spec.n_experts,
        )
        self._show_gated(gated, ends)
        out = self.context.buffer("delta", (len(sources), self.down.rows), x.dtype)
        prompt_grouped.grouped_product(
            self.down, ends, gated, out, terms=self.down_terms, n_experts=self.m.spec.n_experts
        )
        return out

    def _apart(self, x: torch.Tensor, ends: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """All experts are decoded, then multiplied."""
        grouped = self.context.buffer("grouped", (len(sources), x.shape[1]), x.dtype)
        prompt_rows.gather_rows(x, sources, self.m.spec.n_used, grouped)
        gate = self._product(grouped, self.inputs[0], self.input_terms[0], ends)
        if len(self.inputs) == 1:
            gate, up = gate.chunk(2, dim=1)
        elif self.inputs[1] is self.inputs[0]:  # no gate: see `gating_of`
            up = gate
        else:
            up = self._product(grouped, self.inputs[1], self.input_terms[1], ends)
        gated = self.context.buffer("gated", tuple(gate.shape), gate.dtype)
        prompt_rows.join_gate(gate, up, gated, self.gating)
        self._show_gated(gated, ends)
        result = self._product(gated, self.down, self.down_terms, ends)
        # In a buffer, as graphs after it read it in the same place again.
        return self.context.buffer("delta", tuple(result.shape), result.dtype).copy_(result)

    def _product(
        self, x: torch.Tensor, matrix: PackedMatrix, terms: ExpertTerms, ends: torch.Tensor
    ) -> torch.Tensor:
        """Return half[rows, n_out] of rows grouped by expert; rows after those of the last expert
        are undefined.
        """
        if self._grouped is None:
            raise TypeError("nothing multiplies decoded experts")
        weights = stacked([matrix], self.context).view(matrix.n_matrices, matrix.rows, matrix.cols)
        return with_terms(self._grouped(x, weights, ends), terms, ends)


def with_terms(y: torch.Tensor, terms: ExpertTerms, ends: torch.Tensor) -> torch.Tensor:
    """Return products half[rows, n_out] of rows grouped by expert with scales and biases."""
    if not terms:
        return y
    rows = torch.arange(len(y), device=y.device, dtype=ends.dtype)
    experts = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
    result = y.float()
    if terms.scale is not None:
        result *= terms.scale[experts, None]
    if terms.bias is not None:
        result += terms.bias[experts]
    return result.to(y.dtype)


def grouped_product(context: Context, layer: int) -> Grouped:
    """torch's grouped product where the device has one, else a loop over experts that waits for
    their counts.
    """
    if context.dtype == torch.bfloat16 and torch.cuda.get_device_capability(context.device) in (
        (9, 0),
        (10, 0),
    ):
        # Torch has no public name for it.
        return lambda x, w, ends: torch._grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
            x, w.transpose(-2, -1), offs=ends
        )
    name = str(context.dtype).removeprefix("torch.")
    context.report(
        "MoE", f"no grouped product in {name} on this device: experts one after the other", layer
    )
    return _one_by_one


def _one_by_one(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out, start = x.new_empty(len(x), w.shape[1]), 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], w[expert].t(), out=out[start:end])
        start = end
    return out
