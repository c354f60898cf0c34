"""Sums of squared inputs of every weight, of what is observed in a model."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NoReturn

import numpy as np
import torch

from ..errors import ImatrixError
from ..formats.tensor_names import OUTPUT, TensorName
from ..runtime.model import Model
from ..runtime.weights.stacked_linear import ExpertLinear, HeadLinear
from ..runtime.weights.taps import GroupedRows
from .data import Entry, Imatrix


class Collector:
    """Observe a model's products and sum up their squared inputs. Tensors named `blk.*` are
    collected, and `output_name` if `process_output` is set.

    Rows count `weight` times. Sums start from those of `before`, if given. seen: products wait here
    to be added by whoever owns the list, instead of being added at once.
    """

    def __init__(
        self,
        model: Model,
        process_output: bool = False,
        output_name: str = OUTPUT,
        before: Imatrix | None = None,
    ):
        self._n_matrices = {
            name: len(p.matrices)
            for p in model.weights.parameters
            if isinstance(p, (ExpertLinear, HeadLinear)) and not p.together
            for name in p.observed
        }
        self._path = model.source.path
        self._output = output_name if process_output else None
        entries = {} if before is None else before.entries
        self._sums = {name: torch.from_numpy(entry.sums.copy()) for name, entry in entries.items()}
        self._counts = {
            name: torch.from_numpy(entry.counts.astype(np.float64))
            for name, entry in entries.items()
        }
        self._last: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        # Of the fast path: float64 sums and counts by the tensors that read an input.
        self._inputs: dict[tuple[str, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self.weight = 1.0
        self.seen: list[tuple[str, torch.Tensor, torch.Tensor]] | None = None

    def __call__(self, name: str, x: torch.Tensor, experts: torch.Tensor | None) -> None:
        if not self._collects(name):
            return
        # Query, key and value, or gate and up, see the same input one after the other.
        if self._last is None or self._last[0] is not x:
            self._last = (x, *_squares(x, experts, self._n_matrices.get(name, 1)))
        _, sums, counts = self._last
        if not torch.isfinite(sums).all():
            self._refuse(name)
        if self.seen is None:
            self.add(name, sums, counts)
        else:
            self.seen.append((name, sums.cpu(), counts.cpu()))

    def see(
        self,
        names: Sequence[str],
        x: torch.Tensor,
        groups: GroupedRows | None = None,
        places: torch.Tensor | None = None,
    ) -> None:
        """Add the squares of an input of the fast path up, without waiting for the device. Values
        that are not finite are noticed when the sums are used.
        """
        key = tuple(name for name in names if self._collects(name))
        if not key:
            return
        if groups is None:
            sums = torch.linalg.vector_norm(x, dim=0, keepdim=True, dtype=torch.float32).square_()
            counts = None
        else:
            shares = rows_of_experts(groups, len(x))
            sums, counts = shares @ x.float().square(), shares.sum(1, dtype=torch.float64)
        if places is not None:
            sums = sums[:, places]
        if key not in self._inputs:
            self._inputs[key] = self._begun(key, sums)
        total, total_counts = self._inputs[key]
        # The owner of `seen` weighs what it adds.
        weight = self.weight if self.seen is None else 1.0
        total.add_(sums if weight == 1 else sums.double() * weight)
        total_counts.add_(len(x) * weight if counts is None else counts * weight)

    def _begun(
        self, names: tuple[str, ...], like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums and counts of an input that the fast path adds to: those of `before`, or
        zeros.
        """
        held = []
        if self.seen is None:  # otherwise its owner continues those sums
            held = [(self._sums.pop(n, None), self._counts.pop(n, None)) for n in names]
        sums, counts = held[0] if held else (None, None)
        if sums is None or counts is None:
            zeros = torch.zeros_like(like, dtype=torch.float64)
            return zeros, zeros[:, 0].clone()
        return sums.to(like.device), counts.to(like.device)

    def end_of_pass(self) -> None:
        """Hand what the fast path has added up to the owner of `seen`, if there is one."""
        self.forget_inputs()
        if self.seen is None:
            return
        self._check_inputs()
        for names, (sums, counts) in self._inputs.items():
            held = sums.to("cpu", copy=True), counts.to("cpu", copy=True)
            self.seen += [(name, *held) for name in names]
            sums.zero_()
            counts.zero_()

    def _check_inputs(self) -> None:
        for names, (sums, _) in self._inputs.items():
            if not torch.isfinite(sums).all():
                self._refuse(names[0])

    def _refuse(self, name: str) -> NoReturn:
        raise ImatrixError("the input of this tensor is not finite", file=self._path, tensor=name)

    def _collects(self, name: str) -> bool:
        return TensorName.parse(name).layer is not None or name == self._output

    def add(self, name: str, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Add what one product of a pass gives."""
        for totals, new in ((self._sums, sums), (self._counts, counts)):
            weighted = new.double() * self.weight
            # Sums of a resumed run come from a file, not from the device.
            totals[name] = (
                totals[name].to(new.device).add_(weighted) if name in totals else weighted
            )

    @property
    def names(self) -> Set[str]:
        """Return the names of the tensors seen so far."""
        return self._sums.keys() | {name for names in self._inputs for name in names}

    def forget_inputs(self) -> None:
        """Drop the last input, which would be kept alive otherwise."""
        self._last = None

    def entries(self) -> dict[str, Entry]:
        """Return the entries in order of names. Counts are float64, as weights may make them
        fractions. Raise ImatrixError for sums of the fast path that are not finite.
        """
        self._check_inputs()
        found = {name: (sums, self._counts[name]) for name, sums in self._sums.items()}
        if self.seen is None:
            found |= {name: held for names, held in self._inputs.items() for name in names}
        return {
            name: Entry(sums.numpy(force=True).copy(), counts.numpy(force=True).copy())
            for name, (sums, counts) in sorted(found.items())
        }


def rows_of_experts(groups: GroupedRows, n_rows: int) -> torch.Tensor:
    """Return float32[experts, n_rows]: 1 where an expert reads a row, else 0."""
    ends = groups.ends.long()
    n_experts, device = len(ends), ends.device
    n_grouped = n_rows if groups.sources is None else len(groups.sources)
    at = torch.arange(n_grouped, device=device)
    experts = torch.searchsorted(ends, at, right=True)  # n_experts after the last one
    if groups.sources is not None:
        at = groups.sources.long().clamp_(min=0) // groups.n_slots
    found = torch.zeros(n_experts + 1, n_rows, device=device)
    # An expert reads a row once; the last line is for rows of no expert.
    found.view(-1).index_fill_(0, experts * n_rows + at, 1.0)
    return found[:n_experts]


def _squares(
    x: torch.Tensor, experts: torch.Tensor | None, n_matrices: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32[n_matrices, n_cols] column sums of x^2 and int64[n_matrices] row counts for
    one pass.

    The rows of an expert are adjacent and summed separately, so nothing depends on the order in
    which threads finish.
    """
    if experts is None:
        return x.square().sum(dim=0, keepdim=True), torch.tensor([len(x)], device=x.device)
    counts = torch.bincount(experts, minlength=n_matrices)
    sums = x.new_zeros(n_matrices, x.shape[1])
    for into, rows in zip(sums, x.split(counts.tolist()), strict=True):
        if len(rows):
            torch.sum(rows.square(), dim=0, out=into)
    return sums, counts
