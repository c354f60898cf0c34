"""The draw at the end of a step."""

from __future__ import annotations

import torch

from ...cuda_kernels.step_sample import DrawSampler, GreedySampler
from ..sampling import Sampling
from .step_frame import Frame, Sequence


def sampler(frame: Frame, sampling: Sampling):
    """A callable (logits float32[vocab], sequence) that launches the draw of the next token and its
    hand-over to the next step.
    """
    n = frame.logits.shape[1]
    if sampling.is_greedy:
        greedy = frame.once(("greedy",), lambda: GreedySampler(n, frame.device))
        return lambda logits, s: greedy(logits, s.tokens, s.positions, s.history)
    draw = frame.once(("draw",), lambda: DrawSampler(n, frame.device))

    def run(logits: torch.Tensor, s: Sequence) -> None:
        draw(
            logits,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            s.seed,
            s.tokens,
            s.positions,
            s.history,
        )

    return run
