"""Judge quantized models by their base: KL divergence, most probable tokens, and answers to tasks.

The log-probabilities of the base stay in memory, on the GPU if there is one, so that judging a file
is reading it and running the texts through it. Used by `better_bits.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import iqforge
import numpy as np
import torch
from iqforge.runtime.evaluate.chunks import Chunks, bos_token, read_text
from iqforge.runtime.evaluate.divergence import log_softmax
from iqforge.runtime.evaluate.scores import LEAST_LOG_P

_CONTEXT, _ENDING, _ENDINGS = 64, 16, 4  # tokens of a task, tokens and number of its endings


@dataclass(frozen=True)
class Tasks:
    """Items with several endings of a text, of which the first is the true one.

    tokens: int64[items x endings, context + ending].
    """

    tokens: torch.Tensor

    @classmethod
    def of_tokens(cls, tokens: np.ndarray, n: int, bos: int | None) -> Tasks:
        """Draw `n` items. Wrong endings follow the true one within some hundreds of tokens, so that
        they are about the same things.
        """
        draw, length, rows = random.Random(1), _CONTEXT + _ENDING, []
        for _ in range(n):
            start = draw.randrange(0, len(tokens) - length - 600)
            context = tokens[start : start + _CONTEXT].copy()
            if bos is not None:
                context[0] = bos
            far = draw.sample(range(2 * _ENDING, 600 - _ENDING), _ENDINGS - 1)
            for shift in (0, *far):
                ending = tokens[start + _CONTEXT + shift :][:_ENDING]
                rows.append(np.concatenate([context, ending]))
        return cls(torch.from_numpy(np.stack(rows)))

    def answers(self, model: Any, batch_tokens: int) -> str:
        """Return "1" for each item whose true ending is the most probable one, "0" for others."""
        scores, step = [], max(1, batch_tokens // self.tokens.shape[1])
        for rows in self.tokens.split(step):
            states = model.hidden(rows)[:, _CONTEXT - 1 : -1]
            log_p = log_softmax(model.logits(states.flatten(0, 1)))
            targets = rows[:, _CONTEXT:].reshape(-1, 1).to(log_p.device)
            scores.append(log_p.gather(1, targets).view(len(rows), -1).mean(dim=1).cpu())
        chosen = torch.cat(scores).view(-1, _ENDINGS).argmax(dim=1)
        return "".join("1" if one == 0 else "0" for one in chosen.tolist())


class Judge:
    """A base model's predictions on texts, with which others are compared."""

    def __init__(self, model: str, texts: list[str], chunks: int, n_tasks: int, device: str):
        self.device = device
        self.batch_tokens = 2048 if device == "cpu" else 30720
        self.chunks: dict[str, Chunks] = {}
        self.tasks: dict[str, Tasks] = {}
        self.base: dict[str, list[torch.Tensor]] = {}  # log-probabilities of each pass
        with self._opened(model) as loaded:
            bos = bos_token(loaded)
            for path in texts:
                name = Path(path).stem
                tokens = loaded.tokenizer.encode(read_text(path))
                self.chunks[name] = cut = Chunks.cut(tokens, 512, chunks, bos)
                if n_tasks:
                    self.tasks[name] = Tasks.of_tokens(cut.tokens.reshape(-1), n_tasks, bos)
                self.base[name] = [log_softmax(one) for one in self._logits(loaded, cut)]
            self.own_answers = self._answers(loaded)

    def figures(self, path: str) -> dict[str, Any]:
        """Return what `better_bits.py` writes down of a model, by text."""
        made: dict[str, Any] = {"kld": {}, "error": {}, "top": {}, "tasks": {}}
        with self._opened(path) as model:
            for name, cut in self.chunks.items():
                klds, same = [], 0
                for log_p, logits in zip(self.base[name], self._logits(model, cut), strict=True):
                    klds.append(divergences(log_p, logits))
                    same += int((log_p.argmax(dim=1) == logits.argmax(dim=1)).sum())
                kld = torch.cat(klds)
                made["kld"][name] = float(kld.mean())
                made["error"][name] = float(kld.std() / len(kld) ** 0.5)
                made["top"][name] = same / len(kld)
            made["tasks"] = self._answers(model)
        return made

    def _logits(self, model: Any, cut: Chunks) -> Iterator[torch.Tensor]:
        """Yield the logits of the scored positions of each pass through the model."""
        for start, stop in cut.passes(self.batch_tokens):
            yield model.logits(
                model.hidden(cut.inputs(start, stop))[:, cut.first : -1].flatten(0, 1)
            )

    def _answers(self, model: Any) -> dict[str, str]:
        return {name: one.answers(model, self.batch_tokens) for name, one in self.tasks.items()}

    def _opened(self, path: str) -> Any:
        return iqforge.load_model(path, device=self.device, precision="f32")


def divergences(log_p: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the divergence of each row, float64[rows], as `iqforge perplexity` defines it."""
    terms = log_p.exp() * (log_p - log_softmax(logits))
    return terms.masked_fill_(log_p <= LEAST_LOG_P, 0).sum(dim=1, dtype=torch.float64)
