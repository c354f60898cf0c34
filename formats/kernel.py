"""Compile plain Python functions over one block into native loops over many blocks.

A codec or a search is written once, as a function over the small arrays of one block. The loop over
rows is made here from a template. Fast math is off and numba does not contract `a*b + c` on the
CPU, so every function rounds exactly where its source says, and the same source can be compiled for
a GPU with another loop.

Compiled functions release the GIL: callers get parallelism from threads over row ranges, which
cannot change any result. Code is cached on disk beside the module that holds the function, else in
numba's user cache, else in a private folder under the temporary directory. `rehearse` says which
code a call needs and whether it is cached.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .private_folder import can_be_written, private_folder


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
        for folder in (
            "formats",
            "formats/codecs",
            "quantize/search",
            "quantize/search/trellis",
            "quantize/rounding",
            "quantize/rounding/kernels",
        )
        for f in (package / folder).glob("*.py")
    )
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:12]


_fallback_lock = threading.Lock()  # numba's setting is one for the process


def _compiled(function: Callable, **options: Any) -> Any:
    import numba

    function.__qualname__ = f"{function.__name__}-{sources_digest()}"
    return _cached(numba.njit(nogil=True, cache=True, error_model="numpy", **options), function)


def compiled_callback(
    function: Callable, signature: Any, on_missing: Callable[[], object] | None = None
) -> Any:
    """`function` compiled for calls by its `address`, with C's rules. `__qualname__` keys its code
    in the cache. on_missing: is called before code is compiled that is not in the cache.
    """
    from numba.core import ccallback, sigutils

    base: Any = ccallback.CFunc

    class Callback(base):
        def _compile_uncached(self):
            if on_missing is not None:
                on_missing()
            return super()._compile_uncached()

    def compile_(function: Callable) -> Any:
        found = Callback(
            function,
            sigutils.normalize_signature(signature),
            locals={},
            options={"error_model": "numpy"},
        )
        found.enable_caching()
        found.compile()
        return found

    return _cached(compile_, function)


def _cached(compile_: Callable[[Callable], Any], function: Callable) -> Any:
    import numba.core.config

    settings: Any = numba.core.config
    if not _without_any_folder(function, settings.CACHE_DIR):
        try:
            return compile_(function)
        except RuntimeError:  # neither the module's folder nor the user's cache can be written
            pass
    with _fallback_lock:
        chosen = settings.CACHE_DIR
        settings.CACHE_DIR = str(private_folder() / "numba")
        try:
            return compile_(function)
        finally:
            settings.CACHE_DIR = chosen


def _without_any_folder(function: Callable, chosen: str) -> bool:
    """Return whether the user's cache is the place for code, but there is no home folder: numba
    would create one named "~" where the command runs.
    """
    if chosen or os.environ.get("XDG_CACHE_HOME") or os.path.isabs(os.path.expanduser("~")):
        return False
    return not can_be_written(Path(function.__code__.co_filename).parent / "__pycache__")


def _internal(function: Callable, **options: bool) -> Any:
    """`function` compiled for callers that are compiled themselves.

    It gets no entry points for Python and C, which numba would compile in addition and optimize
    again in every caller. A call from Python is a TypeError.
    """
    dispatcher = _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)

    def add_overload(result: Any) -> None:
        dispatcher.overloads[tuple(result.signature.args)] = result  # not where Python looks

    def refuse(*arguments: object, **keywords: object) -> None:
        raise TypeError(f"{function.__name__} can only be called by compiled functions")

    dispatcher.add_overload = add_overload
    dispatcher._compile_for_args = refuse
    return dispatcher


def inlined_function(function: Callable) -> Any:
    """`function` compiled into each caller, whatever its length: a loop that contains a call is not
    turned into vector instructions.
    """
    return _internal(function, forceinline=True)


def device_function(function: Callable) -> Any:
    """`function` compiled when first used, callable from other compiled functions only. One that is
    already compiled is returned as it is.
    """
    return function if hasattr(function, "py_func") else _internal(function)


class CompiledLoop:
    """A function that Python calls, compiled when it is first called with some types. The compiler
    is imported then too.
    """

    _lock = threading.Lock()

    def __init__(self, function: Callable):
        self._function = function

    @property
    def file(self) -> str:
        """The path of the module that the function belongs to."""
        return self._function.__code__.co_filename

    @functools.cached_property
    def _dispatcher(self) -> Any:
        with self._lock:
            found = self.__dict__.get("_dispatcher") or _compiled(self._function)
            self.__dict__["_dispatcher"] = found  # before another thread has the lock
            return found

    def __call__(self, *arguments: Any) -> None:
        if _rehearsal.codes is not None and not _rehearsal.runs(self):
            _rehearsal.codes.append(Code(self, self.types_of(arguments)))
        else:
            self._dispatcher(*arguments)

    def types_of(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The numba types that code is compiled for."""
        return tuple(map(self._dispatcher.typeof_pyval, arguments))

    def is_compiled(self, types: tuple[Any, ...]) -> bool:
        """Return whether code for these types is loaded, or is in the cache on disk."""
        if types in self._dispatcher.overloads:
            return True
        cache = self._dispatcher._cache
        key = cache._index_key(types, self._dispatcher.targetctx.codegen())
        files = cache._cache_file
        name = files._load_index().get(key)  # empty for other sources or another numba
        return name is not None and Path(files._data_path(name)).exists()

    def compile(self, types: tuple[Any, ...]) -> None:
        """Load the code for these types, or compile it and put it into the cache."""
        self._dispatcher.compile(types)


@dataclass(frozen=True)
class Code:
    """Machine code that a call needs: a loop for arguments of some types."""

    loop: CompiledLoop
    types: tuple[Any, ...]

    @property
    def is_compiled(self) -> bool:
        return self.loop.is_compiled(self.types)

    def compile(self) -> None:
        self.loop.compile(self.types)


class _Rehearsal(threading.local):
    codes: list[Code] | None = None
    runs: Callable[[CompiledLoop], bool] = staticmethod(lambda loop: False)


_rehearsal = _Rehearsal()


def rehearse(
    work: Callable[[], object], runs: Callable[[CompiledLoop], bool] | None = None
) -> list[Code]:
    """Call `work` with every compiled loop left out, on this thread. Return the code that it would
    have run; nothing is compiled. Its results are undefined.

    runs: loops that are not left out, as what they return decides what is run, or is kept.
    """
    before = _rehearsal.codes, _rehearsal.runs
    _rehearsal.codes, _rehearsal.runs = [], runs or (lambda loop: False)
    try:
        work()
        return list(dict.fromkeys(_rehearsal.codes))
    finally:
        _rehearsal.codes, _rehearsal.runs = before


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
    function = _defined(source, name, file, names)
    return inlined_function(function) if inline else device_function(function)


def _defined(source: str, name: str, file: str, names: dict[str, Any]) -> Callable:
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
        _defined(source, name, inspect.getfile(plain), {"one_block": device_function(function)})
    )


def specialize(template: Any, **names: Any) -> Any:
    """A compiled copy of `template` in which the global `names` (functions, arrays, numbers) have
    these values.

    One search serves a family of types this way; numba treats globals as compile-time constants, so
    the copies cost nothing at run time. Types for which all names that `template` uses are equal
    share one copy, which is compiled once.
    """
    return _bound(template, names, _internal)


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
