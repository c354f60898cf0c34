"""What `iqforge compare` finds out about a model: figures that can be written to a JSON file and
read back.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..tokenizer import Tokenizer
from .base_file import BaseFile
from .chunks import Chunks
from .compact_base import CompactBase
from .divergence import Divergence
from .perplexity import Perplexity
from .scores import Compared, log_sum_exp

Pair = tuple[float, float]  # a value and its standard error
QUANTILES = (1.0, 0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.0)
_CONTEXT = 24  # tokens shown in front of a prediction
_BEST = 3  # continuations shown of each model


@dataclass(frozen=True)
class Prediction:
    """A continuation and its probability."""

    text: str
    probability: float


@dataclass(frozen=True)
class Difference:
    """A place where the predictions differ much: the text in front of it, the token that follows
    there, and the most probable continuations of the base and of the model.
    """

    divergence: float
    context: str
    target: str
    base: tuple[Prediction, ...]
    model: tuple[Prediction, ...]


@dataclass(frozen=True)
class TextFigures:
    """Figures on one text. Those of the base itself have no divergence (None). `kld_quantiles`: at
    `QUANTILES`. kld_least: set if the base file is a compact one, see `compact_base`.
    """

    text: str
    n_tokens: int
    n_chunks: int
    n_ctx: int
    perplexity: Pair
    tokens_per_second: float
    ratio: Pair | None = None
    kld: Pair | None = None
    kld_quantiles: tuple[float, ...] = ()
    same_top: Pair | None = None
    rms_delta_p: Pair | None = None
    kld_least: float | None = None
    differences: tuple[Difference, ...] = ()

    @classmethod
    def of_base(cls, text: str, result: Perplexity) -> TextFigures:
        """Return the figures of the base model on a text."""
        return cls(
            text,
            result.n_scored,
            result.n_chunks,
            result.n_ctx,
            (result.perplexity, result.uncertainty),
            result.tokens_per_second,
        )

    @classmethod
    def of_model(
        cls, text: str, result: Divergence, differences: Sequence[Difference]
    ) -> TextFigures:
        """Return the figures of a model on a text, with the tokens whose predictions differ
        most.
        """
        s = result.statistics
        return cls(
            text,
            s.n,
            result.n_chunks,
            result.n_ctx,
            s.ppl,
            result.tokens_per_second,
            s.ratio,
            s.mean_kld,
            tuple(s.kld_quantiles(*QUANTILES)),
            s.same_top,
            s.rms_delta_p,
            None if s.kld_bounds is None else s.kld_bounds[0],
            tuple(differences),
        )

    def quantile(self, fraction: float) -> float:
        """Return the divergence at one of `QUANTILES`."""
        return self.kld_quantiles[QUANTILES.index(fraction)]


@dataclass(frozen=True)
class ModelFigures:
    """Figures of one model. `label`: its name where space is short. memory: bytes that it takes
    with a context of `n_ctx` tokens. prompt, generation: tokens per second, with `n_prompt` tokens
    and after an empty context, or None if they were not measured.
    """

    path: str
    name: str
    label: str
    type: str
    architecture: str
    n_parameters: int
    file_bytes: int
    bits_per_weight: float
    device: str
    memory: int
    n_prompt: int
    prompt: float | None
    generation: float | None
    texts: tuple[TextFigures, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The base and the models that were compared with it, on the same texts."""

    base: ModelFigures
    models: tuple[ModelFigures, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON objects, lists and numbers."""
        return asdict(self)


def figures_from_json(found: dict[str, Any]) -> ModelFigures:
    """Return what `asdict` made of a ModelFigures. KeyError or TypeError for anything else."""

    def prediction(one: dict[str, Any]) -> Prediction:
        return Prediction(**one)

    def difference(one: dict[str, Any]) -> Difference:
        both = {name: tuple(map(prediction, one[name])) for name in ("base", "model")}
        return Difference(**{**one, **both})

    def text(one: dict[str, Any]) -> TextFigures:
        pairs = ("perplexity", "ratio", "kld", "same_top", "rms_delta_p", "kld_quantiles")
        tuples = {name: None if one[name] is None else tuple(one[name]) for name in pairs}
        differences = tuple(map(difference, one["differences"]))
        return TextFigures(**{**one, **tuples, "differences": differences})

    return ModelFigures(**{**found, "texts": tuple(map(text, found["texts"]))})


class WorstTokens:
    """Collects the places where a model's predictions differ most from those of a base file."""

    def __init__(self, tokenizer: Tokenizer, base: BaseFile | CompactBase, chunks: Chunks, n: int):
        self.tokenizer, self.base, self.chunks, self.n = tokenizer, base, chunks, n
        self._heap: list[tuple[float, int, Difference]] = []
        self._seen = 0

    def __call__(self, chunk: int, logits: torch.Tensor, found: Compared) -> None:
        """Take the `on_compared` call of `measure_divergence`."""
        for row in np.argsort(-found.kld, kind="stable")[: self.n].tolist():
            value = float(found.kld[row])
            if len(self._heap) == self.n and value <= self._heap[0][0]:
                break
            self._seen += 1
            entry = value, -self._seen, self._difference(chunk, row, value, logits[row])
            if len(self._heap) < self.n:
                heapq.heappush(self._heap, entry)
            else:
                heapq.heapreplace(self._heap, entry)

    def found(self) -> list[Difference]:
        """Return them, the largest first."""
        return [entry[2] for entry in sorted(self._heap, reverse=True)]

    def _difference(self, chunk: int, row: int, value: float, logits: torch.Tensor) -> Difference:
        tokens, at = self.chunks.tokens[chunk], self.chunks.first + row + 1
        context = tokens[max(0, at - _CONTEXT) : at].tolist()
        top, lse = log_sum_exp(logits[None])
        best = (logits.double() - top.double() - lse).exp().topk(min(_BEST, len(logits)))
        of_model = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return Difference(
            value,
            self.tokenizer.decode(context),
            self._text(int(tokens[at])),
            tuple(Prediction(self._text(i), p) for i, p in self.base.best(chunk, row, _BEST)),
            tuple(Prediction(self._text(i), p) for i, p in of_model),
        )

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token])


def short_labels(names: Sequence[str]) -> list[str]:
    """Return the names without the words that all begin with; all of them if that leaves one
    empty.
    """
    words = [name.replace("_", "-").split("-") for name in names]
    common = 0
    while len(names) > 1 and all(
        len(w) > common + 1 and w[common] == words[0][common] for w in words
    ):
        common += 1
    offset = len("-".join(words[0][:common])) + (common > 0)
    return [name[offset:] for name in names]
