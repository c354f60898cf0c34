"""Calibration texts, with weights, cut into windows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..runtime.evaluate.windows import Windows
from ..runtime.model import Model


@dataclass(frozen=True)
class Text:
    """A text (or its tokens), the name under which a file records it, and its weight: every token of it counts so many times.

    UsageError for a weight that is not a positive number.
    """

    content: str | Sequence[int]
    name: str = ""
    weight: float = 1.0

    def __post_init__(self):
        if not 0 < self.weight < math.inf:
            raise UsageError(f"the weight of a text is {self.weight:g}, expected a positive number")


def windows_of(model: Model, texts: Sequence[Text], n_ctx: int, chunks: int, from_chunk: int = 0, parse_special: bool = False) -> Windows:
    """The windows of all texts, at most `chunks` of each if that is positive, behind its first `from_chunk`. None has tokens of two texts.

    EvaluationError for a text that is too short.
    """
    return Windows.joined([Windows.of_text(model, text.content, n_ctx, chunks, from_chunk, parse_special) for text in texts])


def text_at(windows: Windows, window: int) -> int:
    """The index of the text that `window` is of."""
    return bisect_right(windows.ends, window)
