"""Compiles plain Python functions over one block into native loops over many blocks.

A codec or a search is written once, as a function over the small arrays of one block; what runs over rows is a driver made
here from a template. Fast math stays off and numba does not contract `a*b + c` on the CPU, so every function rounds
exactly where its source says, and the same source can be compiled for another machine with another driver.

Functions release the GIL: callers get parallelism from threads over row ranges, which cannot change any result.
Compiled code is cached on disk beside the module that holds the function (or in numba's user cache).
"""

from __future__ import annotations

import functools
from collections.abc import Callable


def device_function(function: Callable) -> Callable:
    """`function` compiled lazily, callable from other compiled functions."""
    import numba

    return numba.njit(nogil=True, cache=True, error_model="numpy")(function)


# The driver's arguments are arrays whose first two axes are (row, block); a per-row argument has one axis less.
_ROWS_TEMPLATE = """\
def {name}({parameters}):
    for row in range({first}.shape[0]):
        for index in range({first}.shape[1]):
            one_block({arguments})
"""


@functools.cache
def over_blocks(function: Callable, per_row: tuple[str, ...] = (), shared: tuple[str, ...] = ()) -> Callable:
    """A compiled loop that calls `function` for every block of every row.

    Each parameter of `function` becomes an array parameter with axes (row, block) in front; those named in `per_row`
    get (row,) only; those named in `shared` are passed through (scratch space, scalars). The first parameter sets the
    number of rows and blocks and must be per block.
    """
    import inspect

    import numba

    names = list(inspect.signature(function).parameters)
    arguments = ", ".join(n if n in shared else f"{n}[row]" if n in per_row else f"{n}[row, index]" for n in names)
    name = f"{function.__name__}_rows"
    source = _ROWS_TEMPLATE.format(name=name, parameters=", ".join(names), first=names[0], arguments=arguments)
    # Compiling under the module's own file name lets numba's cache find a source file to check for changes.
    namespace = {"__name__": function.__module__, "one_block": device_function(function)}
    exec(compile(source, inspect.getfile(function), "exec"), namespace)
    return numba.njit(nogil=True, cache=True, error_model="numpy")(namespace[name])
