"""The code that has to be compiled before a run, an estimate of the time, and callbacks for
progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...formats.codecs.codec import decode
from ...formats.kernel import Code, rehearse
from ...formats.types import ggml_type
from ..encode import encode

# Rows of floats are converted by compiled code only where there are many.
_FLOAT_ELEMENTS = 1 << 18

# Seconds that compiling a search takes on one core of 2023, by the beginning of the type's name.
_SECONDS = {
    "IQ2_KL": 7, "IQ4_KSS": 6, "IQ1_KT": 4, "IQ2_KT": 4, "IQ3_KT": 4, "IQ4_KT": 4, "IQ2_XX": 4,
    "IQ2_XS": 3, "IQ2_S": 3, "IQ3_XX": 3, "IQ3_S": 3, "IQ1_S": 3, "IQ1_M": 3, "IQ1_BN": 2,
    "IQ2_BN": 1, "IQ4_NL": 2, "IQ": 5, "Q2_K": 4, "Q4_K": 4, "Q5_K": 4, "Q3_K": 5, "Q6_K": 5,
}  # fmt: skip
_OTHER_SECONDS = 2.0
_DECODER_SECONDS = 0.5


@dataclass(frozen=True)
class CompileTask:
    """Work on rows of one type: "search" quantizes them, "decode" decodes them.

    weighted: with importances. as_weights: see `formats.codecs.codec.decode`. Rows that are decoded
    as weights were just made; other rows are read-only parts of a file.
    """

    kind: str
    type: str
    weighted: bool = False
    as_weights: bool = False

    def __str__(self) -> str:
        return f"the {'search for' if self.kind == 'search' else 'decoder of'} {self.type}"

    @property
    def seconds(self) -> float:
        """Return about how long compiling takes."""
        if self.kind != "search":
            return _DECODER_SECONDS
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
        else:
            data = np.zeros((rows, type.row_bytes(n_cols)), dtype=np.uint8)
            data.flags.writeable = self.as_weights
            decode(type, data, n_cols, as_weights=self.as_weights)

    def missing(self) -> list[Code]:
        """Return the code that is not compiled yet."""
        return [code for code in rehearse(self.work) if not code.is_compiled]


class CompileProgress:
    """Callbacks of `compilation.compile_ahead`. This base class ignores them all."""

    def compiling(self, tasks: Sequence[CompileTask], seconds: float) -> None:
        """Called before compiling, which takes about `seconds`; not if all is compiled."""

    def compile_waiting(self) -> None:
        """Called twice a second while code is compiled."""

    def compiled(self, task: CompileTask) -> None: ...

    def compile_end(self) -> None: ...
