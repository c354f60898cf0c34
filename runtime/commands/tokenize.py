"""`iqforge tokenize`: the tokens of a text."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from ...errors import EvaluationError, NotFoundError, UsageError, utf_8
from .flags import add_model_flag
from .prompt_flags import typed_text, unescape


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge tokenize` to its parser."""
    parser.description = (
        "Print the tokens of a text, one line each: id and text. Only the vocabulary of the model"
        " is read."
    )
    add_model_flag(parser)
    parser.add_argument("-p", "--prompt", type=utf_8, metavar="TEXT", help="the text")
    parser.add_argument("-f", "--file", metavar="FILE", help="a UTF-8 file with the text")
    parser.add_argument("--stdin", action="store_true", help="read the text from standard input")
    parser.add_argument(
        "--ids", action="store_true", help="print a list of ids instead, such as [1, 2, 3]"
    )
    parser.add_argument("--show-count", action="store_true", help="also print the number of tokens")
    parser.add_argument(
        "--no-bos", action="store_true", help="add no BOS token, even if the model wants one"
    )
    parser.add_argument(
        "--no-escape",
        action="store_true",
        help="take backslashes in the text as they are; otherwise \\n, \\t, \\\\ and the like are"
        " replaced",
    )
    parser.add_argument(
        "--no-parse-special",
        action="store_true",
        help="take the texts of control tokens, such as <s>, as text like any other",
    )
    parser.add_argument("--log-disable", action="store_true", help="print no warnings")


def run(args: argparse.Namespace, api) -> int:
    """Print the tokens of the text and return 0. Raise UsageError unless there is exactly
    one text.
    """
    if [args.prompt is not None, args.file is not None, args.stdin].count(True) != 1:
        raise UsageError("exactly one of -p TEXT, -f FILE and --stdin is needed")
    if args.log_disable:
        logging.getLogger(__name__.partition(".")[0]).setLevel(logging.CRITICAL)
    tokenizer = api.load_tokenizer(args.model)
    text = _text(args)
    if not args.no_escape:
        text = unescape(text)
    # As in the reference, no EOS follows either without BOS.
    ids = tokenizer.encode(
        text,
        add_special=tokenizer.special.add_bos and not args.no_bos,
        parse_special=not args.no_parse_special,
    )
    if args.ids:
        print(ids)
    else:
        for token in ids:
            print(f"{token:6d} -> {_shown(tokenizer.token_bytes(token))}")
    if args.show_count:
        print(f"Total number of tokens: {len(ids)}")
    return 0


def _shown(piece: bytes) -> str:
    """Return the text of a token in quotes. Part of a character is shown as bytes."""
    try:
        return f"'{piece.decode()}'"
    except UnicodeDecodeError:
        return f"'<{piece.hex(' ')}>' (utf-8 decode failure)"


def _text(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return typed_text(args.prompt, escape=False)
    name = "standard input" if args.stdin else os.fspath(args.file)
    try:
        if args.stdin:
            data = sys.stdin.buffer.read()
        else:
            with open(args.file, "rb") as file:
                data = file.read()
    except FileNotFoundError:
        raise NotFoundError("no such text file", file=name) from None
    except OSError as error:
        raise EvaluationError(f"cannot be read: {error.strerror}", file=name) from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EvaluationError("the text is not UTF-8", file=name, offset=error.start) from None
