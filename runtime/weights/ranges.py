"""Names for what runs: while a model is profiled, its modules, and the executors and operations of
the fast path, run within named ranges, which they open themselves. At other times nothing is
opened.

A range is a torch.profiler record_function whose name is `iqforge|layer|kind|bytes`: the layer as
in tensor names (`blk.3`; "" for that of the range around it), what it is, and the bytes of weights
that it reads, 0 where that is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from ...formats.tensor_names import TensorName

PREFIX = "iqforge|"


class RangeName(NamedTuple):
    """The three parts of a range's name."""

    layer: str
    kind: str
    n_bytes: float = 0

    def __str__(self) -> str:
        return f"{PREFIX}{self.layer}|{self.kind}|{self.n_bytes:.0f}"

    @classmethod
    def of_matrix(cls, name: str, role: str, n_bytes: float = 0) -> RangeName:
        """The range of a product with the tensor `name`; outside the layers its role is both."""
        parsed = TensorName.parse(name)
        if parsed.layer is None:
            return cls(role, role, n_bytes)
        return cls(parsed.prefix, parsed.stem, n_bytes)


class Recording:
    """Whether ranges are opened, in all threads."""

    def __init__(self) -> None:
        self._users = 0

    def __bool__(self) -> bool:
        return self._users > 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Open ranges while the context is open."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1


recording = Recording()
_NOTHING = nullcontext()


def opened(layer: str, kind: str, n_bytes: float = 0) -> AbstractContextManager[Any]:
    """Return a context within the range of this name; one that does nothing unless `recording`."""
    if not recording:
        return _NOTHING
    return torch.profiler.record_function(str(RangeName(layer, kind, n_bytes)))


class _Ranged(Protocol):
    @property
    def range(self) -> RangeName: ...


_Self = TypeVar("_Self", bound=_Ranged)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def ranged(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """Run the decorated method within the range `self.range`."""

    @wraps(method)
    def run(self: _Self, *args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        if not recording:
            return method(self, *args, **options)
        with opened(*self.range):
            return method(self, *args, **options)

    return run
