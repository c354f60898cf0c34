"""Collect an importance matrix: run texts through the model, in passes that can be resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import numpy as np
import torch

from ..errors import ImatrixError, printable
from ..formats.options import from_keywords
from ..runtime.evaluate.chunks import Clock, ProgressCallback
from ..runtime.evaluate.perplexity import Perplexity, check_finite, refuse_peers
from ..runtime.evaluate.scores import Moments, exp_or_inf, negative_log_likelihood
from ..runtime.evaluate.turns import in_turns
from ..runtime.model import Model
from .all_experts import AllExperts
from .belongs import check_belongs
from .collector import Collector
from .data import Imatrix, Snapshot
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
    run = _Collecting(model, parts, chosen, start, similarity)
    clock = Clock(run.cut, progress, run.done)
    with run.observed():
        passes = run.cut.passes(chosen.batch_tokens, run.done)
        for (first, end), found in in_turns(passes, run.evaluate, model.peers):
            if found is None:
                raise ExceedsHalfError
            for chunk, mean in enumerate(run.add(first, end, *found), first):
                clock.report(chunk, None if mean is None else exp_or_inf(mean))
            if on_pass is not None and run.done < len(run.cut):
                on_pass(run.done, run.snapshot)
    run.half_range.settle()
    if chosen.process_output and chosen.output_name not in run.collector.names:
        log.warning(
            "no product with a matrix %s was seen: the output is not collected",
            printable(chosen.output_name),
        )
    if on_perplexity is not None and chosen.compute_perplexity:
        scores = run.scores
        value = exp_or_inf(scores.mean)
        sizes = run.done, chosen.n_ctx, clock.seconds
        on_perplexity(Perplexity(value, value * scores.error, scores.mean, scores.n, *sizes))
    return run.so_far().whole()


class _Collecting:
    """A run over the chunks `cut` of some texts: `done` of them are in `collector` and `scores`.

    start: what an earlier run has, which this one continues.
    """

    def __init__(
        self,
        model: Model,
        parts: Sequence[Text],
        chosen: CollectOptions,
        start: Snapshot | None,
        similarity: LayerSimilarity | None,
    ):
        self.model, self.parts, self.chosen, self.similarity = model, parts, chosen, similarity
        if similarity is not None:
            refuse_peers(model, "changes of layers are measured")
        limits = chosen.chunks, chosen.from_chunk, chosen.parse_special
        self.cut = chunks_of(model, parts, chosen.n_ctx, *limits)
        self.done, self.scores = 0, Moments()
        if start is not None:
            self._continue(start)
        before = None if start is None else start.imatrix
        self.collector = Collector(model, chosen.process_output, chosen.output_name, before)
        self.half_range = HalfRange(model)

    def _continue(self, start: Snapshot) -> None:
        """Take over what `start` has. Raise ImatrixError if it is of another run."""
        check_belongs(start.imatrix, self.model.source.tensors)
        n, *sums = start.of("perplexity", 3).tolist()
        self.done, self.scores = start.imatrix.chunk_count, Moments(int(n), *sums)
        if self.done > len(self.cut):
            raise ImatrixError(
                f"holds {self.done} chunks, of which only {len(self.cut)} are asked for",
                file=start.imatrix.path,
            )
        if self.similarity is not None:
            self.similarity.restore(start.of("similarity", self.similarity.state().size))

    def so_far(self) -> Imatrix:
        """Return what is collected."""
        datasets = tuple(text.name for text in self.parts if text.name)
        return Imatrix(self.collector.entries(), self.done, self.chosen.n_ctx, datasets)

    def snapshot(self) -> Snapshot:
        """Return what another run can continue. Raise ExceedsHalfError."""
        self.half_range.settle()
        scores = self.scores
        sums = {"perplexity": np.array([scores.n, scores.sum, scores.squares])}
        sums[_WIDENED] = np.array([float(self.model.precision != "f16")])
        if self.similarity is not None:
            sums["similarity"] = self.similarity.state()
        return Snapshot(self.so_far(), sums)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Observe the products of the model while the context is open."""
        with ExitStack() as observed:
            if self.chosen.cold_experts == "all-experts":
                seen = AllExperts(self.model, self.collector)
                observed.enter_context(self.model.observe(seen))
            else:
                observed.enter_context(self.model.observe_fast(self.collector))
            if self.similarity is not None:
                observed.enter_context(self.model.observe(self.similarity))
            yield

    def evaluate(self, span: tuple[int, int]) -> _Evaluated:
        """Evaluate the chunks first..end of a span in one pass. Other processes may do this: what
        they return goes to `add`.
        """
        first, end = span
        model, cut, chosen = self.model, self.cut, self.chosen
        self.collector.weight = self.parts[text_at(cut, first)].weight
        if model.peers is not None:
            self.collector.seen = []
        scored = []
        passed = model.hidden(cut.inputs(first, end))
        self.half_range.check(passed)
        if chosen.compute_perplexity or chosen.process_output or model.peers is not None:
            try:
                self.half_range.settle()
            except ExceedsHalfError:
                return None  # for all ranks
        if self.similarity is not None:
            self.similarity.end_of_pass(passed)
        for chunk, states in enumerate(passed, first):
            if chosen.compute_perplexity or chosen.process_output:
                # The output matrix is collected from every position, as the others are; scored
                # are those of the second half.
                logits = (
                    model.logits(states)[cut.first : -1]
                    if chosen.process_output
                    else model.logits(states[cut.first : -1])
                )
            if chosen.compute_perplexity:
                scored.append(negative_log_likelihood(logits, cut.targets(chunk)))
                check_finite(scored[-1], model, chunk)
        self.collector.end_of_pass()
        return scored, self.collector.seen or []

    def add(
        self,
        first: int,
        end: int,
        scored: list[np.ndarray],
        seen: list[tuple[str, torch.Tensor, torch.Tensor]],
    ) -> list[float | None]:
        """Add what `evaluate` has found in the chunks first..end, and return for each of these the
        mean negative log-likelihood so far; None where that is not measured.
        """
        self.done = end
        self.collector.weight = self.parts[text_at(self.cut, first)].weight
        for product in seen:
            self.collector.add(*product)
        if not self.chosen.compute_perplexity:
            return [None] * (end - first)
        means: list[float | None] = []
        for one in scored:
            self.scores.add(one)
            means.append(self.scores.mean)
        return means
