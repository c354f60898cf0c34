"""Opening the models and texts that calls name by path. Serves the other modules here."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from .source import PathLike

if TYPE_CHECKING:
    from ..runtime.model import Model


def text_of(text: PathLike) -> tuple[str, str]:
    """Return (content, path) of a text file, or (text, "") of a text that is given itself."""
    from ..runtime.arguments import path
    from ..runtime.evaluate.windows import read_text

    if isinstance(path("text", text), str) and "\n" in text:
        return text, ""
    return read_text(text), os.fspath(text)


def opened_model(model: PathLike | Model) -> AbstractContextManager[Model]:
    """Return `model` as a context manager: a path is opened and closed, a caller's model is left
    open.
    """
    from ..runtime.arguments import instance
    from ..runtime.model import Model, load_model

    if isinstance(model, (str, os.PathLike)):
        return load_model(model)
    return nullcontext(instance("model", model, Model, "a path or a Model"))
