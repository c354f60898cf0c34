"""Collect an importance matrix: run texts through the model and add up squared inputs of every
weight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from typing import Any, NoReturn, cast

import numpy as np
import torch

from ..errors import ImatrixError, printable
from ..formats.options import from_keywords
from ..formats.tensor_names import OUTPUT, TensorName
from ..runtime.evaluate.chunks import Clock, ProgressCallback
from ..runtime.evaluate.perplexity import Perplexity, check_finite, refuse_peers
from ..runtime.evaluate.scores import Moments, exp_or_inf, negative_log_likelihood
from ..runtime.evaluate.turns import in_turns
from ..runtime.model import Model
from ..runtime.weights.stacked_linear import ExpertLinear, HeadLinear
from ..runtime.weights.taps import GroupedRows
from .all_experts import AllExperts
from .belongs import check_belongs
from .data import Entry, Imatrix, Snapshot
from .half_range import ExceedsHalfError, HalfRange, widen
from .options import CollectOptions
from .similarity import LayerSimilarity
from .texts import Text, chunks_of, text_at

log = logging.getLogger(__name__)

_WIDENED = "widened"  # of a snapshot: whether float16 was too narrow

# Called after every pass with the chunks done and what takes a snapshot.
PassCallback = Callable[[int, Callable[[], Snapshot]], None]
# Of a pass: negative log-likelihoods of its chunks, and (name, sums, counts) of its products; None
# if its activations exceed the range of float16.
_Evaluated = tuple[list[np.ndarray], list[tuple[str, torch.Tensor, torch.Tensor]]] | None


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
            if isinstance(p, (ExpertLinear, HeadLinear))
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


def collect(
    model: Model,
    texts: str | Sequence[int] | Sequence[Text],
    options: CollectOptions | None = None,
    *,
    dataset: str = "",
    progress: ProgressCallback | None = None,
    on_pass: PassCallback | None = None,
    start: Snapshot | None = None,
    similarity: LayerSimilarity | None = None,
    on_perplexity: Callable[[Perplexity], None] | None = None,
    **keywords: Any,
) -> Imatrix:
    """Return the importance matrix of `model` on `texts` (or the one text, or its tokens, called
    `dataset`), in chunks as `options` say; see `iqforge.collect_imatrix`.

    Files are neither read nor written, and cold experts keep what they saw: only the options that
    say what is evaluated are used. The running perplexity goes to `progress`, that of all chunks
    to `on_perplexity` at the end; without `compute_perplexity` the output is not evaluated unless
    it is collected. `similarity` measures how much layers change their input. `on_pass(chunks
    done, take)` is called after every pass through the model but the last; what `take()` returns is
    `start` to a run with all else equal, which continues there and ends with the same bits.

    A model in float16 whose activations exceed its range starts again in bfloat16, and stays so.
    Raise EvaluationError for a text that is too short, and ImatrixError naming the tensor for
    activations that are not finite.
    """
    [chosen] = from_keywords("collecting", keywords, (CollectOptions, options))
    chosen = cast(CollectOptions, chosen)
    if isinstance(texts[0], Text):
        parts = cast("Sequence[Text]", texts)
    else:
        parts = [Text(cast("str | Sequence[int]", texts), dataset)]
    if model.precision == "f16" and start is not None and start.of(_WIDENED, 1)[0]:
        widen(model)
    try:
        return _collected(model, parts, chosen, progress, on_pass, start, similarity, on_perplexity)
    except ExceedsHalfError:
        widen(model)
    return _collected(model, parts, chosen, progress, on_pass, None, similarity, on_perplexity)


def _collected(
    model: Model,
    parts: Sequence[Text],
    chosen: CollectOptions,
    progress: ProgressCallback | None,
    on_pass: PassCallback | None,
    start: Snapshot | None,
    similarity: LayerSimilarity | None,
    on_perplexity: Callable[[Perplexity], None] | None,
) -> Imatrix:
    """Return the importance matrix; see `collect`. Raise ExceedsHalfError."""
    n_ctx, process_output = chosen.n_ctx, chosen.process_output
    output_name, compute_perplexity = chosen.output_name, chosen.compute_perplexity
    if similarity is not None:
        refuse_peers(model, "changes of layers are measured")
    cut = chunks_of(model, parts, n_ctx, chosen.chunks, chosen.from_chunk, chosen.parse_special)
    done, before, scores = 0, None, Moments()
    if start is not None:
        check_belongs(start.imatrix, model.source.tensors)
        n, *sums = start.of("perplexity", 3).tolist()
        done, before, scores = start.imatrix.chunk_count, start.imatrix, Moments(int(n), *sums)
        if done > len(cut):
            raise ImatrixError(
                f"holds {done} chunks, of which only {len(cut)} are asked for",
                file=before.path,
            )
        if similarity is not None:
            similarity.restore(start.of("similarity", similarity.state().size))
    collector, clock = (
        Collector(model, process_output, output_name, before),
        Clock(cut, progress, done),
    )
    half_range = HalfRange(model)
    datasets = tuple(text.name for text in parts if text.name)

    def so_far() -> Imatrix:
        return Imatrix(collector.entries(), done, n_ctx, datasets)

    def snapshot() -> Snapshot:
        half_range.settle()
        sums = {"perplexity": np.array([scores.n, scores.sum, scores.squares])}
        sums[_WIDENED] = np.array([float(model.precision != "f16")])
        return Snapshot(
            so_far(), sums if similarity is None else sums | {"similarity": similarity.state()}
        )

    with ExitStack() as observed:
        if chosen.cold_experts == "all-experts":
            observed.enter_context(model.observe(AllExperts(model, collector)))
        else:
            observed.enter_context(model.observe_fast(collector))
        if similarity is not None:
            observed.enter_context(model.observe(similarity))

        def evaluate(span: tuple[int, int]) -> _Evaluated:
            first, end = span
            collector.weight = parts[text_at(cut, first)].weight
            if model.peers is not None:
                collector.seen = []
            scored = []
            passed = model.hidden(cut.inputs(first, end))
            half_range.check(passed)
            if compute_perplexity or process_output or model.peers is not None:
                try:
                    half_range.settle()
                except ExceedsHalfError:
                    return None  # for all ranks
            if similarity is not None:
                similarity.end_of_pass(passed)
            for chunk, states in enumerate(passed, first):
                if compute_perplexity or process_output:
                    # The output matrix is collected from every position, as the others are; scored
                    # are those of the second half.
                    logits = (
                        model.logits(states)[cut.first : -1]
                        if process_output
                        else model.logits(states[cut.first : -1])
                    )
                if compute_perplexity:
                    scored.append(negative_log_likelihood(logits, cut.targets(chunk)))
                    check_finite(scored[-1], model, chunk)
            collector.end_of_pass()
            return scored, collector.seen or []

        passes = cut.passes(chosen.batch_tokens, done)
        for (first, end), found in in_turns(passes, evaluate, model.peers):
            if found is None:
                raise ExceedsHalfError
            (scored, seen), done = found, end
            collector.weight = parts[text_at(cut, first)].weight
            for product in seen:
                collector.add(*product)
            for chunk in range(first, end):
                if compute_perplexity:
                    scores.add(scored[chunk - first])
                clock.report(chunk, exp_or_inf(scores.mean) if compute_perplexity else None)
            if on_pass is not None and done < len(cut):
                on_pass(done, snapshot)
    half_range.settle()
    if process_output and output_name not in collector.names:
        log.warning(
            "no product with a matrix %s was seen: the output is not collected",
            printable(output_name),
        )
    if on_perplexity is not None and compute_perplexity:
        value = exp_or_inf(scores.mean)
        on_perplexity(
            Perplexity(
                value, value * scores.error, scores.mean, scores.n, done, n_ctx, clock.seconds
            )
        )
    return so_far().whole()
