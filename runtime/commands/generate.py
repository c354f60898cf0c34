"""`iqforge generate`: text that follows a prompt, printed as it comes."""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from dataclasses import replace

from ...errors import UsageError, printable, utf_8
from ...formats.commands.progress import on_one_line
from ..text_options import GenerateOptions
from .flags import add_load_flags, add_model_flag, open_model
from .watch import passes, watched

_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continue a prompt. Each token is drawn from the top-k tokens, of these from the fewest"
        " that reach top-p, of these from those at least min-p times as probable as the best; a"
        " higher temperature draws the less probable ones more often."
    )
    add_model_flag(parser)
    parser.add_argument(
        "-p",
        "--prompt",
        type=utf_8,
        metavar="TEXT",
        help="the prompt; \\n, \\t, \\\\ and the like are replaced unless --no-escape",
    )
    parser.add_argument("-f", "--file", metavar="FILE", help="a UTF-8 file with the prompt")
    GenerateOptions.add_flags(parser)
    parser.add_argument(
        "--no-display-prompt", action="store_true", help="print only what is generated"
    )
    parser.add_argument(
        "--no-escape", action="store_true", help="take backslashes in -p as they are"
    )
    parser.add_argument("-e", "--escape", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-b", "--batch-size", type=int, default=2048, help=argparse.SUPPRESS)
    add_load_flags(parser)


def run(args: argparse.Namespace, api) -> int:
    from ..evaluate.chunks import read_text
    from ..generate import Generation

    if (args.prompt is None) == (args.file is None):
        raise UsageError("either -p PROMPT or -f FILE is needed")
    options = GenerateOptions.from_flags(args)
    if options.seed == -1:
        options = replace(options, seed=secrets.randbits(32))
        print(f"seed: {options.seed}", file=sys.stderr)
    options = replace(options, top_k=max(options.top_k, 0))  # below 0: all tokens, as in llama.cpp
    options.sampling()  # its errors before the model is opened
    if args.prompt is None:
        text = read_text(args.file)
    else:
        text = args.prompt if args.no_escape else unescape(args.prompt)
    source = api.open_source(args.model)
    try:
        context, n = api.plan_generation(source, text, options.n, options.context)
    except BaseException:
        source.close()
        raise
    record = Generation(0)
    with open_model(args, api, source=source, context=context) as model:
        options = replace(options, context=context, n=n)
        plan = [*passes(context - n, model.ubatch), (1, max(n, 0))]
        with watched(model, "generating", plan, before="\n" if on_one_line() else ""):
            for piece in api.generate(
                model, text, options=options, echo=not args.no_display_prompt, record=record
            ):
                print(piece, end="", flush=True)
        print(flush=True)
    n = len(record.tokens)  # the first one is the prompt's result
    speed = (
        f", {n - 1} of them in {record.seconds:.2f} s, {record.per_second:.2f} tokens/s"
        if n > 1
        else ""
    )
    print(
        f"prompt: {record.prompt_tokens} tokens in {record.prompt_seconds:.2f} s,"
        f" {record.prompt_per_second:.2f} tokens/s\ngenerated: {n}"
        f" token{'s' * (n != 1)}{speed}{'; ended by itself' if record.ended else ''}",
        file=sys.stderr,
    )
    return 0


def unescape(text: str) -> str:
    r"""Replace \n, \r, \t, \", \', \\ and \xHH by what they stand for; other backslashes stay.

    \xHH is a byte of UTF-8, as in the reference. UsageError for bytes that are none.
    """

    def meant(found: re.Match[bytes]) -> bytes:
        return _ESCAPES[found[1]] if found[1] else bytes.fromhex(found[2].decode())

    replaced = re.sub(
        rb"\\(?:([nrt'\"\\])|x([0-9a-fA-F]{2}))", meant, text.encode("utf-8", "surrogatepass")
    )
    try:
        return replaced.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the text is not UTF-8 at byte {error.start}:"
            f" {printable(replaced[error.start : error.end], 40)}"
        ) from None
