"""Chat templates: Jinja text, from the model's file or by name, that turns messages into a prompt.

They run in a sandbox (`sandbox.py`) and see plain data only: the texts of special tokens and the
variables `messages`, `tools`, `documents` and `add_generation_prompt`, as with transformers'
`apply_chat_template`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from ...errors import ChatTemplateError, NotFoundError, UsageError, printable
from ...formats.options import did_you_mean
from ...formats.values import Value, get
from ..tokenizer.vocabulary import PREFIX, SpecialTokens
from .sandbox import Sandbox

Message = Mapping[str, Any]

log = logging.getLogger(__name__)

KEY = "tokenizer.chat_template"
_FOLDER = Path(__file__).parent / "templates"
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_KEYS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # the spelling of GGUF


class ChatTemplate:
    """The template of one model. `name` says where it is from.

    special: texts of special tokens by variable, such as `bos_token`.
    """

    def __init__(self, text: str, special: Mapping[str, str] | None = None, *, name: str = ""):
        self.text, self.special, self.name = text, dict(special or {}), name or "chat template"
        self._sandbox = Sandbox()
        self._compiled = self._compile()

    @classmethod
    def of_model(
        cls, metadata: Mapping[str, Value], chosen: str | None = None, *, file: str | None = None
    ) -> ChatTemplate | None:
        """Return the template of a GGUF file, or the one that `chosen` says: Jinja text, the name
        of a template in the file (such as `tool_use`), one of `template_names()`, or a file. None
        if nothing is chosen and the file has none.
        """
        special = special_texts(metadata, file)
        if chosen is None:
            text = get(dict(metadata), KEY, str, None, file=file)
            return None if text is None else cls(text, special, name=KEY)
        if "{%" in chosen or "{{" in chosen:
            return cls(chosen, special, name="--chat-template")
        stored = get(dict(metadata), f"{KEY}.{chosen}", str, None, file=file)
        if stored is not None:
            return cls(stored, special, name=f"{KEY}.{chosen}")
        if chosen in template_names():
            return cls(named_template(chosen), special, name=chosen)
        return cls(_read(chosen), special, name=chosen)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation. variables: others that the template reads, such as
        `enable_thinking`.

        ChatTemplateError for messages that the template refuses, and for a template that fails.
        """
        names: dict[str, Any] = {
            **self.special,
            **{name: _plain(value) for name, value in variables.items()},
            "messages": [_with_reasoning(_plain(message)) for message in messages],
            "tools": _plain(tools) if tools else None,
            "documents": _plain(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        self._sandbox.start()
        try:
            return self._compiled.render(**names)
        except jinja2.TemplateError as error:
            raise self._error(error.message or str(error)) from None
        except (RecursionError, MemoryError) as error:
            raise self._error(f"it needs too much memory ({type(error).__name__})") from None
        except Exception as error:  # a template can fail in any way that an expression can
            raise self._error(f"{type(error).__name__}: {error}") from None

    @cached_property
    def keeps_system(self) -> bool:
        """Whether a system message is part of the text. Templates without one refuse or drop it."""
        marker = "A system message."
        try:
            return marker in self.render(
                [{"role": "system", "content": marker}, {"role": "user", "content": "?"}]
            )
        except ChatTemplateError:
            return False

    def _compile(self) -> jinja2.Template:
        try:
            return self._sandbox.from_string(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"{printable(self.name, 200)}: line {error.lineno}: {printable(error.message, 200)}"
            ) from None
        except (RecursionError, MemoryError, SyntaxError) as error:  # what it becomes in Python
            raise ChatTemplateError(
                f"{printable(self.name, 200)}: is nested too deeply ({type(error).__name__})"
            ) from None

    def _error(self, problem: str) -> ChatTemplateError:
        return ChatTemplateError(
            f"{printable(self.name, 200)} cannot render these messages: {printable(problem, 400)}"
        )


def chosen_template(
    metadata: Mapping[str, Value],
    chosen: str | None = None,
    has_tools: bool = False,
    *,
    file: str | None = None,
) -> ChatTemplate:
    """Return the template for a conversation: see `ChatTemplate.of_model`. A conversation with
    tools gets the model's `tool_use` if there is one, and a model without any gets `chatml`, with a
    warning.
    """
    if chosen is None and has_tools and f"{KEY}.tool_use" in metadata:
        chosen = "tool_use"
    found = ChatTemplate.of_model(metadata, chosen, file=file)
    if found is None:
        log.warning("%s has no chat template; using chatml", printable(file or "the model", 400))
        found = ChatTemplate(named_template("chatml"), special_texts(metadata, file), name="chatml")
    return found


def template_names() -> list[str]:
    """Return the names of the templates that are included, for models whose file has none."""
    return sorted(path.stem for path in _FOLDER.glob("*.jinja"))


def named_template(name: str) -> str:
    """Return the text of an included template."""
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def special_texts(metadata: Mapping[str, Value], file: str | None = None) -> dict[str, str]:
    """Return the texts of special tokens under the names that templates read: `bos_token` and so
    on. Tokens that the model does not have are left out.
    """
    every = dict(metadata)
    if f"{PREFIX}tokens" not in every:
        return {}
    tokens, special = every[f"{PREFIX}tokens"].data, SpecialTokens.read(every, file)
    found = {"bos": special.bos, "eos": special.eos, "unk": special.unk}
    for role in _ROLES:
        key = f"{PREFIX}{_KEYS.get(role, role)}_token_id"
        found[role] = get(every, key, int, found.get(role), file=file)
    return {
        f"{role}_token": tokens[i]
        for role, i in found.items()
        if i is not None and 0 <= i < len(tokens)
    }


def _read(chosen: str) -> str:
    try:
        return Path(chosen).read_text(encoding="utf-8")
    except FileNotFoundError:
        if re.search(r"[/.]", chosen):
            raise NotFoundError("no such chat template", file=chosen) from None
        names = template_names()
        hint = did_you_mean(chosen, names) or f"; names are {', '.join(names)}"
        raise UsageError(
            f"'{printable(chosen, 80)}' is neither a chat template nor a file{hint}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        problem = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ChatTemplateError(
            f"the chat template cannot be read: {problem}", file=chosen
        ) from None


def _with_reasoning(message: Any) -> Any:
    """Give what an assistant thought the names that different templates read."""
    if not isinstance(message, dict):
        return message
    names = ("reasoning_content", "thinking", "reasoning")
    thought = next((message[name] for name in names if message.get(name) is not None), None)
    if thought is None:
        return message
    return {"thinking": thought, **message, "reasoning_content": thought}


def _plain(value: Any) -> Any:
    """Return data of a caller as plain JSON types, whose methods are harmless."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value) if type(value) is not kind else value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise UsageError(f"a message holds a {type(value).__name__}, expected JSON data")
