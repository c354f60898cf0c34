"""Files that a conversation reads: texts, and messages, tools or documents as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import EvaluationError, NotFoundError
from .template import Message


def read_messages(path: str) -> list[Message]:
    """Return the messages of a JSON file: a list of objects with a role, passed on as they are.
    Raise EvaluationError, with the file, for another content.
    """
    found = read_json(path)
    if isinstance(found, dict) and "messages" in found:
        found = found["messages"]
    if not isinstance(found, list) or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) for one in found
    ):
        raise EvaluationError("expected a list of messages, each with a role", file=path)
    return found


def read_list(path: str) -> list[Any]:
    """Return the list in a JSON file, such as tools. Raise EvaluationError, with the file, for
    another content.
    """
    found = read_json(path)
    if not isinstance(found, list):
        raise EvaluationError("expected a list", file=path)
    return found


def read_json(path: str) -> Any:
    """Return what is in a JSON file. Raise EvaluationError, with the file, if it is not JSON."""
    try:
        return json.loads(text_of(path))
    except json.JSONDecodeError as error:
        raise EvaluationError(f"is not JSON: line {error.lineno}: {error.msg}", file=path) from None
    except RecursionError:
        raise EvaluationError("is nested too deeply", file=path) from None


def text_of(path: str) -> str:
    """Return the text of a UTF-8 file. Raise NotFoundError or EvaluationError, with the file, if it
    cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFoundError("no such file", file=path) from None
    except UnicodeDecodeError as error:
        raise EvaluationError("the text is not UTF-8", file=path, offset=error.start) from None
    except OSError as error:
        raise EvaluationError(f"cannot be read: {error.strerror}", file=path) from None
