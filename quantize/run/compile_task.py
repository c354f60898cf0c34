"""The code that has to be compiled before a run, an estimate of the time, and callbacks for
progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...formats import codecs
from ...formats.codecs.codec import decode
from ...formats.kernel import Code, CompiledLoop, rehearse
from ...formats.types import GGMLType, ggml_type
from ..encode import encode

# Rows of floats are converted by compiled code only where there are many.
_FLOAT_ELEMENTS = 1 << 18

_ROUNDED_COLUMNS = 512  # two blocks or more, as errors are fed back from one to the next

# Seconds that compiling a search takes on one core of 2023, by the beginning of the type's name.
_SECONDS = {
    "IQ2_KL": 5, "IQ4_KSS": 5, "IQ1_KT": 3, "IQ2_KT": 4, "IQ3_KT": 3, "IQ4_KT": 3, "IQ2_XX": 3,
    "IQ2_XS": 2, "IQ2_S": 2, "IQ3_XX": 2, "IQ3_S": 2, "IQ1": 2, "IQ2_BN": 1, "IQ4_NL": 1, "IQ": 3,
    "Q2_K": 3, "Q3_K": 4, "Q4_K": 3, "Q5_K": 2, "Q6_K": 3,
}  # fmt: skip
_OTHER_SECONDS = 1.0
_DECODER_SECONDS = 0.2
# The same of rounding with second moments; of the types that share code, one compiles it.
_ROUNDING_SECONDS = {"IQ1_S": 5, "IQ1_M": 5, "IQ2_KL": 5, "IQ4_KSS": 7, "IQ1_KT": 9, "IQ2_KT": 9,
    "IQ3_KT": 9, "IQ4_KT": 9}  # fmt: skip
_OTHER_ROUNDING_SECONDS = 3.0
_DOES = {"search": "the search for", "round": "rounding to", "decode": "the decoder of"}


@dataclass(frozen=True)
class CompileTask:
    """Work on rows of one type: "search" quantizes them, "decode" decodes them, "round" rounds them
    with second moments.

    weighted: with importances. as_weights: see `formats.codecs.codec.decode`.
    """

    kind: str
    type: str
    weighted: bool = False
    as_weights: bool = False

    def __str__(self) -> str:
        return f"{_DOES[self.kind]} {self.type}"

    @property
    def seconds(self) -> float:
        """Return about how long compiling takes."""
        if self.kind == "decode":
            return _DECODER_SECONDS
        if self.kind == "round":
            return float(_ROUNDING_SECONDS.get(self.type, _OTHER_ROUNDING_SECONDS))
        found = (s for name, s in _SECONDS.items() if self.type.startswith(name))
        return float(next(found, _OTHER_SECONDS))

    def work(self) -> None:
        """Do the work on zeros."""
        type = ggml_type(self.type)
        n_cols, rows = type.row_multiple, type.group_rows
        if self.kind == "search":
            if (ggml_type(type.base) if type.base else type).is_float:
                rows *= -(-_FLOAT_ELEMENTS // (n_cols * rows))
            x = np.zeros((rows, n_cols), dtype=np.float32)
            encode(type, x, np.ones(n_cols, dtype=np.float32) if self.weighted else None)
        elif self.kind == "round":
            _round(type, n_cols)
        else:
            data = np.zeros((rows, type.row_bytes(n_cols)), dtype=np.uint8)
            decode(type, data, n_cols, as_weights=self.as_weights)

    def missing(self) -> list[Code]:
        """Return the code that is not compiled yet. For "round" decoders are run, and compiled if
        they are not: they tell where the codes of a type are, which is kept.
        """
        runs = is_decoder if self.kind == "round" else None
        return [code for code in rehearse(self.work, runs) if not code.is_compiled]


def is_decoder(loop: CompiledLoop) -> bool:
    """Return whether a loop decodes rows."""
    return Path(loop.file).parent == Path(codecs.__file__).parent


def _round(type: GGMLType, n_cols: int) -> None:
    """Round a row of zeros with second moments, refined once."""
    from ..rounding.factor import factored
    from ..rounding.methods import rounder_of

    n_cols = max(n_cols, _ROUNDED_COLUMNS)
    x = np.zeros((1, n_cols), dtype=np.float32)
    out = np.empty((1, type.row_bytes(n_cols)), dtype=np.uint8)
    with np.errstate(all="ignore"):  # when code is listed, scales are what was in memory
        rounder_of(type, n_cols, factored(np.eye(n_cols), 0.5), 1)(x, out)


class CompileProgress:
    """Callbacks of `compilation.compile_ahead`. This base class ignores them all."""

    def compiling(self, tasks: Sequence[CompileTask], seconds: float) -> None:
        """Called before compiling, which takes about `seconds`; not if all is compiled."""

    def compile_waiting(self) -> None:
        """Called twice a second while code is compiled."""

    def compiled(self, task: CompileTask) -> None:
        """Called for every task that is compiled."""

    def compile_end(self) -> None:
        """Called when all tasks are compiled."""
