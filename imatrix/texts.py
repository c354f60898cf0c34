"""Cut calibration texts, each with a weight, into chunks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import EvaluationError, UsageError
from ..formats.arguments import number
from ..runtime.evaluate.chunks import Chunks
from ..runtime.model import Model
from .merge import MOST_WEIGHT


@dataclass(frozen=True)
class Text:
    """A text (or its tokens), the name under which files record it, and its weight: how many times
    each of its tokens counts.

    Raise UsageError for a weight that is not a positive number of at most MOST_WEIGHT.
    """

    content: str | Sequence[int]
    name: str = ""
    weight: float = 1.0

    def __post_init__(self):
        if not 0 < number("the weight of a text", self.weight) <= MOST_WEIGHT:
            raise UsageError(
                f"the weight of a text is {self.weight:g}, expected a positive number, at most"
                f" {MOST_WEIGHT:g}"
            )


def chunks_of(
    model: Model,
    texts: Sequence[Text],
    n_ctx: int,
    chunks: int,
    from_chunk: int = 0,
    parse_special: bool = False,
) -> Chunks:
    """Return the chunks of all texts, at most `chunks` of each if that is positive, after its
    first `from_chunk`. No chunk has tokens of two texts.

    Raise EvaluationError naming a text that is too short.
    """
    return Chunks.joined(
        [_chunks(model, text, n_ctx, chunks, from_chunk, parse_special) for text in texts]
    )


def _chunks(
    model: Model, text: Text, n_ctx: int, chunks: int, from_chunk: int, parse_special: bool
) -> Chunks:
    try:
        return Chunks.of_text(model, text.content, n_ctx, chunks, from_chunk, parse_special)
    except EvaluationError as error:
        if error.file is not None or not text.name:
            raise
        raise EvaluationError(error.message, file=text.name) from None


def text_at(chunks: Chunks, chunk: int) -> int:
    """Return the index of the text that `chunk` belongs to."""
    return bisect_right(chunks.ends, chunk)
