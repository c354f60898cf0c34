"""Declare options that a flag of the command line and a keyword of the Python API share.

A group of options is a frozen dataclass that derives from `Options`, whose fields are made by
`option`: name, default, flags and help are declared there and nowhere else. `add_flags` adds the
flags to a parser, `from_flags` reads them back, and `from_keywords` takes values from a call and
suggests a name for an unknown keyword.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from numbers import Real
from typing import Any, ParamSpec, Self, TypeVar

from ..errors import UsageError, printable

P = ParamSpec("P")
R = TypeVar("R")
_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the most similar of the known words, or ""."""
    bare = {one.lstrip("-").lower(): one for one in known}
    close = difflib.get_close_matches(word.lstrip("-").lower(), bare, n=1, cutoff=0.6)
    return f"; did you mean '{bare[close[0]]}'?" if close else ""


@dataclass(frozen=True)
class Constant:
    """A flag without a value that sets its field to `value`."""

    names: tuple[str, ...]
    value: Any
    help: str
    hidden: bool = False


@dataclass(frozen=True)
class Flag:
    """The flags of a field on the command line.

    kind: int, float, str or bool. off: the flag sets False. aliases: other spellings, which help
    does not show. many: the value is a tuple, and the flag may be repeated. several: with `many`,
    the flag takes several words. commas: with `many`, a word of the flag holds several values.
    one_text: with `many`, a keyword may be a single text. text: the command itself parses the words
    of the flag, which are lists. optional: the value of the flag without a word. least: the
    smallest number that is accepted. constants: flags that set the field to one value each. keyed:
    the value is a dict, with a flag and its help for each key.
    """

    names: tuple[str, ...]
    help: str
    kind: type
    metavar: str | None = None
    choices: tuple[Any, ...] | None = None
    least: float | None = None
    aliases: tuple[str, ...] = ()
    many: bool = False
    several: bool = False
    commas: bool = False
    one_text: bool = False
    text: bool = False
    off: bool = False
    optional: Any = None
    hidden: bool = False
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


def option(
    default: Any, *names: str, help: str = "", kind: type | None = None, **details: Any
) -> Any:
    """Return a dataclass field with its flags. `details` are those of `Flag`."""
    if kind is None:
        kind = str if default is None else type(default)
    metadata = {"flag": Flag(names, help, kind, **details)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """Base of option groups. Raise UsageError for a wrong name or value when an object is made."""

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        known = [one.name for one in fields(cls)]
        for name in keywords:
            if name not in known:
                raise unknown_option(cls.__name__, name, known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for one in _fields(self):
            _check(one.name, one.metadata["flag"], getattr(self, one.name), _default(one))

    @classmethod
    def field_names(cls) -> list[str]:
        return [one.name for one in _fields(cls)]

    @classmethod
    def flag_of(cls, name: str) -> Flag:
        """Return how the command line offers a field."""
        [found] = [one.metadata["flag"] for one in _fields(cls) if one.name == name]
        return found

    @classmethod
    def default_of(cls, name: str) -> Any:
        """Return the default of a field."""
        [found] = [_default(one) for one in _fields(cls) if one.name == name]
        return found

    @classmethod
    def add_flags(
        cls,
        parser: argparse._ActionsContainer,
        *,
        only: Sequence[str] | None = None,
        without: Sequence[str] = (),
        **defaults: Any,
    ) -> None:
        """Add the flags of all fields, or of those in `only` in that order, to a parser or to one
        of its groups.

        defaults: defaults of this command where they differ from the dataclass; None lets the
        command see whether the flag was given.
        """
        known = {one.name: one for one in _fields(cls)}
        for name in known if only is None else only:
            flag: Flag = known[name].metadata["flag"]
            if flag.spellings and name not in without:
                _add(parser, name, flag, _default(known[name]), defaults)

    @classmethod
    def from_flags(cls, args: argparse.Namespace, **others: Any) -> Self:
        """Read the fields from parsed flags, and set `others` as well. Errors name the flags."""
        values = {}
        for one in _fields(cls):
            if one.name not in others and one.name in args:
                value = getattr(args, one.name)
                flag: Flag = one.metadata["flag"]
                if (flag.many or flag.keyed) and not value:
                    value = _default(one)
                elif flag.many:
                    value = _separated(flag, value) if flag.commas else tuple(value)
                if flag.spellings:
                    _check(flag.spellings[0], flag, value, _default(one))
                values[one.name] = value
        return cls(**values, **others)


def from_keywords(
    what: str | Callable[..., Any],
    keywords: Mapping[str, Any],
    *given: tuple[type[Options], Options | None],
) -> list[Any]:
    """Return one object for each (class, object or None) of `given`, with `keywords` set.

    A keyword goes to every class that has a field of its name. Raise UsageError for one that none
    has, with `what` ("a model", or a function) as the subject, and for an object of another class.
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


def unknown_option(what: str | Callable[..., Any], name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a keyword that `what` does not take. A function takes its parameters in
    addition to the `known` names.
    """
    if not isinstance(what, str):
        own = inspect.signature(what).parameters.values()
        known = [*known, *(p.name for p in own if p.kind in (p.KEYWORD_ONLY, _EITHER))]
        what = what.__name__
    return UsageError(f"{what} has no option '{printable(name, 40)}'{did_you_mean(name, known)}")


def checks_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Turn a misspelt keyword of a public function into a UsageError with a suggestion."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name not in parameters:
                raise unknown_option(function, name, ())
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
) -> None:
    words: dict[str, Any] = {"dest": name, "help": argparse.SUPPRESS}
    if not flag.hidden:
        shown = default if others.get(name) is None else others[name]
        words["help"] = (flag.help + _shown_default(flag, shown)).replace("%", "%%")
    default = others.get(name, default)
    for one in flag.constants:
        sets = {"dest": name, "action": "store_const", "const": one.value, "default": default}
        shown = argparse.SUPPRESS if one.hidden else one.help.replace("%", "%%")
        parser.add_argument(*one.names, **sets, help=shown)
    for key, (spelling, help) in (flag.keyed or {}).items():
        sets = {"dest": name, "action": _KeyAction, "key": key, "metavar": flag.metavar}
        parser.add_argument(spelling, **sets, help=help.replace("%", "%%"))
    if not flag.names:
        return
    if flag.kind is bool and flag.optional is None:
        words |= {"action": "store_false" if flag.off else "store_true", "default": default}
    else:
        words |= {
            "type": str if flag.text or flag.commas else _READERS.get(flag.kind, str),
            "metavar": flag.metavar,
            "choices": flag.choices,
            "default": default,
        }
    if flag.many:
        words |= {"action": "append", "default": None if flag.text else list(default or ()) or None}
    if flag.several:
        words |= {"action": "extend", "nargs": "+"}
    if flag.optional is not None:
        words |= {"nargs": "?", "const": flag.optional}
    parser.add_argument(*flag.names, **words)
    if flag.aliases:
        words |= {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        parser.add_argument(*flag.aliases, **words)


_READERS = {int: integer, float: real}


class _KeyAction(argparse.Action):
    """Set one key of a dict."""

    def __init__(self, *args: Any, key: str, **keywords: Any):
        super().__init__(*args, **keywords)
        self.key = key

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest) or {}
        setattr(namespace, self.dest, {**before, self.key: values})


def _separated(flag: Flag, words: Iterable[Any]) -> tuple[Any, ...]:
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
    if isinstance(value, str) and flag.one_text:
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


def _default(one: Field) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def _fields(cls: Any) -> list[Field]:
    return [one for one in fields(cls) if "flag" in one.metadata]
