"""Compile functions for Python, and for other compiled functions."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .cache import cached, is_cached, share_between_processes, sources_digest


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Keep the garbage collector from running in the block, unless another thread turns it on. A
    compiler makes millions of objects that stay until it is done; each run would visit them again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _compiled(function: Callable, **options: Any) -> Any:
    import numba

    def compile_(function: Callable) -> Any:
        found: Any = numba.njit(nogil=True, cache=True, error_model="numpy", **options)(function)
        if found is not function:  # as it is with NUMBA_DISABLE_JIT
            share_between_processes(found._cache)
            found.compile = without_collection()(found.compile)
            found.get_call_template = _of_any_integer(found.get_call_template)
        return found

    function.__qualname__ = f"{function.__name__}-{sources_digest()}"
    return cached(compile_, function)


def _of_any_integer(call_template: Callable) -> Callable:
    """Return numba's `call_template`, which types a call, for constant integers as for any others:
    numba would compile the called function again for each constant, although it becomes part of its
    callers, where the constant is known.
    """
    from numba.core.types import unliteral

    return lambda arguments, keywords: call_template(
        tuple(map(unliteral, arguments)),
        {name: unliteral(kind) for name, kind in keywords.items()},
    )


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
        share_between_processes(found._cache)
        with without_collection():
            found.compile()
        return found

    return cached(compile_, function)


def internal_function(function: Callable, **options: bool) -> Any:
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


def part_function(function: Callable) -> Any:
    """`function` as a part of the source of its caller, so that one function is compiled instead of
    two. It is for those with one caller. One that is already compiled is returned as it is.
    """
    import numba

    return function if hasattr(function, "py_func") else numba.njit(inline="always")(function)


def inlined_function(function: Callable) -> Any:
    """`function` compiled into each caller, whatever its length: a loop that contains a call is not
    turned into vector instructions.
    """
    return internal_function(function, forceinline=True)


def device_function(function: Callable) -> Any:
    """`function` compiled when first used, callable from other compiled functions only. One that is
    already compiled is returned as it is.
    """
    return function if hasattr(function, "py_func") else internal_function(function)


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
        return is_cached(self._dispatcher._cache, types, self._dispatcher.targetctx)

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
        """Return whether the loop is compiled for these types of arguments."""
        return self.loop.is_compiled(self.types)

    def compile(self) -> None:
        """Compile the loop for these types of arguments."""
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
