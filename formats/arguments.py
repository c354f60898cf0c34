"""Values that callers of the Python interface pass: of the right kind, or a UsageError that names
the argument.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from numbers import Real
from typing import Any, cast

from ..errors import UsageError, printable


def wrong(name: str, value: object, expected: str) -> UsageError:
    """The error for an argument that is something else."""
    return UsageError(f"{name} is {printable(repr(value), 60)}, expected {expected}")


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """`value` as an int; also numpy's integers. Raise UsageError that names the argument for
    anything else.
    """
    expected = "a whole number" + ("" if least is None else f" from {least} on")
    try:
        number = operator.index(value)
    except TypeError:
        raise wrong(name, value, expected) from None
    if isinstance(value, bool) or (least is not None and number < least):
        raise wrong(name, value, expected)
    return number


def number(name: str, value: Any) -> float | int:
    """Return `value`, which is a number, also one of numpy's. Raise UsageError that names the
    argument for anything else.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong(name, value, "a number")
    return cast(float, value)


def whole_numbers(name: str, values: object) -> list[int]:
    """Return the whole numbers from 0 on of a list, tuple, range, array or the like. Raise
    UsageError that names the argument for anything else.
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise wrong(name, values, "whole numbers")
    return [whole_number(f"{name}[{i}]", value, 0) for i, value in enumerate(values)]


def instance(name: str, value: Any, cls: type | tuple[type, ...], expected: str = "") -> Any:
    """`value`, which is a `cls`. Raise UsageError that names the argument for anything else."""
    if not isinstance(value, cls):
        if not expected:
            expected = " or ".join(
                f"a {one.__name__}" for one in (cls if isinstance(cls, tuple) else (cls,))
            )
        raise wrong(name, value, expected)
    return value


def path(name: str, value: Any) -> Any:
    """Return `value` if it is a string or os.PathLike. Raise UsageError that names the argument
    otherwise.
    """
    return instance(name, value, (str, os.PathLike), "a path")


def callback(name: str, value: Any) -> Any:
    """A function or None. Raise UsageError that names the argument for anything else."""
    if value is not None and not callable(value):
        raise wrong(name, value, "a function")
    return value
