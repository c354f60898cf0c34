"""`iqforge chat`: a conversation with a model."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import sys
from dataclasses import replace

from ...errors import UsageError, utf_8
from ..chat.options import ChatOptions
from ..options import LoadOptions
from .flags import add_load_flags, add_model_flag, open_model
from .prompt_flags import check_options, prompt_text, unescape, with_stops
from .sampler_flags import ANSWER_FIELDS, add_sampler_flags


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge chat` to its parser."""
    parser.description = (
        "Talk to a model. Messages become text by the model's chat template. The cache keeps what"
        " was said, so that a turn only evaluates what is new. Ctrl-C stops an answer. A backslash"
        ' at the end of a line continues it, """ begins and ends a message of several lines, and'
        " /help lists commands."
    )
    add_model_flag(parser)
    parser.add_argument(
        "-p", "--prompt", type=utf_8, metavar="TEXT", help="the first message of the user"
    )
    parser.add_argument(
        "-f", "--file", metavar="FILE", help="a UTF-8 file with the first message of the user"
    )
    add_chat_flags(parser)
    ChatOptions.add_flags(parser, only=ANSWER_FIELDS)
    parser.add_argument(
        "--no-escape", action="store_true", help="take backslashes in -p, -sys and -r as they are"
    )
    for flags in (("-e", "--escape"), ("-cnv", "--conversation")):  # always so
        parser.add_argument(*flags, action="store_true", help=argparse.SUPPRESS)
    add_sampler_flags(parser)
    add_load_flags(parser)


def add_chat_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags that only conversations have."""
    ChatOptions.add_flags(parser, only=("system",))
    parser.add_argument(
        "-sysf", "--system-prompt-file", metavar="FILE", help="a UTF-8 file with the system message"
    )
    ChatOptions.add_flags(parser, only=("chat_template", "chat_template_kwargs"))
    parser.add_argument("--jinja", action="store_true", help=argparse.SUPPRESS)  # always so
    parser.add_argument(
        "--messages",
        metavar="FILE",
        help="a conversation to continue: a JSON list of messages, of tools too",
    )
    parser.add_argument(
        "--tools", metavar="FILE", help="a JSON list of tools, which the template is given"
    )
    parser.add_argument(
        "--documents", metavar="FILE", help="a JSON list of documents, which the template is given"
    )
    parser.add_argument(
        "-st", "--single-turn", action="store_true", help="end after the first answer"
    )
    parser.add_argument(
        "-mli",
        "--multiline-input",
        action="store_true",
        help="a backslash at the end of a line ends the message instead of continuing it",
    )


CHAT_FLAGS = {
    "system": "-sys",
    "system_prompt_file": "-sysf",
    "chat_template": "--chat-template",
    "chat_template_kwargs": "--chat-template-kwargs",
    "messages": "--messages",
    "tools": "--tools",
    "documents": "--documents",
    "single_turn": "-st",
    "multiline_input": "-mli",
}

_READ = (  # files that /save may not replace; --messages it may
    "file",
    "system_prompt_file",
    "chat_template",
    "tools",
    "documents",
    "grammar_file",
    "json_schema_file",
)


def check(args: argparse.Namespace) -> None:
    """Raise errors of flags, which are found without a model."""
    options = with_stops(args, ChatOptions.from_flags(args))
    check_options(options)
    options.variables()
    LoadOptions.from_flags(args).check()


def run(args: argparse.Namespace, api) -> int:
    """Hold the conversation and return 0; 1 with -st if there was an error instead of an answer."""
    from ..chat.console import Console
    from ..chat.files import read_list, read_messages
    from ..chat.session import ChatSession, chat_context
    from ..chat.template import chosen_template
    from ..weights.hyperparameters import Hyperparameters

    check(args)
    options = with_stops(args, ChatOptions.from_flags(args))
    if options.seed == -1:
        options = replace(options, seed=secrets.randbits(32))
    options = replace(options, system=_system(args))
    first = prompt_text(args, needed=False)
    given = [] if args.messages is None else read_messages(args.messages)
    messages = options.with_system(given)
    tools = read_list(args.tools) if args.tools is not None else None
    documents = read_list(args.documents) if args.documents is not None else None
    source = api.open_source(args.model)
    try:
        file = str(source.path)
        template = chosen_template(source.metadata, options.chat_template, bool(tools), file=file)
        context = chat_context(Hyperparameters(source.metadata, file), options.context)
    except BaseException:
        source.close()
        raise
    with open_model(args, api, source=source, context=context, generates=True) as model:
        session = ChatSession.with_options(model, options, template=template)
        if not model.is_first:
            session.attend()
            return 0
        console = Console(
            session,
            messages,
            n=options.n,
            tools=tools,
            documents=documents,
            multiline=args.multiline_input,
            timings=args.verbose,
            inputs=[path for name in _READ if (path := getattr(args, name))],
        )
        if sys.stdin.isatty():
            _edit_lines()
        if sys.stdin.isatty() and not args.single_turn:
            print("/help lists commands, Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
        console.run(first, once=args.single_turn)
        session.dismiss()
    return int(args.single_turn and console.failed)


def _system(args: argparse.Namespace) -> str | None:
    """Return the system message of -sys or -sysf."""
    if args.system_prompt_file is None:
        return args.system if args.system is None or args.no_escape else unescape(args.system)
    if args.system is not None:
        raise UsageError("only one of -sys TEXT and -sysf FILE can be given")
    from ..evaluate.chunks import read_text

    return read_text(args.system_prompt_file)


def _edit_lines() -> None:
    """Let the terminal edit lines and recall earlier ones, where Python can."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it is what turns it on
