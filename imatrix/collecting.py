"""Collect an importance matrix: run texts through the model, in passes that can be resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
