"""`iqforge generate`: text that follows a prompt, printed as it comes."""

from __future__ import annotations

import argparse
import secrets
import sys
from dataclasses import replace

from ...errors import UsageError, utf_8
from ...formats.commands.progress import count_of, on_one_line, print_result
from ..driver import start_driver
from ..options import LoadOptions
from ..parallel.modes import NO_PROMPT_CACHE, has_ranks
from ..text_options import GenerateOptions
from . import chat
from .flags import add_load_flags, add_model_flag, open_model
from .prompt_flags import check_options, prompt_text, with_stops
from .sampler_flags import ANSWER_FIELDS, CACHE_FIELDS, add_sampler_flags
from .watch import passes, watched


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge generate` to its parser."""
    parser.description = "Continue a prompt. With -cnv, talk to the model: see `iqforge help chat`."
    add_model_flag(parser)
    parser.add_argument(
        "-p",
        "--prompt",
        type=utf_8,
        metavar="TEXT",
        help="the prompt; \\n, \\t, \\\\ and the like are replaced unless --no-escape",
    )
    parser.add_argument("-f", "--file", metavar="FILE", help="a UTF-8 file with the prompt")
    parser.add_argument(
        "-bf",
        "--binary-file",
        metavar="FILE",
        help="the same, but a line break at the end of the file belongs to the prompt",
    )
    GenerateOptions.add_flags(parser, only=(*ANSWER_FIELDS, *CACHE_FIELDS))
    parser.add_argument(
        "--no-display-prompt", action="store_true", help="print only what is generated"
    )
    parser.add_argument(
        "--display-prompt",
        action="store_false",
        dest="no_display_prompt",
        help=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--no-escape", action="store_true", help="take backslashes in -p and -r as they are"
    )
    conversation = parser.add_argument_group("conversation")
    conversation.add_argument(
        "-cnv", "--conversation", action="store_true", help="talk to the model"
    )
    conversation.add_argument(
        "-no-cnv",
        "--no-conversation",
        action="store_false",
        dest="conversation",
        help=argparse.SUPPRESS,
    )
    chat.add_chat_flags(conversation)
    parser.add_argument("-e", "--escape", action="store_true", help=argparse.SUPPRESS)
    add_sampler_flags(parser)
    add_load_flags(parser)


def check(args: argparse.Namespace) -> None:
    """Raise errors of flags and texts, which are found without a model."""
    from ..evaluate.chunks import can_be_read_again

    if args.conversation:
        for name in CACHE_FIELDS:
            if getattr(args, name):
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} does not go together with a conversation")
        chat.check(args)
        return
    for name, flag in chat.CHAT_FLAGS.items():
        if getattr(args, name):
            raise UsageError(f"{flag} is for conversations: add -cnv, or use `iqforge chat`")
    options = with_stops(args, GenerateOptions.from_flags(args))
    check_options(options)
    options.cache()
    if all(file is None or can_be_read_again(file) for file in (args.file, args.binary_file)):
        prompt_text(args)
    LoadOptions.from_flags(args).check()


def check_ranks(args: argparse.Namespace) -> None:
    """UsageError for what several ranks do not do."""
    if args.prompt_cache:
        raise UsageError(NO_PROMPT_CACHE)


def run(args: argparse.Namespace, api) -> int:
    """Print the text that follows the prompt, or start a conversation with -cnv. Return 0, or what
    `chat.run` returns. Raise UsageError for flags that do not go together.
    """
    if not has_ranks(args.split_mode):
        start_driver(args.device)  # before torch is imported
    check(args)
    if args.conversation:
        return chat.run(args, api)
    from ..generate import Generation

    options = with_stops(args, GenerateOptions.from_flags(args))
    if options.seed == -1:
        options = replace(options, seed=secrets.randbits(32))
        print(f"seed: {options.seed}", file=sys.stderr)
    text = prompt_text(args)
    source = api.open_source(args.model)
    try:
        context, n = api.plan_generation(source, text, options.n, options.context)
    except BaseException:
        source.close()
        raise
    record = Generation(0)
    with open_model(args, api, source=source, context=context, generates=True) as model:
        options = replace(options, context=context, n=n)
        plan = [*passes(context - n, model.ubatch), (1, max(n, 0))]
        with watched(model, "generating", plan, before="\n" if on_one_line() else ""):
            for piece in api.generate(
                model, text, options=options, echo=not args.no_display_prompt, record=record
            ):
                print_result(piece)
        print_result("\n")
    n = len(record.tokens)  # the first one is the prompt's result
    speed = (
        f", {n - 1} of them in {record.seconds:.2f} s, {record.per_second:.2f} tokens/s"
        if n > 1
        else ""
    )
    evaluated = record.prompt_tokens - record.reused
    reused = f", {record.reused} of them from the file and {evaluated} evaluated"
    print(
        f"prompt: {count_of(record.prompt_tokens, 'token')}{reused if record.reused else ''} in"
        f" {record.prompt_seconds:.2f} s, {record.prompt_per_second:.2f} tokens/s\ngenerated:"
        f" {count_of(n, 'token')}{speed}{'; ended by itself' if record.ended else ''}",
        file=sys.stderr,
    )
    return 0
