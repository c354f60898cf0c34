"""The draw at the end of a step."""

from __future__ import annotations

import torch

from ....cuda_kernels.step.sample import DrawSampler, GreedySampler
from ...network.sampling import Sampling
from .frame import Frame, StepSequence


def sampler(frame: Frame, sampling: Sampling):
    """Return a callable (logits float32[vocab], sequence) that launches the draw of the next token
    and passes it to the next step.
    """
    n = frame.logits.shape[1]
    if sampling.is_greedy:
        greedy = frame.once(("greedy",), lambda: GreedySampler(n, frame.device))
        return lambda logits, s: greedy(logits, s.tokens, s.positions, s.history)
    draw = frame.once(("draw",), lambda: DrawSampler(n, frame.device))

    def run(logits: torch.Tensor, s: StepSequence) -> None:
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
