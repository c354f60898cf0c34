"""The residual stream of a pass, and the result of the last branch as long as it is not added.

A branch ends with `add`; the next norm adds its result on the way, so that the stream is read and
written once per branch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .....cuda_kernels.prompt import grouped as prompt_grouped
from .....cuda_kernels.prompt import rows as prompt_rows
from ....layers.batch import Batch
from ....layers.norm import LayerNorm, Norm
from ....weights.ranges import opened, ranged
from ...common.context import PIECE_BYTES, Context
from ...common.executor import Executor
from ...common.registry import Placed, PlacedBranch, Slow

if TYPE_CHECKING:
    from ....parallel.group import Group
    from .weights import Product


def check_norm(norm: Norm | None, context: Context) -> None:
    """`Slow` if the stream's kernels cannot apply this norm."""
    if norm is None:
        return
    if norm.weight.device != context.device:
        raise Placed(f"its norm is not on {context.device}")
    if not prompt_rows.norm_fits(len(norm.weight)):
        raise Slow(f"rows of {len(norm.weight)}")


class Stream:
    """h float32[T, width]. `narrows`: after the current branch only the last row of each sequence
    is needed. `accompanied`: other rows go through the same layer, one after the other.
    """

    def __init__(self, h: torch.Tensor, context: Context):
        self.h, self.context, self.narrows, self.accompanied = h, context, False, False
        self._added: dict[str, Any] = {}
        # While the results of a branch are parts of a sum over ranks, `add` gathers them here.
        self._parts: list[dict[str, Any]] | None = None

    def normed(
        self,
        norm: Norm | None,
        exact: torch.Tensor | None = None,
        permuted: bool = False,
        plain: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return norm(h) in half (`permuted` for grouped products), and write it in float32 to
        `exact` and not permuted to `plain` if these are given. Without a norm return h in half, in
        rows. Valid until the next call.
        """
        if norm is None:
            h = self.settled()
            out = self.context.buffer("normed", tuple(h.shape), self.context.dtype)
            prompt_rows.converted(h, out)
            return out
        apart = {"post_weight", "links", "extra"} if isinstance(norm, LayerNorm) else set[str]()
        if plain is not None and "links" not in self._added:
            apart.add("post_weight")
        if self._added.keys() & apart:  # no kernel does both
            self.settled()
        rows, width = self.h.shape
        stored = prompt_grouped.padded(width) if permuted else width
        out = self.context.buffer("normed", (rows, stored), self.context.dtype)
        if "links" in self._added:
            self._meet(norm, out, exact=exact, permuted=permuted, plain=plain)
            return out
        prompt_rows.add_norm(
            self.h,
            norm.weight,
            norm.eps,
            out,
            exact=exact,
            permuted=permuted,
            plain=plain,
            centered=isinstance(norm, LayerNorm),
            bias=norm.bias if isinstance(norm, LayerNorm) else None,
            **self._added,
        )
        self._added = {}
        return out

    def _meet(self, norm: Norm | None, out: torch.Tensor | None, **how: Any) -> None:
        """Add what all ranks add, in one launch with the norm after it."""
        added, self._added = self._added, {}
        with opened("", "sum over ranks"):
            added.pop("links").add_norm(
                self.h,
                None if norm is None else norm.weight,
                0.0 if norm is None else norm.eps,
                out,
                half=self.context.dtype,
                **how,
                **added,
            )

    def add(
        self,
        delta: torch.Tensor,
        rows: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        *,
        extra: torch.Tensor | None = None,
        shares: torch.Tensor | None = None,
        post_norm: Norm | None = None,
    ) -> None:
        """h += post_norm(delta), or of its weighted rows and `extra` (see `prompt.add_norm`). The
        next norm does it; the tensors must not change before.
        """
        found: dict[str, Any] = {"delta": delta}
        if weights is not None:
            found |= {"rows": rows, "weights": weights}
        if extra is not None:
            found |= {"extra": extra, "shares": shares}
        if post_norm is not None:
            if extra is not None:  # no kernel does both
                joined = self.context.buffer("joined", tuple(self.h.shape), self.context.dtype)
                prompt_rows.converted(self._joined([found]), joined)
                found = {"delta": joined}
            found |= {"post_weight": post_norm.weight, "post_eps": post_norm.eps}
        if self._parts is not None:
            self._parts.append(found)
            return
        assert not self._added  # two branches without a norm between them
        self._added = found

    def add_product(self, product: Product, x: torch.Tensor, post_norm: Norm | None) -> None:
        """h += post_norm(product(x)). Where that is a part of a sum over ranks, `sum_parts`
        multiplies, so that the sum of some rows runs while the next are multiplied; x must stay
        as it is.
        """
        if self._parts is not None and self.context.defers(self.h.shape[1]):
            self._parts.append({"product": product, "x": x})
        else:
            self.add(product(x), post_norm=post_norm)

    def begin_parts(self) -> None:
        """What is added from now on is this rank's part of a sum, until `sum_parts`."""
        self._parts = []

    def join_parts(self, group: Group) -> None:
        """Add the parts of this rank up, in the type that moves. It can be part of a graph."""
        moved = group.moved_type(len(self.h))
        if self._is_deferred(moved):
            return
        total = self._joined(self._parts or [])
        if total.dtype != (moved or torch.float32):
            # In a buffer, as graphs read it in the same place again.
            shape = tuple(total.shape)
            total = self.context.buffer("sum over ranks", shape, moved or torch.float32).copy_(
                total
            )
        self._parts = [{"delta": total}]

    def meet_parts(self, group: Group, norm: Norm | None) -> None:
        """Add norm(the sum of the parts of all ranks); the next norm does it."""
        (rows, width), links = self.h.shape, self.context.row_links
        moved = group.moved_type(rows)
        if links is None or moved is None or not links.fits(rows, width, moved):
            self.join_parts(group)
            self.sum_parts(group, norm)
            return
        parts, self._parts = self._parts or [], None
        plain = [part for part in parts if "weights" not in part]
        weighted = [part for part in parts if "weights" in part]
        found: dict[str, Any] = {"links": links, "moved": moved}
        extra = [part for part in weighted if "extra" in part]
        if len(plain) + len(extra) < 2 and len(weighted) < 2:
            if weighted:
                found |= weighted[0]
            if plain:
                found["extra" if weighted else "delta"] = plain[0]["delta"]
        else:
            shape, half = tuple(self.h.shape), self.context.dtype
            total = self.context.buffer("sum over ranks", shape, half)
            found["delta"] = total.copy_(self._joined(parts))
        if norm is not None:
            found |= {"post_weight": norm.weight, "post_eps": norm.eps}
        self._added = found

    def sum_parts(self, group: Group, norm: Norm | None) -> None:
        """Add norm(the sum of the parts of all ranks), which `join_parts` has joined."""
        half, moved = self.context.dtype, group.moved_type(len(self.h))
        deferred, [part] = self._is_deferred(moved), self._parts or [{}]
        self._parts = None
        if deferred:
            total = part["product"].out(len(part["x"]))
            group.sum_while(part["product"].pieces(part["x"], self._rows_together(half)))
        elif moved is None:
            total = group.sum(part["delta"])
        else:
            total = part["delta"]
            group.sum_while(total.split(self._rows_together(moved)))
        if total.dtype == half:
            self.add(total, post_norm=norm)
        else:
            self.settled().add_(total if norm is None else norm(total.float()))

    def _is_deferred(self, moved: torch.dtype | None) -> bool:
        """Return whether the only part is a product that is multiplied while it is summed."""
        parts = self._parts or []
        return moved == self.context.dtype and len(parts) == 1 and "product" in parts[0]

    def _rows_together(self, moved: torch.dtype) -> int:
        """Return how many rows are summed over ranks at a time."""
        return max(1, PIECE_BYTES // (self.h.shape[1] * moved.itemsize))

    def _joined(self, parts: list[dict[str, Any]]) -> torch.Tensor:
        """Return the sum of the parts of this rank, in half or float32, in a buffer."""
        parts = [_multiplied(part) for part in parts]
        if len(parts) == 1 and "weights" not in parts[0]:
            return parts[0]["delta"]
        total = self.context.buffer("part of a sum", tuple(self.h.shape), torch.float32)
        total.zero_()
        for part in parts:
            prompt_rows.add_norm(total, None, 0.0, None, **part)
        return total

    def scale(self, factor: float) -> None:
        """Multiply h by a factor."""
        if "post_weight" in self._added:
            self._added = {**self._added, "scale": factor * self._added.get("scale", 1.0)}
        else:
            h = self.settled()
            h *= factor

    def pending(self) -> dict[str, Any]:
        """Return what is not added yet, and which rows are left, for `left`."""
        parts = None if self._parts is None else list(self._parts)
        rows = {"h": self.h, "narrows": self.narrows}
        return {"added": dict(self._added), "parts": parts, **rows}

    def left(self, pending: dict[str, Any]) -> None:
        """Restore the state when `pending` was called: a graph has run the same kernels again."""
        parts = pending["parts"]
        self.h, self.narrows = pending["h"], pending["narrows"]
        self._added = dict(pending["added"])
        self._parts = None if parts is None else list(parts)

    def settled(self) -> torch.Tensor:
        """Return h with everything added."""
        if "links" in self._added:
            self._meet(None, None)
        elif self._added:
            prompt_rows.add_norm(self.h, None, 0.0, None, **self._added)
            self._added = {}
        return self.h

    def settle_between(self) -> None:
        """Add what is left, before more is added without a norm between. Parts of a sum over ranks
        stay parts.
        """
        if self._parts is None:
            self.settled()

    def multiply_parts(self) -> None:
        """Multiply what is left to the sum over ranks, before what it reads changes."""
        if self._parts is not None:
            self._parts = [_multiplied(part) for part in self._parts]

    def keep_last(self, n_sequences: int) -> None:
        """Keep only the last row of each of so many sequences, in a buffer."""
        if len(self.h) > n_sequences:
            h = last_rows(self.settled(), n_sequences)
            self.h = self.context.buffer("last rows", tuple(h.shape), h.dtype).copy_(h)


def _multiplied(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a sum over ranks whose product is done."""
    return {"delta": part["product"](part["x"])} if "product" in part else part


def last_rows(x: torch.Tensor, n_sequences: int) -> torch.Tensor:
    """[S * n, ...] to [S, ...]: the last row of each sequence."""
    return x.unflatten(0, (n_sequences, -1))[:, -1]


class SlowBranch(Executor):
    """A branch on the reference path, on the device of its block."""

    def __init__(self, branch: PlacedBranch):
        self.branch = branch

    def __call__(self, stream: Stream, batch: Batch) -> None:
        h, branch, device = stream.settled(), self.branch, self.branch.device
        h += branch.branch(h.to(device), batch.at(branch.layer, device)).to(h.device)


class Scaled(Executor):
    """h *= scale, after the branches of a block."""

    def __init__(self, branch: PlacedBranch, scale: float):
        self.branch, self.scale = branch, scale

    @ranged
    def __call__(self, stream: Stream, batch: Batch) -> None:
        stream.scale(self.scale)
