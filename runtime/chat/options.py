"""Flags and keywords of a conversation. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError
from ...formats.options import option
from ..text_options import TextOptions


@dataclass(frozen=True)
class ChatOptions(TextOptions):
    """How a model is talked to. A `context` of 0 is the one that the model was trained for; without
    any it is that, but at most 8,192 tokens. Without `n` an answer may fill it.
    """

    n: int | None = option(
        None,
        "-n",
        "--predict",
        "--n-predict",
        kind=int,
        metavar="N",
        help="end an answer after N tokens (default: when the context is full)",
    )
    context: int | None = option(
        None,
        "-c",
        "--ctx-size",
        kind=int,
        least=0,
        metavar="N",
        help="most tokens of a conversation; 0: as many as the model was trained for (default: as"
        " 0, but at most 8192)",
    )
    chat_template: str | None = option(
        None,
        "--chat-template",
        aliases=("--chat-template-file",),
        kind=str,
        metavar="NAME|FILE",
        help="a template that is included or in the model, a file, or Jinja text (default: the"
        " model's own)",
    )
    chat_template_kwargs: str | None = option(
        None,
        "--chat-template-kwargs",
        kind=str,
        metavar="JSON",
        help="""variables for the template, such as '{"enable_thinking": false}'""",
    )
    system: str | None = option(
        None, "-sys", "--system-prompt", kind=str, metavar="TEXT", help="the system message"
    )

    def variables(self) -> dict[str, Any]:
        """Return the variables of `chat_template_kwargs`. UsageError for no JSON object."""
        if self.chat_template_kwargs is None:
            return {}
        try:
            found = json.loads(self.chat_template_kwargs)
        except json.JSONDecodeError as error:
            raise UsageError(f"--chat-template-kwargs is not JSON: {error.msg}") from None
        except RecursionError:
            raise UsageError("--chat-template-kwargs is nested too deeply") from None
        if not isinstance(found, dict):
            raise UsageError("--chat-template-kwargs: expected a JSON object")
        return found

    def with_system(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return messages that begin with the system message, if one is given."""
        if self.system is None:
            return list(messages)
        others = [one for one in messages if one.get("role") != "system"]
        return [{"role": "system", "content": self.system}, *others]
