"""Make compiled functions from templates: loops over blocks, and copies with bound names."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from .functions import (
    CompiledLoop,
    device_function,
    inlined_function,
    internal_function,
    part_function,
)

# The arguments are arrays whose first two axes are (row, block); a per-row argument has one axis
# less.
_ROWS_TEMPLATE = """\
def {name}({parameters}):
    for row in range({first}.shape[0]):
        for index in range({first}.shape[1]):
            one_block({arguments})
"""


# What templates call a name that `specialize` binds.
unbound: Any = None


def from_source(
    source: str, name: str, file: str, names: dict[str, Any], *, inline: bool = False
) -> Any:
    """The function `name` that `source` defines, compiled for compiled callers, with the global
    `names`.

    file: the path of the module it belongs to, where numba looks for a source file and keeps the
    code. inline: compile it into each caller, as `inlined_function` does.
    """
    function = defined(source, name, file, names)
    return inlined_function(function) if inline else device_function(function)


def defined(source: str, name: str, file: str, names: dict[str, Any]) -> Callable:
    """The plain function of `from_source`."""
    namespace: dict[str, Any] = {"__name__": __name__, "__file__": file} | names
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]


@functools.cache
def over_blocks(
    function: Callable,
    per_row: tuple[str, ...] = (),
    per_column: tuple[str, ...] = (),
    shared: tuple[str, ...] = (),
) -> CompiledLoop:
    """A compiled loop that calls `function` for every block of every row.

    Each parameter of `function` becomes an array parameter with axes (row, block) in front; those
    named in `per_row` get (row,) only, those in `per_column` (block,) only; those in `shared` are
    passed through (scratch space). The first parameter sets the number of rows and blocks and must
    be per block.

    A plain function becomes a part of the loop. A `device_function` stays a function of its own: it
    is for those in which the compiler finds more vector instructions that way.
    """
    plain = getattr(function, "py_func", function)
    names = list(inspect.signature(plain).parameters)
    place = (
        dict.fromkeys(shared, "")
        | dict.fromkeys(per_row, "[row]")
        | dict.fromkeys(per_column, "[index]")
    )
    arguments = ", ".join(n + place.get(n, "[row, index]") for n in names)
    name = f"{plain.__name__}_rows"
    source = _ROWS_TEMPLATE.format(
        name=name, parameters=", ".join(names), first=names[0], arguments=arguments
    )
    return CompiledLoop(
        defined(source, name, inspect.getfile(plain), {"one_block": part_function(function)})
    )


def specialize(template: Any, **names: Any) -> Any:
    """A compiled copy of `template` in which the global `names` (functions, arrays, numbers) have
    these values.

    One search serves a family of types this way; numba treats globals as compile-time constants, so
    the copies cost nothing at run time. Types for which all names that `template` uses are equal
    share one copy, which is compiled once.
    """
    return _bound(template, names, internal_function)


def specialized_loop(template: Callable, **names: Any) -> CompiledLoop:
    """Return `specialize` of a template that Python calls."""
    return _bound(template, names, CompiledLoop)


def _bound(template: Any, names: dict[str, Any], compiled: Callable[[Callable], Any]) -> Any:
    code = template.__code__
    scope = template.__globals__ | names
    used = [f"{name} {_constant(scope[name])}" for name in sorted(code.co_names) if name in scope]
    digest = hashlib.sha256("\n".join(used).encode()).hexdigest()[:12]
    if (template, digest) not in _copies:
        name = f"{template.__name__.lstrip('_')}_{digest}"  # it keys the code in numba's cache
        copy = types.FunctionType(
            code.replace(co_name=name, co_qualname=name),
            scope,
            name,
            template.__defaults__,
            template.__closure__,
        )
        copy.__module__ = template.__module__
        _copies[template, digest] = compiled(copy)
    return _copies[template, digest]


_copies: dict[tuple[Any, str], Any] = {}


def _constant(value: Any) -> str:
    """Return what tells a constant of compiled code from another one."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype.str}{value.shape} {value.tobytes().hex()}"
    if hasattr(value, "py_func"):
        return f"{value.__module__}.{value.__qualname__}"
    if value is None or isinstance(value, (bool, int, float, np.generic)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, types.ModuleType):
        return value.__name__
    raise TypeError(f"a {type(value).__name__} cannot be bound to a name of compiled code")
