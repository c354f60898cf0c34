"""Collecting an importance matrix: run a text through the model and add up squared inputs of every weight."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import ImatrixError
from ..runtime.evaluate.perplexity import check_finite
from ..runtime.evaluate.scores import Moments, exp_or_inf, negative_log_likelihood
from ..runtime.evaluate.windows import DEFAULT_BATCH, DEFAULT_CONTEXT, Clock, ProgressCallback, Windows
from ..runtime.linear import ExpertLinear
from ..runtime.model import Model
from .data import Entry, Imatrix


class Collector:
    """An observer of a model's products. Collects tensors named `blk.*`, and `output.weight` if `process_output`."""

    def __init__(self, model: Model, process_output: bool = False):
        self._n_matrices = {name: len(p.matrices) for p in model.weights.parameters if isinstance(p, ExpertLinear) for name in p.observed}
        self._wanted = ("blk.", "output.weight") if process_output else ("blk.",)
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, torch.Tensor] = {}
        self._last: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def __call__(self, name: str, x: torch.Tensor, experts: torch.Tensor | None) -> None:
        if not name.startswith(self._wanted):
            return
        # Query, key and value, or gate and up, see the same input one after another.
        if self._last is None or self._last[0] is not x:
            self._last = (x, *_squares(x, experts, self._n_matrices.get(name, 1)))
        _, sums, counts = self._last
        if not torch.isfinite(sums).all():
            raise ImatrixError("the input of this tensor is not finite", tensor=name)
        if name not in self._sums:
            self._sums[name], self._counts[name] = sums.double(), counts.clone()
        else:
            self._sums[name] += sums
            self._counts[name] += counts

    def forget_inputs(self) -> None:
        """Let go of the last input, which would be kept alive otherwise."""
        self._last = None

    def entries(self) -> dict[str, Entry]:
        return {name: Entry(sums.cpu().numpy(), self._counts[name].cpu().numpy()) for name, sums in sorted(self._sums.items())}


def _squares(x: torch.Tensor, experts: torch.Tensor | None, n_matrices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[n_matrices, n_cols] column sums of x^2, int64[n_matrices] rows, for one pass. Rows come grouped by expert."""
    if experts is None:
        return x.square().sum(dim=0, keepdim=True), torch.tensor([len(x)], device=x.device)
    counts = torch.bincount(experts, minlength=n_matrices)
    parts = x.square().split(counts.tolist())
    return torch.stack([part.sum(dim=0) for part in parts]), counts


def collect_imatrix(model: Model, text: str, *, n_ctx: int = DEFAULT_CONTEXT, chunks: int = -1, process_output: bool = False,
                    compute_perplexity: bool = True, dataset: str = "", batch_tokens: int = DEFAULT_BATCH,
                    progress: ProgressCallback | None = None, checkpoint: Callable[[Imatrix], None] | None = None,
                    checkpoint_every: int = 0) -> Imatrix:
    """The importance matrix of `model` on `text`, over windows of `n_ctx` tokens, at most `chunks` of them if that is positive.

    `process_output` includes the output matrix. The running perplexity goes to `progress`; without `compute_perplexity` the
    output is not evaluated unless it is collected. `checkpoint` gets what there is after every `checkpoint_every` windows.
    EvaluationError for a text that is too short, ImatrixError naming the tensor for activations that are not finite.
    """
    windows = Windows.of_text(model, text, n_ctx, chunks)
    collector, scores, clock = Collector(model, process_output), Moments(), Clock(windows, progress)

    def so_far(n_windows: int) -> Imatrix:
        return Imatrix(collector.entries(), n_windows, n_ctx, (dataset,) if dataset else ())

    per_pass = max(1, batch_tokens // n_ctx)
    saved = 0
    with model.observe(collector):
        for window, states in windows.hidden(model, batch_tokens):
            if compute_perplexity or process_output:
                # The output matrix is collected from every position, as the others are; scored are those of the second half.
                logits = model.logits(states)[windows.first : -1] if process_output else model.logits(states[windows.first : -1])
            if compute_perplexity:
                nll = negative_log_likelihood(logits, windows.targets(window))
                check_finite(nll, model, window)
                scores.add(nll)
            clock.report(window, exp_or_inf(scores.mean) if compute_perplexity else None)
            done = window + 1
            # Only after the last window of a pass: the sums cover whole passes.
            due = 0 < checkpoint_every <= done - saved and done % per_pass == 0 and done < len(windows)
            if due and checkpoint is not None:
                checkpoint(so_far(done))
                saved = done
    collector.forget_inputs()
    return so_far(len(windows))
