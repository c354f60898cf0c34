"""Options that a flag of the command line and a keyword of the Python API share.

A group of options is a frozen dataclass that derives from `Options`, whose fields are made by
`option`: name, default, flags and help are declared there and nowhere else. `add_flags` makes the
flags, `from_flags` reads them back, and `from_keywords` takes values from a call and says what was
meant where a keyword is unknown.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from numbers import Real
from typing import Any, ParamSpec, Self, TypeVar

from ..errors import UsageError, printable

P = ParamSpec("P")
R = TypeVar("R")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the most similar of the known words, or ""."""
    bare = {one.lstrip("-").lower(): one for one in known}
    close = difflib.get_close_matches(word.lstrip("-").lower(), bare, n=1, cutoff=0.6)
    return f"; did you mean '{bare[close[0]]}'?" if close else ""


@dataclass(frozen=True)
class Flag:
    """How the command line offers a field. kind: int, float, str or bool; off: the flag sets False.

    many: the value is a tuple, and the flag may be repeated. text: the command itself reads the
    words of the flag, which are lists. optional: what the flag means without
    a value. least: the smallest number that is accepted.
    """

    names: tuple[str, ...]
    help: str
    kind: type
    metavar: str | None = None
    choices: tuple[Any, ...] | None = None
    least: float | None = None
    many: bool = False
    text: bool = False
    off: bool = False
    optional: Any = None
    hidden: bool = False


def option(
    default: Any, *names: str, help: str = "", kind: type | None = None, **details: Any
) -> Any:
    """Return a dataclass field with its flags. `details` are those of `Flag`."""
    if kind is None:
        kind = str if default is None else type(default)
    return field(default=default, metadata={"flag": Flag(names, help, kind, **details)})


@dataclass(frozen=True)
class Options:
    """Base of option groups. Values are checked when an object is made: UsageError."""

    def __post_init__(self) -> None:
        for one in _fields(self):
            _check(one.name, one.metadata["flag"], getattr(self, one.name), one.default)

    @classmethod
    def field_names(cls) -> list[str]:
        return [one.name for one in _fields(cls)]

    @classmethod
    def add_flags(
        cls,
        parser: argparse._ActionsContainer,
        *,
        only: Sequence[str] | None = None,
        without: Sequence[str] = (),
        **defaults: Any,
    ) -> None:
        """Add the flags of all fields, or of those in `only`, to a parser or a group of one.

        defaults: where a command differs from the dataclass; None lets the command see whether the
        flag was given.
        """
        for one in _fields(cls):
            flag: Flag = one.metadata["flag"]
            if flag.names and one.name not in without and (only is None or one.name in only):
                _add(parser, one.name, flag, one.default, defaults)

    @classmethod
    def from_flags(cls, args: argparse.Namespace, **others: Any) -> Self:
        """Read the fields from parsed flags; `others` are set besides. Errors name the flags."""
        values = {}
        for one in _fields(cls):
            if one.name not in others and one.name in args:
                value = getattr(args, one.name)
                flag: Flag = one.metadata["flag"]
                if flag.many:
                    value = tuple(value) if value else one.default
                if flag.names:
                    _check(flag.names[0], flag, value, one.default)
                values[one.name] = value
        return cls(**values, **others)


def from_keywords(
    what: str, keywords: Mapping[str, Any], *given: tuple[type[Options], Options | None]
) -> list[Any]:
    """Return one object for each (class, object or None) of `given`, with `keywords` set.

    A keyword goes to every class that has a field of its name. UsageError for one that none has,
    in the words of `what` ("a model"), and for an object of another class.
    """
    known = {name for cls, _ in given for name in cls.field_names()}
    for name in keywords:
        if name not in known:
            raise unknown_option(what, name, known)
    made = []
    for cls, options in given:
        if not isinstance(options, (cls, type(None))):
            raise UsageError(f"options are {printable(repr(options), 60)}, expected {cls.__name__}")
        own = {name: keywords[name] for name in cls.field_names() if name in keywords}
        made.append(replace(options or cls(), **own))
    return made


def unknown_option(what: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a keyword that `what` does not take."""
    return UsageError(f"{what} has no option '{printable(name, 40)}'{did_you_mean(name, known)}")


def checks_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Make a misspelt keyword of a public function a UsageError that says what was meant."""
    parameters = inspect.signature(function).parameters
    known = [p.name for p in parameters.values() if p.kind is not p.POSITIONAL_ONLY]

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name not in parameters:
                raise unknown_option(function.__name__, name, known)
        return function(*args, **keywords)

    return call


def integer(text: str) -> int:
    """Parse a flag's value for argparse."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{printable(text, 40)}' is not an integer") from None


def real(text: str) -> float:
    """Parse a flag's value for argparse."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{printable(text, 40)}' is not a number") from None


def _add(
    parser: argparse._ActionsContainer,
    name: str,
    flag: Flag,
    default: Any,
    others: Mapping[str, Any],
) -> argparse.Action:
    words: dict[str, Any] = {"dest": name, "help": argparse.SUPPRESS}
    if not flag.hidden:
        shown = default if others.get(name) is None else others[name]
        words["help"] = (flag.help + _shown_default(flag, shown)).replace("%", "%%")
    default = others.get(name, default)
    if flag.kind is bool and flag.optional is None:
        words |= {"action": "store_false" if flag.off else "store_true", "default": default}
        return parser.add_argument(*flag.names, **words)
    words |= {
        "type": str if flag.text else {int: integer, float: real}.get(flag.kind, str),
        "metavar": flag.metavar,
        "choices": flag.choices,
        "default": default,
    }
    if flag.many:
        words |= {"action": "append", "default": None if flag.text else list(default or ()) or None}
    if flag.optional is not None:
        words |= {"nargs": "?", "const": flag.optional}
    return parser.add_argument(*flag.names, **words)


def _shown_default(flag: Flag, default: Any) -> str:
    if default in (None, "", ()) or isinstance(default, bool) or "default" in flag.help:
        return ""
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    return f" (default: {shown})"


def _check(name: str, flag: Flag, value: Any, default: Any) -> None:
    if value is None and default is None:
        return
    if not flag.many:
        _check_one(name, flag, value)
        return
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise _wrong(name, value, "a list")
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
    if flag.least is not None:
        expected = f"{flag.least} or more" if fits else f"{expected}, {flag.least} or more"
        fits = fits and value >= flag.least
    if flag.choices is not None and fits:
        expected, fits = "one of " + ", ".join(map(str, flag.choices)), value in flag.choices
    if not fits:
        raise _wrong(name, value, expected)


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


def _wrong(name: str, value: Any, expected: str) -> UsageError:
    shown = repr(value) if not name.startswith("-") else str(value)
    return UsageError(f"{name} is {printable(shown, 60)}, expected {expected}")


def _fields(cls: Any) -> list[Field]:
    return [one for one in fields(cls) if "flag" in one.metadata]
