"""The prompt that -p or -f gives. Imports nothing heavy."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import TypeVar

from ...errors import UsageError, printable
from ..text_options import TextOptions

T = TypeVar("T", bound=TextOptions)

_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def typed_text(prompt: str, *, escape: bool) -> str:
    """Return the text of -p, with what backslashes in it stand for if `escape`. Raise
    UsageError if it is not UTF-8.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # Python has bytes that are not UTF-8 as surrogates
        raise UsageError(f"-p is not UTF-8 after {error.start} characters") from None
    return unescape(prompt) if escape else prompt


def prompt_text(args: argparse.Namespace, *, needed: bool = True) -> str | None:
    """Return the text of -p, or of the file of -f. None without either, unless one is needed. Raise
    UsageError for both, or for neither where one is needed.
    """
    binary = getattr(args, "binary_file", None)
    given = [
        flag
        for flag, value in (("-p", args.prompt), ("-f", args.file), ("-bf", binary))
        if value is not None
    ]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} give a prompt: only one of them can")
    if needed and not given:
        raise UsageError("either -p PROMPT or -f FILE is needed")
    if args.prompt is not None:
        return typed_text(args.prompt, escape=not args.no_escape)
    if not given:
        return None
    from ..evaluate.chunks import read_text

    return read_text(args.file) if binary is None else read_text(binary, whole=True)


def check_options(options: TextOptions) -> None:
    """Raise errors of how a text is generated, which are found without a model."""
    if options.seed == -1:  # any
        options = replace(options, seed=0)
    options.settings()
    options.grammar_source()


def with_stops(args: argparse.Namespace, options: T) -> T:
    """Return options with the backslashes in texts of -r replaced, unless --no-escape."""
    if args.no_escape:
        return options
    return replace(options, stop=tuple(unescape(text) for text in options.stop))


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
