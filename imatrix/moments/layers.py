"""Collect second moments layer by layer, without a file: run every chunk through a layer, hand its
moments out, drop them, go to the next layer.

The states between layers are in an unnamed file that disappears with the process. An interrupted
run starts at the first layer again; layers whose moments nobody needs are run without adding up,
in exactly the same way, so that the moments of later layers are the same to the last bit. So does
a model in float16 whose activations exceed its range at some layer, in bfloat16: earlier layers
keep what was collected.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...errors import ImatrixError
from ...formats.tensor_names import TensorName
from ...runtime.layerwise import LayerPass, after_layer, first_states
from ...runtime.model import Model
from ...runtime.weights.taps import GroupedRows
from ..data import Entry
from ..half_range import ExceedsHalfError, HalfRange, widen
from ..texts import Text, chunks_of
from .collector import MomentCollector, MomentSums, folds_of, survey_inputs
from .data import MomentInput
from .lookup import entry_of
from .options import HessianOptions
from .states import LayerStates
from .store import SumsInMemory

log = logging.getLogger(__name__)

_MOST_BYTES = 16 * 2**30  # of the moments of a layer with those of every expert


class LayerMoments:
    """The second moments of a model's layers in turn. Close it to drop the states.

    folder: where the states are kept. wanted: the layers that are collected. needed: how often
    `done` will be called for each layer, until which its moments are held. entries: the diagonals
    of the layers so far, by tensor.
    """

    def __init__(self, model: Model, texts: Sequence[Text], options: HessianOptions, folder: str):
        self._model = model
        texts = [_tokenized(model, text, options) for text in texts]
        each = [len(text.content) // options.n_ctx for text in texts]
        limit = _limit_of_each(each, options.chunks)
        self._cut, self._folds = folds_of(chunks_of(model, texts, options.n_ctx, limit))
        self.tokens = [options.n_ctx * (min(n, limit) if limit else n) for n in each]
        self.inputs: dict[str, MomentInput] = survey_inputs(model, options).inputs
        if _largest_layer(self.inputs) > _MOST_BYTES:
            log.warning(
                "second moments of every expert would take %.0f GiB per layer: gate and up of all"
                " experts of a layer share theirs",
                _largest_layer(self.inputs) / 2**30,
            )
            options = replace(options, experts="layer")
            self.inputs = survey_inputs(model, options).inputs
        self._options = options
        self.wanted: set[int] = set()
        self.needed: Counter[int] = Counter()
        self.entries: dict[str, Entry] = {}
        self._held: dict[int, SumsInMemory] = {}
        self._next, self._collected = 0, 0
        self._spans = list(self._cut.passes(options.batch_tokens))
        self._passes = [LayerPass(self._cut.inputs(*span)) for span in self._spans]
        self._states = LayerStates(model, self._cut.tokens.size, folder)
        log.info(
            "calibrating on %s tokens, layer by layer: second moments take up to %s MiB of memory,"
            " states %s MiB, on the GPU if there is room, otherwise in a file in %s",
            f"{self._cut.tokens.size:,}",
            f"{_largest_layer(self.inputs) / 2**20:,.0f}",
            f"{self._states.n_bytes / 2**20:,.0f}",
            folder or ".",
        )

    @property
    def n_chunks(self) -> int:
        """Chunks of tokens that run through every layer."""
        return len(self._cut)

    def advance(self, number: int) -> None:
        """Run all layers up to a layer, and collect those that are wanted."""
        while self._next <= number and self._next < len(self._model.network.blocks):
            try:
                self._run(self._next)
            except ExceedsHalfError:
                widen(self._model, f" in layer {self._next}")
                self._next = 0  # states of earlier passes were overwritten
                self._passes = [LayerPass(one.tokens) for one in self._passes]
                continue
            self._next += 1
            self._collected = max(self._collected, self._next)

    def layer(self, number: int) -> SumsInMemory | None:
        """Return the moments of the inputs of a layer, None if it has none. Raise ImatrixError if
        they are dropped already.
        """
        self.advance(number)
        if self.needed[number] <= 0:
            raise ImatrixError(
                f"the second moments of layer {number} are dropped already",
                file=self._model.source.path,
            )
        return self._held.get(number)

    def done(self, number: int) -> None:
        """Drop the moments of a layer, if this is the last time that they were needed."""
        self.needed[number] -= 1
        if self.needed[number] <= 0:
            self._held.pop(number, None)

    def close(self) -> None:
        """Drop all states and moments."""
        self._held.clear()
        self._states.drop()

    def _run(self, number: int) -> None:
        half_range, total = HalfRange(self._model), self._begun(number)
        collector = OneLayer(self._model, self._options, total)
        # The form in which a layer is evaluated depends on being observed, not on what is added up.
        with self._model.observe_fast(collector):
            for one, (first, _) in zip(self._passes, self._spans, strict=True):
                collector.fold = self._folds[first]
                made = after_layer(self._model, number, one, self._load(one, first))
                half_range.check(made)
                half_range.settle()
                self._states.save(first * self._cut.n_ctx, made)
        self._hold(number, total)

    def _begun(self, number: int) -> MomentSums:
        """Return sums of nothing for the inputs of a layer, none if it is not collected."""
        if number not in self.wanted or number < self._collected:
            return MomentSums()
        inputs = {
            name: one for name, one in self.inputs.items() if TensorName.parse(name).layer == number
        }
        if inputs:
            log.info("collecting the second moments of layer %d", number)
        return MomentSums(inputs)

    def _hold(self, number: int, total: MomentSums) -> None:
        """Keep the sums of a layer while they are needed, and their diagonals."""
        if total.inputs:
            sums = SumsInMemory(total, str(self._model.source.path))
            for info in total.inputs.values():
                self.entries |= dict.fromkeys(info.tensors, entry_of(sums, info.name))
            if self.needed[number] > 0:
                self._held[number] = sums
        if total.dropped:
            log.warning("layer %d: %d rows that are not finite are left out", number, total.dropped)

    def _load(self, one: LayerPass, first: int) -> torch.Tensor:
        if self._next == 0:
            return first_states(self._model, one)
        return self._states.load(first * self._cut.n_ctx, one.rows)


class OneLayer(MomentCollector):
    """Collects what `total` has inputs for, and ignores the rest."""

    def __init__(self, model: Model, options: HessianOptions, total: MomentSums):
        super().__init__(model, options, total)
        self._names = {name for one in total.inputs.values() for name in one.tensors}

    def __call__(self, name: str, x: torch.Tensor, experts: torch.Tensor | None) -> None:
        if name in self._names:
            super().__call__(name, x, experts)

    def see(
        self,
        names: Sequence[str],
        x: torch.Tensor,
        groups: GroupedRows | None = None,
        places: torch.Tensor | None = None,
    ) -> None:
        if any(name in self._names for name in names):
            super().see(names, x, groups, places)


def _tokenized(model: Model, text: Text, options: HessianOptions) -> Text:
    if not isinstance(text.content, str):
        return text
    tokens = model.tokenizer.encode(text.content, parse_special=options.parse_special)
    return replace(text, content=tokens)


def _limit_of_each(each: Sequence[int], most: int) -> int:
    """Return the most chunks of a text, so that all texts have at most `most` together, and each at
    least two (0: any).
    """
    if most <= 0:
        return 0
    limit = max(2, most // len(each))  # of two chunks one is held out
    while limit < max(each) and sum(min(n, limit + 1) for n in each) <= most:
        limit += 1
    return limit


def _largest_layer(inputs: Mapping[str, MomentInput]) -> int:
    """Return the bytes of the moments of the layer that has most."""
    found: Counter[int | None] = Counter()
    for name, one in inputs.items():
        found[TensorName.parse(name).layer] += one.memory_bytes
    return max(found.values(), default=0)
