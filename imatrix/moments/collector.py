"""Collect second moments: run texts through the model and add up x^T x of every distinct input."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ...errors import ImatrixError
from ...formats.tensor_names import TensorName
from ...runtime.evaluate.chunks import Chunks, Clock, ProgressCallback
from ...runtime.model import Model
from ...runtime.weights.stacked_linear import ExpertLinear, HeadLinear
from ...runtime.weights.taps import GroupedRows
from ..half_range import ExceedsHalfError, HalfRange, widen
from ..texts import Text, chunks_of, text_at
from .data import FOLDS, MomentInput
from .options import HessianOptions

log = logging.getLogger(__name__)

HOLD_EVERY = 5  # the last fifth of each text's chunks is held out


@dataclass
class MomentSums:
    """The sums of an unfinished or finished collection: x^T x float32[n_matrices, n, n] and row
    counts int64[n_matrices] by (input, fold); `done` chunks, and rows left out because they were
    not finite; `widened` if float16 was too narrow.
    """

    inputs: dict[str, MomentInput] = field(default_factory=dict)
    sums: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    counts: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    done: int = 0
    dropped: int = 0
    widened: bool = False


# Called after every pass through the model with the sums so far.
PassCallback = Callable[[MomentSums], None]


class MomentCollector:
    """Observe a model's products and add up the second moments of their inputs, in the order of the
    rows. Tensors named `blk.*` are collected, and `output_name` if `process_output` is set.

    `survey` adds nothing up: it notes which inputs there are. `fold` says where rows are added.
    """

    def __init__(self, model: Model, options: HessianOptions, total: MomentSums):
        self._n_matrices = {
            name: len(p.matrices)
            for p in model.weights.parameters
            if isinstance(p, (ExpertLinear, HeadLinear)) and not p.together
            for name in p.observed
        }
        self._path, self._options, self.total = model.source.path, options, total
        self._owners = {name: one.name for one in total.inputs.values() for name in one.tensors}
        self._seen: list[tuple[torch.Tensor, str]] = []  # of the survey
        self.fold: str = FOLDS[0]

    def _skips(self, name: str) -> bool:
        output = self._options.output_name if self._options.process_output else None
        return TensorName.parse(name).layer is None and name != output

    def _merged(self, name: str) -> bool:
        """Return whether all experts of this tensor share the statistics of their layer."""
        return self._options.experts == "layer" and "_down" not in TensorName.parse(name).role

    def survey(self, name: str, x: torch.Tensor, experts: torch.Tensor | None) -> None:
        """Note the input of a tensor."""
        if self._skips(name) or name in self._owners:
            return
        inputs = self.total.inputs
        owner = next((owner for seen, owner in self._seen if seen is x), None)
        if owner is not None:
            inputs[owner] = replace(inputs[owner], tensors=(*inputs[owner].tensors, name))
        else:
            owner = name
            stacked = 1 if experts is None or self._merged(name) else self._n_matrices.get(name, 1)
            inputs[name] = MomentInput(name, (name,), stacked, x.shape[1])
            self._seen.append((x, name))
        self._owners[name] = owner

    def __call__(self, name: str, x: torch.Tensor, experts: torch.Tensor | None) -> None:
        if self._skips(name):
            return
        if self._owners.get(name) != name:
            if name not in self._owners:
                raise ImatrixError(
                    "is used only for some tokens, which second moments do not support",
                    file=self._path,
                    tensor=name,
                )
            return
        info, key = self.total.inputs[name], (name, self.fold)
        sums, _ = self._sums_of(name, x.device)
        finite = torch.isfinite(x).all(dim=1)
        if not finite.all():
            self.total.dropped += int((~finite).sum())
            x, experts = x[finite], None if experts is None else experts[finite]
        if info.n_matrices == 1:
            sums[0].addmm_(x.T, x)
            self.total.counts[key][0] += len(x)
            return
        if experts is None:
            raise ImatrixError(
                "is not a tensor of experts in this pass", file=self._path, tensor=name
            )
        counts = torch.bincount(experts, minlength=info.n_matrices).cpu()
        for into, rows in zip(sums, x.split(counts.tolist()), strict=True):
            if len(rows):
                into.addmm_(rows.T, rows)
        self.total.counts[key] += counts

    def see(
        self,
        names: Sequence[str],
        x: torch.Tensor,
        groups: GroupedRows | None = None,
        places: torch.Tensor | None = None,
    ) -> None:
        """Add the products of what the fast path reads up: exact products of half numbers, summed
        in float32.
        """
        name = next((name for name in names if self._owners.get(name) == name), None)
        if name is None:
            for one in names:
                if not self._skips(one) and one not in self._owners:
                    self(one, x, None)  # says what is wrong
            return
        info = self.total.inputs[name]
        sums, counts = self._sums_of(name, x.device)
        x = x if places is None else x[:, places]
        x, ends = (x, None) if groups is None else _grouped(x, groups)
        finite = torch.isfinite(x).all(dim=1)
        if dropped := int((~finite).sum()):
            self.total.dropped += dropped
            x = torch.where(finite[:, None], x, 0)
        if info.n_matrices == 1 or ends is None:
            _add_products(sums[0], x)
            counts[0] += len(x) - dropped
            return
        start = 0
        for expert, end in enumerate(ends):
            if end > start:
                _add_products(sums[expert], x[start:end])
                counts[expert] += int(finite[start:end].sum()) if dropped else end - start
            start = end

    def _sums_of(self, name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of an input in the current fold, on `device`, and its counts."""
        info, key = self.total.inputs[name], (name, self.fold)
        if key not in self.total.sums:
            shape = (info.n_matrices, info.n_cols, info.n_cols)
            self.total.sums[key] = torch.zeros(shape, dtype=torch.float32, device=device)
            self.total.counts[key] = torch.zeros(info.n_matrices, dtype=torch.int64)
        # Sums of a resumed run come from a file, not from the device.
        sums = self.total.sums[key] = self.total.sums[key].to(device)
        return sums, self.total.counts[key]


def _grouped(x: torch.Tensor, groups: GroupedRows) -> tuple[torch.Tensor, list[int]]:
    """Return the rows that experts read, grouped by expert, and where those of each end."""
    ends = groups.ends.tolist()
    if groups.sources is None:
        return x[: ends[-1]], ends
    return x[groups.sources[: ends[-1]].long() // groups.n_slots], ends


def _add_products(sums: torch.Tensor, x: torch.Tensor) -> None:
    """Add x^T x to float32[n, n]. Products of half numbers are exact in float32."""
    if x.dtype == torch.float32:
        sums.addmm_(x.T, x)
    elif x.is_cuda:
        sums.add_(torch.mm(x.T, x, out_dtype=torch.float32))
    else:
        sums.addmm_(x.T.float(), x.float())


def folds_of(chunks: Chunks) -> tuple[Chunks, list[str]]:
    """Return the chunks with a border before the held-out chunks of each text, and the fold of each
    chunk: the last fifth of a text (at least one chunk of two or more) is held out.
    """
    folds, ends, start = [], [], 0
    for end in (*chunks.ends, len(chunks)):
        n = end - start
        held = 0 if n < 2 else max(1, n // HOLD_EVERY)
        folds += [FOLDS[0]] * (n - held) + [FOLDS[1]] * held
        ends += [end - held, end]
        start = end
    borders = sorted({end for end in ends if 0 < end < len(chunks)})
    return replace(chunks, ends=tuple(borders)), folds


def survey_inputs(model: Model, options: HessianOptions) -> MomentSums:
    """Return sums of nothing with every input of the model, found by a pass over four tokens."""
    total = MomentSums()
    collector = MomentCollector(model, options, total)
    # Experts that see no row are not multiplied, but their tensors are observed all the same.
    with model.observe(collector.survey):
        states = model.hidden(torch.zeros(1, 4, dtype=torch.int64))
        if options.process_output:
            model.logits(states[0])
    return total


def collect_moments(
    model: Model,
    texts: Sequence[Text],
    options: HessianOptions,
    total: MomentSums,
    *,
    progress: ProgressCallback | None = None,
    on_pass: PassCallback | None = None,
) -> MomentSums:
    """Add the second moments of `texts` to `total`, which is `survey_inputs` or a snapshot of an
    interrupted run; that continues after `total.done` chunks and ends with the same bits.

    `on_pass` is called after every pass but the last. A model in float16 whose activations exceed
    its range starts again in bfloat16, and stays so. Raise EvaluationError for a text that is too
    short.
    """
    if total.widened and model.precision == "f16":
        widen(model)
    try:
        return _collected(model, texts, options, total, progress, on_pass)
    except ExceedsHalfError:
        widen(model)
    total = MomentSums(dict(total.inputs), widened=True)
    return _collected(model, texts, options, total, progress, on_pass)


def _collected(
    model: Model,
    texts: Sequence[Text],
    options: HessianOptions,
    total: MomentSums,
    progress: ProgressCallback | None,
    on_pass: PassCallback | None,
) -> MomentSums:
    """Return the moments; see `collect_moments`. Raise ExceedsHalfError."""
    whole = chunks_of(
        model, texts, options.n_ctx, options.chunks, options.from_chunk, options.parse_special
    )
    cut, folds = folds_of(whole)
    if total.done > len(cut):
        raise ImatrixError(f"the snapshot has {total.done} chunks, the texts only {len(cut)}")
    collector, clock = MomentCollector(model, options, total), Clock(cut, progress, total.done)
    half_range = HalfRange(model)
    with model.observe_fast(collector):
        for first, end in cut.passes(options.batch_tokens, total.done):
            collector.fold = folds[first]
            passed = model.hidden(cut.inputs(first, end))
            half_range.check(passed)
            half_range.settle()
            for chunk, states in enumerate(passed, first):
                if options.process_output:
                    model.logits(states)
                clock.report(chunk)
            total.done = end
            if on_pass is not None and end < len(cut):
                on_pass(total)
    if total.dropped:
        log.warning("%d rows that are not finite were left out", total.dropped)
    return total


def tokens_of_texts(model: Model, texts: Sequence[Text], options: HessianOptions) -> list[int]:
    """Return how many tokens of each text are used."""
    cut = chunks_of(
        model, texts, options.n_ctx, options.chunks, options.from_chunk, options.parse_special
    )
    owners = np.array([text_at(cut, chunk) for chunk in range(len(cut))])
    return [int((owners == i).sum()) * options.n_ctx for i in range(len(texts))]
