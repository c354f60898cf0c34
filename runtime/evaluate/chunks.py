"""A text cut into chunks of n_ctx tokens, and the logits of the scored half of each.

Chunks follow one another without overlap. Where the model wants BOS it takes the place of each
chunk's first token in what is evaluated, not in what is scored. Predictions at positions n_ctx/2
.. n_ctx-2 count: n_ctx - 1 - n_ctx/2 per chunk.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import EvaluationError, NotFoundError
from ...formats.arguments import whole_number
from ..model import Model
from ..parallel.alike import check_alike, digest_of

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 512
DEFAULT_BATCH = 2048  # tokens per pass through the model


@dataclass(frozen=True)
class ChunkProgress:
    """How far a run over chunks is. Callbacks get it after every chunk."""

    chunk: int  # chunks done
    n_chunks: int
    n_ctx: int
    seconds: float
    perplexity: float | None = None  # so far
    before: int = 0  # chunks of a run that was resumed; they are not in `seconds`

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second since this run began."""
        return (self.chunk - self.before) * self.n_ctx / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float:
        """Seconds left at the speed so far."""
        return self.seconds / max(self.chunk - self.before, 1) * (self.n_chunks - self.chunk)


ProgressCallback = Callable[[ChunkProgress], None]


class ShortTextError(EvaluationError):
    """A text with too few tokens to measure anything."""


@dataclass(frozen=True)
class Chunks:
    """`tokens` int64[n_chunks, n_ctx], as the text has them; `bos` replaces the first of each in
    `inputs`, if not None.

    With several texts, `ends` has the number of chunks up to the end of each text but the last: no
    pass through the model spans two texts.
    """

    tokens: np.ndarray
    bos: int | None
    ends: tuple[int, ...] = ()

    @classmethod
    def cut(
        cls, tokens: Sequence[int], n_ctx: int, limit: int, bos: int | None, skip: int = 0
    ) -> Chunks:
        """Cut tokens into at most `limit` chunks (all if it is not positive) after the first
        `skip`. ShortTextError for fewer than skip + 2 chunks.
        """
        if n_ctx < 4:
            raise EvaluationError(f"the context size is {n_ctx}, expected at least 4 tokens")
        if skip < 0:
            raise EvaluationError(f"cannot skip {skip} chunks, expected 0 or more")
        if len(tokens) < (skip + 2) * n_ctx:
            skipped = f" after {skip} chunks" if skip else ""
            raise ShortTextError(
                f"the text has {len(tokens)} token{'s' * (len(tokens) != 1)}, a context size of"
                f" {n_ctx} needs at least {(skip + 2) * n_ctx}{skipped}"
            )
        tokens = tokens[skip * n_ctx :]
        n_chunks = len(tokens) // n_ctx
        n_chunks = min(n_chunks, limit) if limit > 0 else n_chunks
        return cls(
            np.asarray(tokens[: n_chunks * n_ctx], dtype=np.int64).reshape(n_chunks, n_ctx), bos
        )

    @classmethod
    def of_text(
        cls,
        model: Model,
        text: str | Sequence[int],
        n_ctx: int,
        limit: int,
        skip: int = 0,
        parse_special: bool = False,
    ) -> Chunks:
        """Cut chunks as `cut` does, from a text, tokenized once as a whole, or from tokens.
        EvaluationError for a model that appends EOS, UsageError if ranks have other chunks.

        With `parse_special` the text of a control token is that token.
        """
        whole_number("n_ctx", n_ctx)
        whole_number("chunks", limit)
        bos, trained = bos_token(model), model.hyperparameters.integer("context_length", None)
        if trained is not None and n_ctx > trained:
            log.warning(
                "chunks of %d tokens are longer than the context of %d that the model was made for",
                n_ctx,
                trained,
            )
        tokens = (
            model.tokenizer.encode(text, parse_special=parse_special)
            if isinstance(text, str)
            else text
        )
        found = cls.cut(tokens, n_ctx, limit, bos, skip)
        if (ranks := model.group or model.peers) is not None:
            content = digest_of(repr(found.tokens.shape).encode() + found.tokens.tobytes())
            check_alike(ranks, {"text (-f, -c or --chunks)": content})
        return found

    @classmethod
    def joined(cls, texts: Sequence[Chunks]) -> Chunks:
        """The chunks of several texts (at least one), all for one model and of one size, one text
        after another.
        """
        ends = np.cumsum([len(chunks) for chunks in texts])[:-1]
        return cls(
            np.concatenate([chunks.tokens for chunks in texts]),
            texts[0].bos,
            tuple(int(end) for end in ends),
        )

    @property
    def n_ctx(self) -> int:
        """Tokens of a chunk."""
        return self.tokens.shape[1]

    @property
    def first(self) -> int:
        """The first position whose prediction is scored."""
        return self.n_ctx // 2

    @property
    def n_scored(self) -> int:
        """Predictions scored per chunk."""
        return self.n_ctx - 1 - self.first

    def __len__(self) -> int:
        return len(self.tokens)

    def targets(self, chunk: int) -> np.ndarray:
        """int64[n_scored]: the tokens that the scored positions should have predicted."""
        return self.tokens[chunk, self.first + 1 :]

    def inputs(self, start: int, stop: int) -> torch.Tensor:
        """int64[stop - start, n_ctx] to evaluate."""
        inputs = torch.from_numpy(self.tokens[start:stop].copy())
        if self.bos is not None:
            inputs[:, 0] = self.bos
        return inputs

    def passes(
        self, batch_tokens: int = DEFAULT_BATCH, begin: int = 0
    ) -> Iterator[tuple[int, int]]:
        """(first chunk, end) of each pass through the model from chunk `begin` on, a chunk where
        a pass begins: as many chunks as `batch_tokens` allow, at least one.
        """
        step, start = max(1, batch_tokens // self.n_ctx), begin
        while start < len(self):
            stop = min([start + step, len(self), *(end for end in self.ends if end > start)])
            yield start, stop
            start = stop

    def hidden(
        self, model: Model, batch_tokens: int = DEFAULT_BATCH
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(chunk, final hidden states float32[n_ctx, width]) of all chunks, those of a pass at
        once.
        """
        for start, stop in self.passes(batch_tokens):
            yield from enumerate(model.hidden(self.inputs(start, stop)), start)

    def scored_logits(
        self, model: Model, batch_tokens: int = DEFAULT_BATCH
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(chunk, float32[n_scored, vocab]): the logits of the scored positions."""
        for span in self.passes(batch_tokens):
            yield from self.scored_logits_of(model, *span)

    def scored_logits_of(
        self, model: Model, start: int, stop: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(chunk, float32[n_scored, vocab]) of the chunks of one pass."""
        for chunk, states in enumerate(model.hidden(self.inputs(start, stop)), start):
            yield chunk, model.logits(states[self.first : -1])


class Clock:
    """Reports progress over chunks to an optional callback."""

    def __init__(self, chunks: Chunks, callback: ProgressCallback | None, before: int = 0):
        self.chunks, self.callback, self.before, self.started = (
            chunks,
            callback,
            before,
            time.monotonic(),
        )

    @property
    def seconds(self) -> float:
        """Seconds since the clock was started."""
        return time.monotonic() - self.started

    def report(self, chunk: int, perplexity: float | None = None) -> None:
        """Chunk `chunk` is done."""
        if self.callback is not None:
            self.callback(
                ChunkProgress(
                    chunk + 1,
                    len(self.chunks),
                    self.chunks.n_ctx,
                    self.seconds,
                    perplexity,
                    self.before,
                )
            )


def bos_token(model: Model) -> int | None:
    """The token that starts every chunk, if the model wants one. EvaluationError if it appends
    EOS: chunks have no end.
    """
    special = model.special_tokens
    if special.add_eos:
        raise EvaluationError(
            "the model appends EOS to its input, so it cannot be evaluated on chunks",
            file=model.source.path,
        )
    return special.bos if special.add_bos else None


def can_be_read_again(path: str | os.PathLike) -> bool:
    """Return whether reading a text does not use it up, as it does what comes from a pipe."""
    return os.path.isfile(path) or os.path.isdir(path) or not os.path.exists(path)


def read_text(path: str | os.PathLike, *, whole: bool = False) -> str:
    """A UTF-8 text file, without one trailing newline unless `whole`. NotFoundError or
    EvaluationError naming the file.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise NotFoundError("no such text file", file=path) from None
    except IsADirectoryError:
        raise EvaluationError("is a folder, expected a UTF-8 text file", file=path) from None
    except OSError as error:
        raise EvaluationError(f"cannot be read: {error.strerror}", file=path) from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EvaluationError("the text is not UTF-8", file=path, offset=error.start) from None
    return text if whole else text.removesuffix("\n")
