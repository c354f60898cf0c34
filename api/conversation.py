"""Talk to models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..formats.options import checks_keywords
from .models import opened_model, split_options
from .source import PathLike, open_source

if TYPE_CHECKING:
    from ..runtime.chat.options import ChatOptions
    from ..runtime.chat.session import Answer, ChatSession
    from ..runtime.chat.template import ChatTemplate, Message
    from ..runtime.model import Model
    from ..runtime.options import LoadOptions


def chat(
    model: PathLike | Model,
    messages: Sequence[Message],
    n: int | None = None,
    *,
    options: ChatOptions | None = None,
    load: LoadOptions | None = None,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    record: Answer | None = None,
    **keywords: Any,
) -> Iterator[str]:
    """Return the answer to a conversation, in pieces as it comes.

    model: a path, opened with `load`, or an open model. messages: mappings with "role" and
    "content", which the model's chat template is given as they are, as well as `tools` and
    `documents`. keywords: fields of `runtime.chat.options.ChatOptions` and, for a path, of
    `runtime.options.LoadOptions`; they win over `options` and `load`.

    - n: the most tokens of the answer (until the context is full). context (8192, or what the model
      was trained for if that is less): the most tokens in all; 0: what the model was trained for.
    - chat_template: what to use instead of the model's own, as in `load_chat_template`.
      chat_template_kwargs: more variables for it, as JSON. system: the system message.
    - stop, temperature, top_k, ...: see `generate`.

    record: gets text, tokens, times and why the answer ended. `open_chat` keeps a sequence for
    several turns, so that only what is new is evaluated.
    """
    from ..runtime.chat.options import ChatOptions

    keywords = keywords if n is None else keywords | {"n": n}
    options, load = split_options(chat, model, keywords, ChatOptions, options, load)
    return _answer(model, messages, options, load, tools, documents, record)


def _answer(
    model: PathLike | Model,
    messages: Sequence[Message],
    options: ChatOptions,
    load: LoadOptions,
    tools: Sequence[Any] | None,
    documents: Sequence[Any] | None,
    record: Answer | None,
) -> Iterator[str]:
    from ..runtime.chat.session import ChatSession

    with opened_model(model, load) as loaded:
        session = ChatSession.with_options(loaded, options, has_tools=bool(tools))
        yield from session.answer(
            options.with_system(messages),
            options.n,
            record=record,
            tools=tools,
            documents=documents,
        )


def open_chat(model: Model, *, options: ChatOptions | None = None, **keywords: Any) -> ChatSession:
    """Return a sequence of `model`, which is loaded, that answers conversations turn after turn.

    `.answer(messages, n)` returns the pieces of an answer. Only what the messages do not have in
    common with the sequence so far is evaluated. keywords: as for `chat`.
    """
    from ..formats.options import from_keywords
    from ..runtime.chat.options import ChatOptions
    from ..runtime.chat.session import ChatSession

    [chosen] = from_keywords(open_chat, keywords, (ChatOptions, options))
    return ChatSession.with_options(model, chosen)


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
