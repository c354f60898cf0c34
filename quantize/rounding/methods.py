"""Which rounder a type has, and why some have none; where rows are rounded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from ...errors import UnsupportedTypeError
from ...formats.types import GGMLType, ggml_type
from ..encode import row_encoder
from .factor import Factor, factored
from .layouts.codes import code_layout
from .layouts.vectors import vector_layout
from .layouts.words import word_layout
from .rounder import Rounder
from .tensor_moments import MatrixMoments
from .ternary_rounder import TWINS, TernaryRounder
from .vector_rounder import VectorRounder
from .word_rounder import WordRounder

_EIGHT_BITS = "as its error is already small beside that of the rest of a model"
# Quantized types that second moments do not guide, and why. Interleaved ones are rounded as their
# plain types.
UNGUIDED = {
    "Q8_0": _EIGHT_BITS,
    "Q8_KV": _EIGHT_BITS,
    "Q8_K_R8": _EIGHT_BITS,
    "Q8_K_R16": _EIGHT_BITS,
    "I2_S": "as nothing is quantized to it",
}

# Encode float32[rows, n] to uint8[rows, row_bytes].
Encoder = Callable[[np.ndarray, np.ndarray], None]


class RowRounder(Protocol):
    """Round rows of a matrix; threads may share it."""

    def __call__(self, x: np.ndarray, out: np.ndarray) -> None:
        """Round float32[rows, n] to uint8[rows, row_bytes]."""
        ...

    def stages(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the bytes of rows after error feedback, and after each refinement."""
        ...


def guides(type: GGMLType) -> bool:
    """Return whether second moments guide the rounding to a type. An interleaved type is rounded as
    its plain type.
    """
    return type.plain.is_quantized and type.plain.name not in UNGUIDED


def rounder_of(type: GGMLType, n_cols: int, factor: Factor, passes: int) -> RowRounder:
    """Return what rounds rows to a plain type, refined `passes` times. Raise UnsupportedTypeError
    for a type that second moments do not guide.
    """
    if code_layout(type.name) is not None:
        return Rounder(type, n_cols, factor, passes)
    if vector_layout(type.name) is not None:
        return VectorRounder(type, n_cols, factor, passes)
    if word_layout(type.name) is not None:
        return WordRounder(type, n_cols, factor, passes)
    if type.name in TWINS:
        twin = Rounder(ggml_type(TWINS[type.name]), n_cols, factor, passes)
        return TernaryRounder(type, n_cols, twin)
    raise UnsupportedTypeError(f"{type.name} cannot be rounded with second moments")


class Rounders(Protocol):
    """Where rows are searched and rounded: the CPU, or GPUs. Threads may share it."""

    @property
    def large_pieces(self) -> bool:
        """Return whether many rows together are rounded much faster than a few."""
        ...

    def rounder(
        self,
        type: GGMLType,
        n_cols: int,
        moments: MatrixMoments,
        shrink: float,
        passes: int,
        name: str,
    ) -> RowRounder:
        """Return what rounds rows to a plain type with second moments that are shrunk by `shrink`,
        and refines them `passes` times. name: the tensor's, for messages.
        """
        ...

    def held_out_error(self, moments: MatrixMoments, rest: np.ndarray) -> float:
        """Return tr(E H E^T) of errors E, float64[rows, n_cols], with the held-out moments H."""
        ...

    def search(
        self, type: GGMLType, n_cols: int, importance: np.ndarray | None
    ) -> Callable[[np.ndarray, np.ndarray], None]:
        """Return the search of a plain type, run(x, out); see `encode.row_encoder`."""
        ...

    def for_many_types(self) -> Rounders:
        """Return rounders for some matrices, each of which is rounded to many types: what depends
        on its moments alone is kept as long as these rounders are.
        """
        ...


class CpuRounders:
    """`Rounders` of the CPU."""

    large_pieces = False

    def rounder(
        self,
        type: GGMLType,
        n_cols: int,
        moments: MatrixMoments,
        shrink: float,
        passes: int,
        name: str,
    ) -> RowRounder:
        return rounder_of(type, n_cols, factored(moments.fit, shrink, name), passes)

    def held_out_error(self, moments: MatrixMoments, rest: np.ndarray) -> float:
        hold = moments.hold
        if hold is None:
            raise ValueError("there is no held-out text")
        return float(((rest @ hold) * rest).sum())

    def search(
        self, type: GGMLType, n_cols: int, importance: np.ndarray | None
    ) -> Callable[[np.ndarray, np.ndarray], None]:
        return row_encoder(type, n_cols, importance)

    def for_many_types(self) -> Rounders:
        return _WithFactors()


class _WithFactors(CpuRounders):
    """Keep the factors of all moments that were used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[int, float], _HeldFactor] = {}

    def rounder(
        self,
        type: GGMLType,
        n_cols: int,
        moments: MatrixMoments,
        shrink: float,
        passes: int,
        name: str,
    ) -> RowRounder:
        with self._lock:
            key = id(moments), shrink
            held = self._held.setdefault(key, _HeldFactor(moments, shrink, name))
        return rounder_of(type, n_cols, held.factor(), passes)


class _HeldFactor:
    """The factor of moments, computed by the first thread that asks for it."""

    def __init__(self, moments: MatrixMoments, shrink: float, name: str):
        self.moments, self.shrink, self.name = moments, shrink, name
        self._lock = threading.Lock()
        self._made: Factor | None = None

    def factor(self) -> Factor:
        with self._lock:
            if self._made is None:
                self._made = factored(self.moments.fit, self.shrink, self.name)
            return self._made


ON_CPU = CpuRounders()
