"""Colours of help texts and errors, on terminals only. NO_COLOR (any value) turns them off."""

from __future__ import annotations

import os
import re
from typing import IO

_BOLD, _CYAN, _RED, _RESET = "\033[1m", "\033[36m", "\033[1;31m", "\033[0m"
_HEADING = re.compile(r"^([A-Za-z][^\n]*:)$", re.MULTILINE)
_FLAGS = re.compile(r"^(  )(-[^\s,]+(?: [^\s,-](?:[^\s,]|,(?!\s))*)?(?:, -[^\s,]+)*)", re.MULTILINE)


def wants_colour(stream: IO[str]) -> bool:
    """Return whether `stream` is a terminal that shows colours, and the user wants them."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def painted_error(text: str, stream: IO[str]) -> str:
    """Return `text` in the colour of errors if `stream` shows colours."""
    return f"{_RED}{text}{_RESET}" if wants_colour(stream) else text


def painted_heading(text: str, stream: IO[str]) -> str:
    """Return `text` in bold if `stream` shows colours."""
    return f"{_BOLD}{text}{_RESET}" if wants_colour(stream) else text


def painted_help(text: str) -> str:
    """Return a help text with bold headings and coloured flags."""
    text = _HEADING.sub(rf"{_BOLD}\1{_RESET}", text)
    return _FLAGS.sub(rf"\1{_CYAN}\2{_RESET}", text)
