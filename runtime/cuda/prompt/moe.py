"""Experts over many rows: routed and grouped in a stable order on the device. Their products are in
`expert_products.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ....cuda_kernels.common.gating import ExpertTerms
from ....cuda_kernels.packed.matrix import PackedMatrix
from ....cuda_kernels.prompt import experts as prompt_experts
from ....cuda_kernels.prompt import grouped as prompt_grouped
from ....cuda_kernels.prompt import rows as prompt_rows
from ....cuda_kernels.prompt import scores as prompt_scores
from ...layers.batch import Batch
from ...layers.moe import MoE
from ...layers.norm import LayerNorm
from ...weights.linear import Linear
from ...weights.stacked_linear import ExpertLinear
from ..common.context import Context
from ..common.executor import operation
from ..common.expert_terms import routing_of, terms_of
from ..common.registry import Placed, PlacedBranch, Slow
from .common.graphs import Stage, Staged
from .common.stream import SlowBranch, Stream, check_norm
from .common.weights import Product, packed
from .expert_products import ExpertProducts
from .shared_expert import SharedExpert


class PromptMoE(Staged):
    """h += sum over the chosen experts of weight * down(silu(gate(x)) * up(x)), slots in ascending
    order, or with another activation. The router works in float32.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        m: MoE = branch.module
        check_norm(branch.norm, context)
        self.routing = routing_of(m.router)
        if not prompt_experts.route_fits(m.spec.n_experts, m.spec.n_used, self.routing):
            raise Slow(f"{m.spec.n_used} of {m.spec.n_experts} experts")
        if m.spec.on_input and (m.spec.n_used > 1 or isinstance(branch.norm, LayerNorm)):
            raise Slow(f"weights of {m.spec.n_used} experts that multiply what these read")
        if m.spec.on_input and m.router.reduction is not None:
            raise Slow("-ser where weights multiply what experts read")
        self.branch, self.norm, self.m, self.context = branch, branch.norm, m, context
        if m.router.linear.device != context.device:
            raise Placed(f"the weights of {m.router.linear.role} are not on {context.device}")
        self.router = _floats(m.router.linear)
        self.products = ExpertProducts(m, self.packed, context)
        self.fused = self.products.fused
        self.shared = None if m.shared is None else SharedExpert(m, context)
        self.latent = None
        if m.latent is not None:
            if branch.post_norm is not None or m.shared_gate is not None:
                raise Slow("experts that read shorter vectors, with a norm after them or a gate")
            self.latent = (
                Product("latent", [m.latent.down], context),
                Product("latent up", [m.latent.up], context),
            )
        self.products.choose(branch.layer)

    def packed(self, linear: ExpertLinear) -> list[tuple[PackedMatrix, ExpertTerms]]:
        """Return the matrices of all experts with their terms, the parts of merged ones if those
        are not next to each other.
        """
        return [(packed(linear, self.context, biased=True), terms_of(linear, self.context))]

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        return [(self.fused and self.latent is None, self._run)]

    def leaves(self, stream: Stream) -> bool:
        """Return whether so few rows are left to the reference path."""
        return False

    def present(self) -> AbstractContextManager[None]:
        """While the context is open, the experts are on the device."""
        return nullcontext()

    def _run(self, stream: Stream, batch: Batch) -> None:
        if self.leaves(stream):
            if self.branch.is_summed:  # what is added is this rank's part
                y, context = self.m(self.norm(stream.settled())), self.context
                stream.add(context.buffer("delta", tuple(y.shape), context.dtype).copy_(y))
            else:
                SlowBranch(self.branch)(stream, batch)
            return
        with self.present():
            exact = self.context.buffer("normed f32", tuple(stream.h.shape), torch.float32)
            if self.latent is not None:
                self._run_latent(stream, exact)
                return
            plain = None
            if self.shared is not None and self.fused:
                plain = self.context.buffer("plain", tuple(exact.shape), self.context.dtype)
            x = self._normed(stream, exact, plain)
            ids, weights = self.routed(exact)
            extra = shares = None
            if self.shared is not None:
                extra, shares = self.shared(x if plain is None else plain, exact)
            if self.m.spec.on_input:
                x *= weights.to(x.dtype)
                weights.fill_(1)
            mixed, post_norm = self.mixed(x, ids, weights), self.branch.post_norm
            stream.add(*mixed, extra=extra, shares=shares, post_norm=post_norm)

    def _normed(
        self, stream: Stream, exact: torch.Tensor, plain: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what routed experts read, and write the rows to `exact` in float32 and to `plain`,
        if there is a shared expert with another order of columns.
        """
        if plain is None or not isinstance(self.norm, LayerNorm):
            return stream.normed(self.norm, exact, permuted=self.fused, plain=plain)
        x = stream.normed(self.norm, exact, permuted=self.fused)  # no kernel writes all three
        prompt_rows.converted(exact, plain)
        return x

    def _run_latent(self, stream: Stream, exact: torch.Tensor) -> None:
        """Experts read one product of the normed rows, and another one reads their sum."""
        if self.latent is None:
            raise TypeError("experts read the stream")
        down, up = self.latent
        x = stream.normed(self.norm, exact)
        ids, weights = self.routed(exact)
        extra = None if self.shared is None else self.shared(x, exact)[0]
        read = latent = down(x)
        if self.fused:
            shape = len(x), prompt_grouped.padded(latent.shape[1])
            read = self.context.buffer("latent in order", shape, x.dtype).zero_()
            read[:, prompt_grouped.places(latent.shape[1], x.device)] = latent
        out, rows, weights = self.mixed(read, ids, weights)
        total = self.context.buffer("latent sum", tuple(latent.shape), torch.float32).zero_()
        prompt_rows.add_norm(total, None, 0.0, None, delta=out, rows=rows, weights=weights)
        y = up(latent.copy_(total))
        stream.add(y if extra is None else y.add_(extra))

    def input_shape(self, tokens: int) -> tuple[int, int]:
        """Return the shape of what `mixed` reads."""
        width = self.m.experts.down.rows
        return tokens, prompt_grouped.padded(width) if self.fused else width

    def routed(self, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return experts int32[T, k] and their weights float32[T, k] for float32[T, width]."""
        m, context, tokens = self.m, self.context, len(exact)
        ids, weights = (
            context.buffer(name, (tokens, m.spec.n_used), dtype)
            for name, dtype in (("expert ids", torch.int32), ("expert weights", torch.float32))
        )
        if self.router is None:
            logits, bias = m.router.linear(exact), None
        else:
            logits, bias = self._scores(exact, self.router), m.router.linear.bias
        prompt_experts.route(logits, ids, weights, context.ser, self.routing, m.router.bias, bias)
        if m.owned is not None:
            first, last = m.owned
            ids -= first
            ids.masked_fill_((ids < 0) | (ids >= last - first), -1)
        return ids, weights

    def _scores(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Return parts of the router's products float32[parts, T, n_experts], without its bias."""
        linear, n = self.m.router.linear, len(matrix)
        linear.observe(x)
        parts = prompt_scores.parts_of(len(x), x.shape[1], n, x.device)
        out = self.context.buffer("router scores", (parts, len(x), n), torch.float32)
        operation(prompt_scores.scores, x, matrix, out)
        return linear.check(out)

    def mixed(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the results of experts, the row of each slot, and its weight, for `Stream.add`."""
        ends, sources, rows = (
            self.context.buffer(name, shape, torch.int32)
            for name, shape in (
                ("expert ends", (self.products.down.n_matrices,)),
                ("row sources", (ids.numel(),)),
                ("slot rows", tuple(ids.shape)),
            )
        )
        prompt_experts.group_rows(ids, ends, sources, rows)
        return self.products(x, ends, sources), rows, weights


def _floats(linear: Linear) -> torch.Tensor | None:
    """Return the matrix of a router [n_experts, width], in float32 as it is stored or in bfloat16
    without loss, for `prompt_scores`; None if it is of another type or shape.
    """
    held = linear.matrix.packed
    if held is None or held.device.type != "cuda":
        return None
    if held.type.name != "F32":
        return None
    values = held.data.view(torch.float32).view(held.rows, held.cols)
    values = values if linear.scale is None else values * linear.scale
    values = prompt_scores.shortened(values)
    fits = prompt_scores.fits(held.rows, held.cols, held.device, values.dtype)
    return values if fits else None
