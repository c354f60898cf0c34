"""Files that a conversation reads: texts, and messages, tools or documents as JSON."""

from __future__ import annotations

import json
from typing import Any

from ...errors import EvaluationError
from ..text_options import text_of_file
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
        return json.loads(text_of_file(path))
    except json.JSONDecodeError as error:
        raise EvaluationError(f"is not JSON: line {error.lineno}: {error.msg}", file=path) from None
    except RecursionError:
        raise EvaluationError("is nested too deeply", file=path) from None
