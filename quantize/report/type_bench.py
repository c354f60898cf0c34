"""Measure the speed and error of quantizing to each type, on sample rows like a model's weights.

On a GPU the weights are resident and only the search is timed, by the device's own clock; on the
CPU the whole call is. The first run, which compiles, is not counted. The bytes of a GPU are
compared with the CPU's on the first and last rows.
"""

# ruff: noqa: RUF009  `option` makes dataclass fields

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import MalformedFileError, NotFoundError, UsageError
from ...formats.options import Options, option
from ...formats.types import TYPES, GGMLType, ggml_type
from ..cuda.devices import find_devices
from ..run.compilation import compile_ahead, tasks_of_types
from ..run.compile_task import CompileProgress
from ..searches import encodable_types


@dataclass(frozen=True)
class TypeBenchOptions(Options):
    """Options for timing types: what is timed, and what it is compared with."""

    device: str = option(
        "auto",
        "--device",
        metavar="D",
        help="auto (the first GPU, or the CPU if there is none), cpu, cuda or cuda:N",
    )
    rows: int = option(4096, "--rows", least=1, metavar="N", help="rows; on the CPU at most")
    cols: int = option(14336, "--cols", least=1, metavar="N", help="columns")
    threads: int = option(1, "--threads", least=1, metavar="N", help="threads, on the CPU")
    repeat: int = option(
        5,
        "--repeat",
        least=1,
        metavar="N",
        help="timed runs: on a GPU the median counts, on the CPU the best",
    )
    seconds: float = option(
        0.2, "--seconds", metavar="S", help="on the CPU, about how long a run takes"
    )
    check_rows: int = option(
        64,
        "--check-rows",
        least=1,
        metavar="N",
        help="rows at either end whose bytes are compared with the CPU's",
    )
    no_importance: bool = option(False, "--no-importance", help="weigh all columns alike")
    reference_speeds: str | os.PathLike | None = option(
        None,
        "--reference-speeds",
        metavar="FILE",
        help='JSON with million elements per second: {"melem_per_s": {TYPE: number}}',
    )
    reference_library: str | os.PathLike | None = option(
        None,
        "--reference-library",
        metavar="PATH",
        help="libggml*.so of ik_llama.cpp or llama.cpp, whose quantizers take turns with ours on"
        " the same rows (CPU)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.seconds > 0:
            raise UsageError(f"--seconds is {self.seconds}, expected a number above 0")
        if self.reference_library and self.device not in ("cpu", "auto"):
            raise UsageError("--reference-library runs on the CPU and needs --device cpu")

    def chosen_device(self) -> str:
        """Return the device that `auto` means here."""
        if self.device != "auto":
            return self.device
        return "cuda" if not self.reference_library and find_devices("auto") else "cpu"


def measured_rows(
    types: Sequence[str] | None, o: TypeBenchOptions, progress: CompileProgress | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row per type as it is measured, with those keys that the options ask for; speeds in
    million elements per second, None where there is nothing to compare with.
    """
    from .reference_library import ReferenceLibrary
    from .timing import measure, measure_on_cpu, sample_rows

    table = read_speeds(o.reference_speeds) if o.reference_speeds else None
    library = ReferenceLibrary(o.reference_library) if o.reference_library else None
    x, importance = sample_rows(o.rows, o.cols)
    importance = None if o.no_importance else importance
    chosen, device = chosen_types(types), o.chosen_device()
    if device == "cpu":
        tasks = tasks_of_types([type.name for type in chosen], (importance is not None,))
        compile_ahead(tasks, progress)
    for type in chosen:
        if device == "cpu":
            timing = measure_on_cpu(
                type,
                x,
                importance,
                library,
                threads=o.threads,
                repeat=o.repeat,
                seconds=o.seconds,
            )
            row: dict[str, Any] = {"type": timing.type, "speed": timing.search / 1e6}
        else:
            timing = measure(type, x, importance, device, o.threads, o.repeat, o.check_rows)
            row = {
                "type": timing.type,
                "speed": timing.search / 1e6,
                "whole": timing.whole / 1e6,
                "same_bytes": timing.same_bytes,
            }
        if table is not None:
            known = table.get(timing.type)
            row |= {"table": known, "table_ratio": row["speed"] / known if known else None}
        if library is not None:
            known = timing.reference / 1e6 if timing.reference else None
            row |= {"reference": known, "ratio": row["speed"] / known if known else None}
        row["error"] = timing.error
        if library is not None:
            known = timing.reference_error
            row |= {
                "reference_error": known,
                "error_ratio": timing.error / known if known and timing.error is not None else None,
            }
        yield row


def chosen_types(asked: Sequence[str] | None) -> list[GGMLType]:
    """Return the types that are named; by default all with a search, and for "all" those too that
    interleave the rows of another, and F16 and BF16.
    """
    if asked and list(asked) != ["all"]:
        return [ggml_type(name) for name in asked]
    types = [ggml_type(name) for name in encodable_types() if name in TYPES and name != "F32"]
    return types if asked else [type for type in types if type.is_quantized and not type.base]


def read_speeds(path: str | os.PathLike) -> dict[str, float]:
    """Return million elements per second by type name. Raise NotFoundError or
    MalformedFileError.
    """
    try:
        with open(path, encoding="utf-8") as file:
            speeds = json.load(file)["melem_per_s"]
        return {name: float(speed) for name, speed in speeds.items()}
    except OSError as error:
        raise NotFoundError(error.strerror or "cannot be read", file=path) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise MalformedFileError(
            'not a table of speeds: {"melem_per_s": {TYPE: number}}', file=path
        ) from None
