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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, ParamSpec, Self, TypeVar

from ..errors import UsageError, printable
from .flags import (
    Flag,
    check_value,
    reader,
    separated,
    shown_default,
)

P = ParamSpec("P")
R = TypeVar("R")
_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the only known word that begins with `word`, if that has
    three letters or more, else for the most similar one; "" if none is similar.
    """
    bare = {one.lstrip("-").lower(): one for one in known}
    start = word.lstrip("-").lower()
    longer = [one for one in bare if one.startswith(start)] if len(start) > 2 else []
    similar = difflib.get_close_matches(start, bare, n=1, cutoff=0.6)
    close = longer if len(longer) == 1 else similar
    return f"; did you mean '{bare[close[0]]}'?" if close else ""


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

    @classmethod
    def field_of(cls, flag: str) -> str | None:
        """Return the name of the field that has a flag, such as `-ts`."""
        given = (one.name for one in _fields(cls) if flag in one.metadata["flag"].names)
        return next(given, None)

    def __post_init__(self) -> None:
        for one in _fields(self):
            check_value(one.name, one.metadata["flag"], getattr(self, one.name), _default(one))

    @classmethod
    def field_names(cls) -> list[str]:
        """Return the names of the options, in the order of their declaration."""
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
                    value = separated(flag, value) if flag.commas else tuple(value)
                if flag.spellings:
                    check_value(flag.spellings[0], flag, value, _default(one))
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
        words["help"] = (flag.help + shown_default(flag, shown)).replace("%", "%%")
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
            "type": str if flag.text or flag.commas else reader(flag),
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


def _default(one: Field) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def _fields(cls: Any) -> list[Field]:
    return [one for one in fields(cls) if "flag" in one.metadata]
