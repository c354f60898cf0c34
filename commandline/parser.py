"""The argument parser of every command: errors of one line that suggest what was meant, no
abbreviated flags, short usage, colours where a terminal shows them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..formats.flags import integer, real
from ..formats.options import did_you_mean
from .colour import painted_error, painted_help, wants_colour
from .unsupported import CONVERTER_UNSUPPORTED, UNSUPPORTED

_SCALED = "--lora-scaled"
_NUMBERS = re.compile(r"-[\d.]+([,/;]-?[\d.]+)+")  # the separators of -ts, and of lists of bench


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32)


class Parser(argparse.ArgumentParser):
    """The parser of one command; `example` is a line to copy."""

    def __init__(self, prog: str, example: str | None = None):
        super().__init__(prog=prog, allow_abbrev=False, formatter_class=_Formatter)
        self.register("type", int, integer)
        self.register("type", float, real)
        self.example = example

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse `words`. An unknown flag ends the program with one line.

        Where a command takes `words`, they may also follow a flag. `--lora-scaled` takes a file and
        its scale as one word or two.
        """
        if _SCALED in self.flags():
            words = _joined_scales(words)
        words = self._joined_numbers(words)
        required = [action for action in self._actions if action.required]
        for action in required:  # an unknown flag is named before what is missing
            action.required = False
        try:
            _, extra = self.parse_known_args(list(words))
        finally:
            for action in required:
                action.required = True
        unknown = [word for word in extra if word.startswith("-")]
        if unknown:
            self.error(self._unknown(unknown[0].partition("=")[0]))
        args, extra = self.parse_known_args(list(words))
        if extra:
            if "words" not in args:
                self.error(f"unexpected argument '{extra[0]}'")
            args.words += extra
        return args

    def _joined_numbers(self, words: Sequence[str]) -> list[str]:
        """Return the words with `-ts=-1,1` for `-ts -1,1`: argparse reads a list that begins with a
        negative number as a flag, and does not let the command say what is wrong with it.
        """
        takers = (action for action in self._actions if action.nargs is None)
        flags = {flag for action in takers for flag in action.option_strings}
        joined: list[str] = []
        for word in words:
            if joined and joined[-1] in flags and _NUMBERS.fullmatch(word):
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return joined

    def flags(self) -> list[str]:
        """Return all spellings of flags that help shows."""
        return [
            flag
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for flag in action.option_strings
        ]

    def _unknown(self, flag: str) -> str:
        if "--model" in self.flags():  # one of the tools that run a model
            unsupported = UNSUPPORTED
        else:
            unsupported = CONVERTER_UNSUPPORTED if "--outtype" in self.flags() else {}
        if flag in unsupported:
            return f"'{flag}' ({unsupported[flag]}) is not supported"
        positional = self._get_positional_actions()
        if flag in ("-m", "--model") and positional:
            name = str(positional[0].metavar or positional[0].dest).split()[0]
            return f"unknown flag '{flag}': {name} is given without a flag"
        return f"unknown flag '{flag}'{did_you_mean(flag, self.flags())}"

    def _get_option_tuples(self, option_string: str) -> list:
        """No abbreviations: without this argparse reads `-cnv` as `-c nv`."""
        return []

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit with status 2."""
        prefix = painted_error(f"{self.prog}: error:", sys.stderr)
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{prefix} {message}{end} See `{self.prog} --help`.\n")

    def format_usage(self) -> str:
        """Return the short usage in one line."""
        return f"usage: {self._usage()}\n"

    def format_help(self) -> str:
        """Return the help text with the short usage."""
        generated = self.usage
        self.usage = self._usage().replace("%", "%%")
        try:
            text = super().format_help()
        finally:
            self.usage = generated
        # On a line of its own, however long: it is there to be copied.
        return text + (f"\nexample:\n  {self.example}\n" if self.example else "")

    def print_help(self, file: Any = None) -> None:
        """Write the help text to `file` (standard output), with colours where it shows them."""
        file = file or sys.stdout
        text = self.format_help()
        file.write(painted_help(text) if wants_colour(file) else text)

    def _usage(self) -> str:
        if self.usage is not None:
            return self.usage
        words = [self.prog, "[flags]"]
        for action in self._get_positional_actions():
            name = str(action.metavar or action.dest)
            words.append(
                {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [...]"}.get(
                    str(action.nargs), name
                )
            )
        return " ".join(words)


def _joined_scales(words: Sequence[str]) -> list[str]:
    """Return the words with FILE:SCALE for the FILE SCALE of llama.cpp after `--lora-scaled`."""
    joined: list[str] = []
    for word in words:
        if joined[-2:-1] == [_SCALED] and _is_number(word) and _has_no_scale(joined[-1]):
            joined[-1] += f":{word}"
        else:
            joined.append(word)
    return joined


def _has_no_scale(file: str) -> bool:
    given = "," in file or _is_number(file.rpartition(":")[2])  # FILE:SCALE,FILE:SCALE
    return os.path.exists(file) or not given


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
