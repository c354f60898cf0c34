"""Flags of options, and checks of their values."""

from __future__ import annotations

import argparse
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypedDict

from ..errors import UsageError, printable


@dataclass(frozen=True)
class Constant:
    """A flag without a value that sets its field to `value`."""

    names: tuple[str, ...]
    value: Any
    help: str
    hidden: bool = False


class Range(TypedDict, total=False):
    """The numbers that a flag takes, as keywords of `Flag`."""

    least: float
    most: float
    above: float


@dataclass(frozen=True)
class Flag:
    """The flags of a field on the command line.

    kind: int, float, str or bool. off: the flag sets False. aliases: other spellings, which help
    does not show. many: the value is a tuple, and the flag may be repeated. several: with `many`,
    the flag takes several words. commas: with `many`, a word of the flag holds several values.
    one_text: with `many`, a keyword may be a single text. text: the command itself parses the words
    of the flag, which are lists. optional: the value of the flag without a word. named: values
    that have a word of their own, besides those of the kind. least,
    most: the smallest and the largest number that are accepted. above: numbers are larger than
    it. constants: flags that set the field to one value each. keyed:
    the value is a dict, with a flag and its help for each key.
    """

    names: tuple[str, ...]
    help: str
    kind: type
    metavar: str | None = None
    choices: tuple[Any, ...] | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    aliases: tuple[str, ...] = ()
    many: bool = False
    several: bool = False
    commas: bool = False
    one_text: bool = False
    text: bool = False
    off: bool = False
    optional: Any = None
    hidden: bool = False
    named: Mapping[str, Any] | None = None
    constants: tuple[Constant, ...] = ()
    keyed: Mapping[str, tuple[str, str]] | None = None

    @property
    def spellings(self) -> list[str]:
        """All flags that set the field."""
        keyed = [name for name, _ in (self.keyed or {}).values()]
        return [
            *self.names,
            *self.aliases,
            *(name for one in self.constants for name in one.names),
            *keyed,
        ]


def integer(text: str) -> int:
    """Parse a flag's value for argparse: an integer. Raise ArgumentTypeError for anything else."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{printable(text, 40)}' is not an integer") from None


def real(text: str) -> float:
    """Parse a flag's value for argparse: a number. Raise ArgumentTypeError for anything else."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{printable(text, 40)}' is not a number") from None


READERS = {int: integer, float: real}


def reader(flag: Flag) -> Callable[[str], Any]:
    """Return what parses a word of the flag for argparse."""
    read, named = READERS.get(flag.kind, str), flag.named or {}
    return lambda text: named[text] if text in named else read(text)


def separated(flag: Flag, words: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values of words such as "1,2". Raise UsageError for one that is not a number."""
    found = []
    for text in words:
        try:
            found += [flag.kind(word) for word in str(text).split(",") if word or flag.kind is int]
        except ValueError:
            raise UsageError(
                f"{flag.names[0]} {printable(text, 60)}: expected numbers separated by commas"
            ) from None
    return tuple(found)


def shown_default(flag: Flag, default: Any) -> str:
    """Return what the help of a command adds for the default: empty if the help says it already."""
    if default in (None, "", ()) or isinstance(default, bool) or "default" in flag.help:
        return ""
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    return f" (default: {shown})"


def check_value(name: str, flag: Flag, value: Any, default: Any) -> None:
    """Raise UsageError, which calls the value `name`, if it is none that `flag` takes. None is one
    where it is the default.
    """
    if value is None and default is None:
        return
    if not flag.many:
        _check_one(name, flag, value)
        return
    if isinstance(value, str) and flag.one_text:
        return
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise wrong_value(name, value, "a list")
    for index, one in enumerate(value):
        _check_one(name if name.startswith("-") else f"{name}[{index}]", flag, one)


def _check_one(name: str, flag: Flag, value: Any) -> None:
    expected = {int: "a whole number", float: "a number", bool: "true or false"}.get(flag.kind, "")
    if flag.kind is int:
        fits = _is_integer(value)
    elif flag.kind is float:
        fits = _is_real(value)
    elif flag.kind is bool:
        fits = isinstance(value, (bool, int)) and value in (0, 1)
    else:
        fits = True
    if accepted := _range_of(flag):
        expected = accepted if fits else f"{expected}, {accepted}"
        fits = fits and _is_in_range(flag, value)
    if fits and flag.kind is float and not math.isfinite(value):
        expected, fits = "a finite number", False
    if flag.choices is not None and fits:
        expected, fits = "one of " + ", ".join(map(str, flag.choices)), value in flag.choices
    if not fits:
        raise wrong_value(name, value, expected)


def _range_of(flag: Flag) -> str:
    """Return the words for the numbers that a flag takes; empty if it takes all."""
    if flag.least is not None:
        return f"{flag.least} or more" if flag.most is None else f"{flag.least} to {flag.most}"
    words = [
        f"{word} {bound}"
        for word, bound in (("more than", flag.above), ("at most", flag.most))
        if bound is not None
    ]
    return " and ".join(words)


def _is_in_range(flag: Flag, value: Any) -> bool:
    """Return whether a number is one that the flag takes; NaN is not where there is a bound."""
    return (
        (flag.least is None or value >= flag.least)
        and (flag.most is None or value <= flag.most)
        and (flag.above is None or value > flag.above)
    )


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def wrong_value(name: str, value: Any, expected: str) -> UsageError:
    """Return an error to raise, such as "--threads is x, expected a whole number"."""
    shown = repr(value) if not name.startswith("-") else str(value)
    return UsageError(f"{name} is {printable(shown, 60)}, expected {expected}")
