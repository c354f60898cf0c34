"""Talk to models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..formats.options import checks_keywords
from .source import PathLike, open_source

if TYPE_CHECKING:
    from ..runtime.chat.template import ChatTemplate


@checks_keywords
def load_chat_template(path: PathLike, template: str | None = None) -> ChatTemplate:
    """Return the chat template of a GGUF file or a checkpoint folder, from its metadata alone.

    `.render(messages, tools=None, documents=None, add_generation_prompt=True)` returns the text of
    a conversation. template: what to use instead of the file's own: the name of another one in the
    file, an included one such as "chatml", a file, or Jinja text. Raise ChatTemplateError for a
    template that cannot be read, and if the file has none.
    """
    from ..errors import ChatTemplateError
    from ..runtime.chat.template import ChatTemplate

    with open_source(path) as source:
        found = ChatTemplate.of_model(source.metadata, template, file=str(source.path))
    if found is None:
        raise ChatTemplateError("has no chat template", file=path)
    return found
