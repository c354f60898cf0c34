"""Collect second moments of what layers read once the layers before them are rounded.

Two streams of states go through the model: those of the unquantized model, and those after layers
with their rounded tensors. For every layer, both go through its unquantized tensors. With x the
input of a product in the first stream and y in the second one, moments are E[y y^T], and the
weights W' whose products with y are closest to W x are W + W E[(x - y) y^T] E[y y^T]^-1 (GPTAQ,
Qronos). How far rows go there is decided by held-out text: by the share of that way that leaves the
least error there, none without such text. Then the second stream goes through the rounded tensors.

Experts see other tokens in each stream, so only inputs that all tokens have can be compared; gate
and up of experts are moved by what their router reads, down is not moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import ImatrixError
from ...formats.tensor_names import TensorName
from ...formats.types import GGMLType
from ...runtime.layerwise import LayerPass, after_layer, first_states
from ...runtime.model import Model
from ..texts import Text
from .collector import MomentSums
from .data import FOLDS
from .layers import LayerMoments, OneLayer
from .lookup import SHARES
from .options import HessianOptions
from .states import LayerStates

_DAMPING = 0.01  # of the mean of the diagonal
_TRIES = 4


@dataclass(frozen=True)
class RoundedTensor:
    """A tensor as it is stored in the output: uint8[n_rows, row_bytes] of a type."""

    name: str
    type: GGMLType
    blocks: np.ndarray


# product(x float32[rows, n], matrix float32[n, n], out float32[rows, n]) on the CPU, whose rows do
# not depend on each other.
Product = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
# Called with a layer, None for what is before the first one.
RoundedTensors = Callable[[int | None], Sequence[RoundedTensor]]


class SequentialMoments(LayerMoments):
    """`LayerMoments` of a model in float32 whose earlier layers are rounded. rounded: returns the
    tensors of a layer that are rounded so far; it is called for each layer once, in order.
    """

    def __init__(
        self,
        model: Model,
        texts: Sequence[Text],
        options: HessianOptions,
        folder: str,
        product: Product,
    ):
        super().__init__(model, texts, options, folder)
        self._product = product
        self.rounded: RoundedTensors = _nothing
        self._after = [LayerPass(one.tokens) for one in self._passes]
        self._after_states = LayerStates(model, self._cut.tokens.size, folder)
        self._targets: dict[int, dict[str, LinearTargets]] = {}

    def targets(self, layer: int, name: str) -> LinearTargets | None:
        """Return what the rows of a tensor are rounded to, None for the rows as they are."""
        parsed, found = TensorName.parse(name), self._targets.get(layer, {})
        if name not in found and parsed.role in SHARES:
            return found.get(parsed.sibling("ffn_gate_inp.weight"))
        return found.get(name)

    def done(self, number: int) -> None:
        super().done(number)
        if self.needed[number] <= 0:
            self._targets.pop(number, None)

    def close(self) -> None:
        super().close()
        self._after_states.drop()
        self._targets.clear()

    def _run(self, number: int) -> None:
        self._follow(number - 1)
        total = self._begun(number)
        pairs = _Pairs(self._model, self._options, total)
        for one, after, (first, _) in zip(self._passes, self._after, self._spans, strict=True):
            start, pairs.fold = first * self._cut.n_ctx, self._folds[first]
            with self._model.observe(pairs.remember):
                made = after_layer(self._model, number, one, self._load(one, first))
            self._states.save(start, made)
            if total.inputs:
                h = self._after_states.load(start, after.rows)
                with self._model.observe(pairs):
                    after_layer(
                        self._model, number, LayerPass(after.tokens, dict(after.scratch)), h
                    )
        self._hold(number, total)
        if self.needed[number] > 0:
            self._targets[number] = pairs.targets(self._product)

    def _follow(self, number: int) -> None:
        """Take the second stream through a layer with its rounded tensors; -1: embed tokens."""
        with self._replaced(self.rounded(number if number >= 0 else None)):
            for after, (first, _) in zip(self._after, self._spans, strict=True):
                start = first * self._cut.n_ctx
                if number < 0:
                    made = first_states(self._model, after)
                else:
                    h = self._after_states.load(start, after.rows)
                    made = after_layer(self._model, number, after, h)
                self._after_states.save(start, made)

    @contextmanager
    def _replaced(self, tensors: Sequence[RoundedTensor]) -> Iterator[None]:
        store = self._model.weights.store
        try:
            for one in tensors:
                store.replace(one.name, one.type, one.blocks)
            yield
        finally:
            for one in tensors:
                store.restore(one.name)


def _nothing(layer: int | None) -> Sequence[RoundedTensor]:
    return ()


class _Pairs(OneLayer):
    """Adds up y y^T as its base does, and (x - y) y^T of the same tokens for inputs that all tokens
    have: `remember` sees x of a pass, then the collector sees y.
    """

    def __init__(self, model: Model, options: HessianOptions, total: MomentSums):
        super().__init__(model, options, total)
        self._x: dict[str, torch.Tensor] = {}
        self._cross: dict[tuple[str, str], torch.Tensor] = {}

    def remember(self, name: str, x: torch.Tensor, experts: torch.Tensor | None) -> None:
        """Keep an input of the unquantized model until the same tokens come again."""
        one = self.total.inputs.get(name)
        if one is not None and one.n_matrices == 1 and experts is None:
            self._x[name] = x.clone()

    def __call__(self, name: str, x: torch.Tensor, experts: torch.Tensor | None) -> None:
        super().__call__(name, x, experts)
        if (other := self._x.pop(name, None)) is None or other.shape != x.shape:
            return
        finite = torch.isfinite(x).all(dim=1) & torch.isfinite(other).all(dim=1)
        y = torch.where(finite[:, None], x, 0)
        rest = torch.where(finite[:, None], other - x, 0)
        key, n = (name, self.fold), x.shape[1]
        if key not in self._cross:
            self._cross[key] = torch.zeros(n, n, dtype=torch.float32, device=x.device)
        self._cross[key].addmm_(rest.T, y)

    def targets(self, product: Product) -> dict[str, LinearTargets]:
        """Return what the rows of tensors are rounded to, where there is held-out text."""
        found = {}
        for one in self.total.inputs.values():
            if any((one.name, fold) not in self._cross for fold in FOLDS):
                continue
            (cross, fit), (held_cross, held) = (self._means(one.name, fold) for fold in FOLDS)
            way = _least_squares(cross, fit, one.name)
            made = LinearTargets(way, held_cross.float(), held.float(), product)
            found |= dict.fromkeys(one.tensors, made)
        return found

    def _means(self, name: str, fold: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return E[(x - y) y^T] and E[y y^T] of an input in a fold, float64[n, n]."""
        key = name, fold
        count = int(self.total.counts[key][0])
        return self._cross[key].double() / count, self.total.sums[key][0].double() / count


class LinearTargets:
    """Rows x become x + share x M. way: M, float32[n, n]. cross: E[(x - y) y^T] and moments: E[y
    y^T] of held-out text, float32[n, n]. product: multiplies on the CPU.
    """

    def __init__(
        self, way: torch.Tensor, cross: torch.Tensor, moments: torch.Tensor, product: Product
    ):
        self._product = product
        self._way, self._cross, self._moments = way, cross, moments

    def share(self, x: np.ndarray) -> float:
        """Return how far rows like x go: where E[(w (x - y) - share w M y)^2] is least."""
        rows = torch.from_numpy(np.ascontiguousarray(x)).to(self._way.device)
        step = rows @ self._way
        gain = float(((rows @ self._cross).double() * step).sum())
        cost = float(((step @ self._moments).double() * step).sum())
        return min(1.0, max(0.0, gain / cost)) if cost > 0 and np.isfinite(gain / cost) else 0.0

    def moved(self, x: np.ndarray, share: float) -> np.ndarray:
        """Return rows float32[rows, n], moved by a share of the way."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        if self._way.is_cuda:
            step = (torch.from_numpy(x).to(self._way.device) @ self._way).numpy(force=True)
        else:
            step = np.empty_like(x)
            self._product(x, self._way.numpy(), step)
        return x + np.float32(share) * step


def _least_squares(cross: torch.Tensor, moments: torch.Tensor, name: str) -> torch.Tensor:
    """Return float32[n, n], cross moments^-1 of float64 matrices. The moments are damped, more if
    they are not definite.
    """
    diagonal = moments.diagonal()
    mean = float(diagonal[diagonal > 0].mean()) if (diagonal > 0).any() else 1.0
    for attempt in range(_TRIES):
        damped = moments + 10**attempt * _DAMPING * mean * torch.eye(
            len(moments), dtype=moments.dtype, device=moments.device
        )
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            return torch.cholesky_solve(cross.T, lower).T.float().contiguous()
    raise ImatrixError("its second moments cannot be factored", tensor=name)
