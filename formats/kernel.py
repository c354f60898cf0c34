"""Compiles plain Python functions over one block into native loops over many blocks.

A codec or a search is written once, as a function over the small arrays of one block; what runs
over rows is a driver made here from a template. Fast math stays off and numba does not contract
`a*b + c` on the CPU, so every function rounds exactly where its source says, and the same source
can be compiled for another machine with another driver.

Functions release the GIL: callers get parallelism from threads over row ranges, which cannot change
any result. Compiled code is cached on disk beside the module that holds the function, else in
numba's user cache, else in a private folder under the temporary directory.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .private_folder import private_folder


@functools.cache
def sources_digest() -> str:
    """Digest of every source file that compiled functions come from.

    numba's cache notices a change of the file that holds a function, but not of a helper or a
    constant in another file; with the digest in the name of each cached function, machine code of
    older sources is never used.
    """
    package = Path(__file__).resolve().parent.parent
    files = sorted(
        f
        for folder in ("formats", "formats/codecs", "quantize/search")
        for f in (package / folder).glob("*.py")
    )
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:12]


_fallback_lock = threading.Lock()  # numba's setting is one for the process


def _compiled(function: Callable, **options: Any) -> Callable:
    import numba
    from numba.core import config

    settings: Any = config  # its attributes are made when it is imported

    function.__qualname__ = f"{function.__name__}-{sources_digest()}"
    compile_ = numba.njit(nogil=True, cache=True, error_model="numpy", **options)
    try:
        return compile_(function)
    except RuntimeError:  # neither the folder of the module nor the user's cache can be written
        with _fallback_lock:
            chosen = settings.CACHE_DIR
            settings.CACHE_DIR = str(private_folder() / "numba")
            try:
                return compile_(function)
            finally:
                settings.CACHE_DIR = chosen


def inlined_function(function: Callable) -> Callable:
    """`function` compiled into each caller, however long: a loop with a call in it is not made of
    vector instructions.
    """
    return _compiled(function, forceinline=True)


def device_function(function: Callable) -> Callable:
    """`function` compiled lazily, callable from other compiled functions. One that is compiled
    already stays as it is.
    """
    return function if hasattr(function, "py_func") else _compiled(function)


# The driver's arguments are arrays whose first two axes are (row, block); a per-row argument has
# one axis less.
_ROWS_TEMPLATE = """\
def {name}({parameters}):
    for row in range({first}.shape[0]):
        for index in range({first}.shape[1]):
            one_block({arguments})
"""


def from_source(
    source: str, name: str, file: str, options: dict[str, bool] | None = None, **names: object
) -> Callable:
    """The compiled function `name` that `source` defines, with the global `names`; options:
    numba's, such as forceinline.

    file: the path of the module it belongs to, where numba's cache looks for a source file and
    keeps the code.
    """
    namespace: dict[str, Any] = {"__name__": __name__, "__file__": file} | names
    exec(compile(source, file, "exec"), namespace)
    return _compiled(namespace[name], **(options or {}))


@functools.cache
def over_blocks(
    function: Callable,
    per_row: tuple[str, ...] = (),
    per_column: tuple[str, ...] = (),
    shared: tuple[str, ...] = (),
) -> Callable:
    """A compiled loop that calls `function` for every block of every row.

    Each parameter of `function` becomes an array parameter with axes (row, block) in front; those
    named in `per_row` get (row,) only, those in `per_column` (block,) only; those in `shared` are
    passed through (scratch space). The first parameter sets the number of rows and blocks and must
    be per block.
    """
    import inspect

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
    return from_source(source, name, inspect.getfile(plain), one_block=device_function(function))


def specialize(template: Callable, name: str, **names: object) -> Callable:
    """A compiled copy of `template` in which the global `names` (functions, arrays, numbers) have
    these values.

    One search serves a family of types this way; numba treats globals as compile-time constants, so
    the copies cost nothing at run time. `name` must differ between the copies of a template: it
    keys their cached code.
    """
    import types

    code = template.__code__.replace(co_name=name, co_qualname=name)
    copy = types.FunctionType(
        code, template.__globals__ | names, name, template.__defaults__, template.__closure__
    )
    copy.__module__ = template.__module__
    return _compiled(copy)
