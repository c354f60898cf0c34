"""Collecting an importance matrix: run a text through the model and add up squared inputs of every weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from ..errors import ImatrixError
from ..runtime.evaluate.perplexity import check_finite
from ..runtime.evaluate.scores import Moments, exp_or_inf, negative_log_likelihood
from ..runtime.evaluate.windows import DEFAULT_BATCH, DEFAULT_CONTEXT, Clock, ProgressCallback, Windows
from ..runtime.linear import ExpertLinear
from ..runtime.model import Model
from .data import Entry, Imatrix, Snapshot

Checkpoint = Callable[[int, Callable[[], Snapshot]], None]


class Collector:
    """An observer of a model's products. Collects tensors named `blk.*`, and `output_name` if `process_output`.

    It goes on from the sums of `before`, if there are such.
    """

    def __init__(self, model: Model, process_output: bool = False, output_name: str = "output.weight",
                 before: Mapping[str, Entry] | None = None):
        self._n_matrices = {name: len(p.matrices) for p in model.weights.parameters if isinstance(p, ExpertLinear) for name in p.observed}
        self._wanted, self._output = "blk.", output_name if process_output else None
        self._sums = {name: torch.from_numpy(entry.sums.copy()) for name, entry in (before or {}).items()}
        self._counts = {name: torch.from_numpy(entry.counts.copy()) for name, entry in (before or {}).items()}
        self._last: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def __call__(self, name: str, x: torch.Tensor, experts: torch.Tensor | None) -> None:
        if not name.startswith(self._wanted) and name != self._output:
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
            # Those of an interrupted run come from a file, not from the device.
            self._sums[name] = self._sums[name].to(sums.device).add_(sums)
            self._counts[name] = self._counts[name].to(counts.device).add_(counts)

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


def collect_imatrix(model: Model, text: str, *, n_ctx: int = DEFAULT_CONTEXT, chunks: int = -1, from_chunk: int = 0,
                    process_output: bool = False, output_name: str = "output.weight", parse_special: bool = False,
                    compute_perplexity: bool = True, dataset: str = "", batch_tokens: int = DEFAULT_BATCH,
                    progress: ProgressCallback | None = None, checkpoint: Checkpoint | None = None,
                    start: Snapshot | None = None) -> Imatrix:
    """The importance matrix of `model` on `text`, over windows of `n_ctx` tokens, at most `chunks` of them if that is positive, behind
    the first `from_chunk`.

    `process_output` includes the output matrix, `output_name`. With `parse_special` the text of a control token is that token. The
    running perplexity goes to `progress`; without `compute_perplexity` the output is not evaluated unless it is collected.
    `checkpoint(windows done, take)` is called after every pass through the model but the last; what `take()` gives is `start` to a run
    with all else equal, which goes on there and ends with the same bits. EvaluationError for a text that is too short, ImatrixError
    naming the tensor for activations that are not finite.
    """
    windows = Windows.of_text(model, text, n_ctx, chunks, from_chunk, parse_special)
    done, entries, scores = 0, None, Moments()
    if start is not None:
        n, *sums = start.sums["perplexity"].tolist()
        done, entries, scores = start.imatrix.chunk_count, start.imatrix.entries, Moments(int(n), *sums)
    collector, clock = Collector(model, process_output, output_name, entries), Clock(windows, progress, done)

    def so_far(n_windows: int) -> Imatrix:
        return Imatrix(collector.entries(), n_windows, n_ctx, (dataset,) if dataset else ())

    per_pass = max(1, batch_tokens // n_ctx)
    with model.observe(collector):
        for window, states in windows.hidden(model, batch_tokens, done):
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
            if checkpoint is not None and done % per_pass == 0 and done < len(windows):
                checkpoint(done, lambda: Snapshot(so_far(done), {"perplexity": np.array([scores.n, scores.sum, scores.squares])}))
    collector.forget_inputs()
    return so_far(len(windows))
