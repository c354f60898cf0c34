"""Figures that `iqforge demo` measured, and the table that it prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..formats.types import ggml_type
from ..proof.stages import Stage

if TYPE_CHECKING:
    from .text import Texts


@dataclass(frozen=True)
class Measurement:
    """The figures of one type.

    A pair is a value and its standard error. `same_top` is a share. `bits_per_weight` covers all
    tensors.
    """

    type: str
    bits_per_weight: float
    file_bytes: int
    perplexity: tuple[float, float]
    mean_kld: tuple[float, float]
    kld_99: float
    same_top: tuple[float, float]
    quantize_seconds: float
    measure_seconds: float

    @property
    def type_bits(self) -> float:
        """Bits per weight of the type."""
        return ggml_type(self.type).bits_per_weight

    @property
    def file_mb(self) -> float:
        """Size of the file in MB (10^6 bytes)."""
        return self.file_bytes / 1e6


@dataclass(frozen=True)
class Baseline:
    """The figures of the unquantized model, which the types are compared with."""

    type: str
    bits_per_weight: float
    file_bytes: int
    perplexity: tuple[float, float]
    measure_seconds: float


@dataclass(frozen=True)
class Demo:
    """Everything the report shows. `split` says what splitting and merging preserved."""

    baseline: Baseline
    measurements: Sequence[Measurement]
    stages: Sequence[Stage]
    texts: Texts
    n_parameters: int
    n_ctx: int
    calibration_chunks: int
    measuring_chunks: int
    embedding_type: str
    split: str
    command: str

    @property
    def seconds(self) -> float:
        """Seconds of all stages."""
        return sum(stage.seconds for stage in self.stages)


def text_table(demo: Demo) -> str:
    """Return the table as text: one line per type, the baseline first."""
    base = demo.baseline
    lines = [
        (
            f"{'type':<10} {'bpw':>6} {'file MB':>8} {'PPL':>18} {'mean KLD':>21} {'99% KLD':>9}"
            f" {'same top':>9}"
        ),
        (
            f"{base.type:<10} {base.bits_per_weight:6.2f} {base.file_bytes / 1e6:8.2f}"
            f" {_pair(base.perplexity, 3):>18} {'-':>21} {'-':>9} {'-':>9}"
        ),
    ]
    lines += [
        f"{m.type:<10} {m.bits_per_weight:6.2f} {m.file_mb:8.2f} {_pair(m.perplexity, 3):>18}"
        f" {_pair(m.mean_kld, 6):>21} {m.kld_99:9.5f} {100 * m.same_top[0]:7.2f} %"
        for m in demo.measurements
    ]
    return "\n".join(lines)


def _pair(pair: tuple[float, float], digits: int) -> str:
    return f"{pair[0]:.{digits}f} ± {pair[1]:.{digits}f}"
