"""Prompts that are evaluated once: the state after them in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..formats.output import check_output, refuse_same_file
from .model import Model
from .parallel.modes import NO_PROMPT_CACHE
from .state.saved import SavedSequence, save_sequence
from .state.sequence import State
from .tokens import n_common


@dataclass(frozen=True)
class PromptCache:
    """The file of a prompt's state. writes_all: the state after the generated text is written.
    read_only: nothing is.
    """

    path: str | os.PathLike
    writes_all: bool = False
    read_only: bool = False

    def check(self, model: Model) -> None:
        """UsageError or OutputError if the file cannot be used with this model."""
        if model.group is not None:
            raise UsageError(NO_PROMPT_CACHE)
        refuse_same_file(self.path, model.source.files)
        if not self.read_only:
            check_output(self.path)

    def begin(self, model: Model, tokens: Sequence[int], state: State) -> int:
        """Fill `state`, which is empty, with what the file has of the prompt, but never with its
        last token; return how many tokens that is. 0 if there is no file yet.

        MalformedFileError for a file of another model.
        """
        if not os.path.exists(self.path):
            if self.read_only:
                SavedSequence(self.path)  # its error
            return 0
        saved = SavedSequence(self.path)
        saved.check(model.source)
        common = n_common(saved.tokens, tokens[:-1])
        fits = len(saved.tokens) <= state.capacity
        if not common or not fits or (common < len(saved.tokens) and not state.can_be_cut):
            return 0
        saved.restore(state)
        state.truncate(common)
        return common

    def write(self, model: Model, tokens: Sequence[int], state: State) -> None:
        """Write the state of the first of these tokens, as many as are in the sequence."""
        save_sequence(self.path, state, list(tokens[: state.n_past]), model.source)
