"""Files of tasks with several answers: HellaSwag, Winogrande and multiple choice, in the formats of
llama-perplexity.

A subset is drawn as that tool draws it, so that figures can be compared: the generator is MT19937
with the seed 1.
"""

from __future__ import annotations

import csv
import logging
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...errors import EvaluationError, MalformedFileError, NotFoundError, TruncatedFileError
from ..text_options import HELLASWAG_TASKS
from .chunks import read_text

log = logging.getLogger(__name__)

Task = TypeVar("Task")
_ENDINGS = 4
_MOST_ANSWERS = 100
_U32 = struct.Struct("<I")


@dataclass(frozen=True)
class Question:
    """A text and its possible continuations. `right` has the indices of the right ones."""

    text: str
    answers: tuple[str, ...]
    right: frozenset[int]


@dataclass(frozen=True)
class Gap:
    """A sentence with a gap, as the text in front of it and the text after it, and two words for
    it, of which `right` (0 or 1) is the right one.
    """

    before: str
    after: str
    choices: tuple[str, str]
    right: int


def read_hellaswag(path: str | os.PathLike, n_tasks: int = HELLASWAG_TASKS) -> list[Question]:
    """Read a text of six lines per task: context, index of the right ending, four endings. Return
    `n_tasks` of them (all if there are fewer, or if it is not positive) in random order.

    Raise EvaluationError for other numbers of lines, MalformedFileError for an index above 3.
    """
    lines = read_text(path).split("\n")
    size = 2 + _ENDINGS
    if len(lines) % size:
        raise EvaluationError(
            f"has {len(lines)} lines, HellaSwag has {size} per task: context, index of the right"
            " ending, four endings",
            file=path,
        )
    tasks = []
    for start in range(0, len(lines), size):
        context, index, *endings = lines[start : start + size]
        if index.strip() not in ("0", "1", "2", "3"):
            raise MalformedFileError(
                f"line {start + 2} is {index[:20]!r}, expected the index of the right ending, 0 to"
                " 3",
                file=path,
            )
        tasks.append(Question(context, tuple(endings), frozenset([int(index)])))
    return draw_in_random_order(tasks, n_tasks)


def read_winogrande(path: str | os.PathLike, n_tasks: int = 0) -> list[Gap]:
    """Read rows `index,sentence,choice 1,choice 2,answer`, where `_` marks the gap and the answer
    is 1 or 2. Return `n_tasks` of them, drawn at random; all in order if there are no more, or if
    it is not positive.

    Rows without a gap are skipped with a warning, and so is, as by llama-perplexity, a last row
    that is not followed by an empty line. Raise EvaluationError if no row is left.
    """
    lines = read_text(path).split("\n")
    if lines.pop():
        log.warning(
            "the last row is left out, as llama-perplexity does: no empty line follows it (%s)",
            path,
        )
    tasks = []
    for number, line in enumerate(lines, 1):
        row = next(csv.reader([line], skipinitialspace=True), [])
        if len(row) != 5 or "_" not in row[1] or row[4].strip() not in ("1", "2"):
            if line.strip():
                log.warning("line %d is not a Winogrande task, it is skipped (%s)", number, path)
            continue
        before, after = row[1].split("_", 1)
        tasks.append(Gap(before, after, (row[2], row[3]), int(row[4]) - 1))
    if not tasks:
        raise EvaluationError(
            "has no Winogrande task: index,sentence with _,choice 1,choice 2,1 or 2", file=path
        )
    return draw_some(tasks, n_tasks)


def read_multiple_choice(path: str | os.PathLike, n_tasks: int = 0) -> list[Question]:
    """Read a binary file: u32 n, u32 position[n], and at each position a question, its answers with
    one right answer, and its answers with several, which are not used. Return tasks as
    `read_winogrande` does.

    Strings are a u32 length and UTF-8 bytes; answers are u32 n, n strings, n i32 labels. Raise
    MalformedFileError or TruncatedFileError.
    """
    reader = _Reader(path)
    n = reader.u32("the number of tasks")
    if not 0 < n <= len(reader.data) // 4:
        raise MalformedFileError(f"says that it has {n} tasks", file=path, offset=0)
    positions = [reader.u32("a position") for _ in range(n)]
    tasks = []
    for position in positions:
        reader.at = position
        question = reader.string("a question")
        offset, count = reader.at, reader.u32("the number of answers")
        if not 0 < count <= _MOST_ANSWERS:
            raise MalformedFileError(
                f"a task has {count} answers, expected 1 to {_MOST_ANSWERS}",
                file=path,
                offset=offset,
            )
        answers = tuple(reader.string("an answer") for _ in range(count))
        labels = [reader.u32("a label") for _ in range(count)]
        right = frozenset(index for index, label in enumerate(labels) if label == 1)
        tasks.append(Question(question, answers, right))
    return draw_some(tasks, n_tasks)


def draw_in_random_order(tasks: Sequence[Task], n: int) -> list[Task]:
    """Return `n` tasks (all if there are fewer or `n` is not positive) in random order."""
    left, draws = list(tasks), _Generator()
    count = min(n, len(left)) if n > 0 else len(left)
    return [left.pop(draws.below(len(left))) for _ in range(count)]


def draw_some(tasks: Sequence[Task], n: int) -> list[Task]:
    """Return `n` tasks drawn at random, or all in order if `n` is not positive or not less."""
    if not 0 < n < len(tasks):
        return list(tasks)
    left, draws, chosen = list(tasks), _Generator(), []
    for _ in range(n):
        at = draws.share_of(len(left))
        chosen.append(left[at])
        left[at] = left[-1]
        left.pop()
    return chosen


class _Generator:
    """Numbers of MT19937 with the seed 1, and how C++ makes indices of them."""

    def __init__(self):
        self._state = np.random.RandomState(1)

    def __call__(self) -> int:
        return int(self._state.randint(0, 2**32, dtype=np.uint32))

    def below(self, n: int) -> int:
        """Return an index below `n` as the uniform_int_distribution of libstdc++ draws it: the
        upper half of a product, drawn again where that would favour some (Lemire, 2019).
        """
        product = self() * n
        if product % 2**32 < n:
            while product % 2**32 < -n % 2**32 % n:
                product = self() * n
        return product >> 32

    def share_of(self, n: int) -> int:
        """Return a float32 share of `n`, rounded down."""
        share = np.float32(1 / 2**32) * np.float32(self())
        return min(int(share * np.float32(n)), n - 1)


class _Reader:
    def __init__(self, path: str | os.PathLike):
        self.path, self.at = path, 0
        try:
            with open(path, "rb") as file:
                self.data = file.read()
        except FileNotFoundError:
            raise NotFoundError("no such file of tasks", file=path) from None
        except OSError as error:
            raise EvaluationError(f"cannot be read: {error.strerror}", file=path) from None

    def bytes(self, n: int, what: str) -> bytes:
        if self.at + n > len(self.data):
            raise TruncatedFileError(
                f"has {len(self.data)} bytes, {what} would end after {self.at + n}",
                file=self.path,
                offset=self.at,
            )
        self.at += n
        return self.data[self.at - n : self.at]

    def u32(self, what: str) -> int:
        return _U32.unpack(self.bytes(4, what))[0]

    def string(self, what: str) -> str:
        offset, data = self.at, self.bytes(self.u32(f"the length of {what}"), what)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise MalformedFileError(
                f"{what} is not UTF-8", file=self.path, offset=offset
            ) from None
