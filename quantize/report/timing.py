"""Time quantizers: ours on a CPU or a GPU, and those of a reference library on the same rows in the
same process.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...formats.codecs.codec import decode
from ...formats.types import GGMLType, ggml_type
from ..encode import device_encoder, encode
from ..run.parallel import default_threads
from ..search.trellis.tree import CODEBOOKS as TRELLIS_TYPES
from .reference_library import ReferenceLibrary


@dataclass(frozen=True)
class Timing:
    """The measurements of one type. Speeds are in elements per second.

    search, whole: on a GPU the search with everything resident, and one `encode` with copies to and
    from pageable memory; on a CPU both are `encode`. same_bytes: whether the checked bytes of a GPU
    equal the CPU's (None: not checked). error: root mean square error relative to the source,
    weighted by the importances. reference, reference_error: the same for a reference library, None
    where it has no such quantizer.
    """

    type: str
    search: float
    whole: float
    error: float | None = None
    same_bytes: bool | None = None
    reference: float | None = None
    reference_error: float | None = None


def sample_rows(rows: int, n_cols: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return weights like a model's, float32[rows, n_cols] (Gaussian, some rows and elements
    larger), and importances float32[n_cols].
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, n_cols), dtype=np.float32)
    x *= rng.uniform(0.01, 0.05, (rows, 1)).astype(np.float32)
    x.reshape(-1)[rng.integers(0, x.size, max(1, x.size // 1000))] *= np.float32(6)
    return x, rng.gamma(0.5, 2, n_cols).astype(np.float32)


def weighted_error(
    type: str | GGMLType, x: np.ndarray, rows: np.ndarray, importance: np.ndarray | None
) -> float:
    """Return sqrt(sum w (x - y)^2 / sum w x^2), with y decoded as matrix products use it."""
    w = np.ones(x.shape[1]) if importance is None else importance.astype(np.float64)
    wrong = x - decode(type, rows, x.shape[1], as_weights=True).astype(np.float64)
    return float(np.sqrt((w * wrong**2).sum() / (w * x.astype(np.float64) ** 2).sum()))


def measure(
    type: str | GGMLType,
    x: np.ndarray,
    importance: np.ndarray | None,
    device: str = "cpu",
    threads: int = 1,
    repeat: int = 5,
    check_rows: int = 64,
) -> Timing:
    """Time one type on a device: the median of `repeat` runs after one that compiles. On "cpu" as
    `measure_on_cpu`.
    """
    type = ggml_type(type)
    if device == "cpu":
        return measure_on_cpu(type, x, importance, threads=threads, repeat=repeat)
    encoder = device_encoder(type, x.shape[1], importance, device)
    seconds = encoder.time_resident(x, repeat)
    ends = np.concatenate([x[:check_rows], x[-check_rows:]])
    start = time.perf_counter()
    whole = encode(type, x, importance, device)
    whole_seconds = time.perf_counter() - start
    whole = np.concatenate([whole[:check_rows], whole[-check_rows:]])
    same = None  # the trellis types have another algorithm on a GPU
    if type.name not in TRELLIS_TYPES:
        same = np.array_equal(encode(type, ends, importance, threads=default_threads()), whole)
    error = weighted_error(type, ends, whole, importance)
    return Timing(
        type.name, x.size / float(np.median(seconds)), x.size / whole_seconds, error, same
    )


def measure_on_cpu(
    type: str | GGMLType,
    x: np.ndarray,
    importance: np.ndarray | None,
    library: ReferenceLibrary | None = None,
    *,
    threads: int = 1,
    repeat: int = 5,
    seconds: float = 0.2,
) -> Timing:
    """Time one type, and the quantizer of `library` on the same rows: the best of `repeat` runs
    that take turns.

    A run uses as many rows of x as take about `seconds`. With one thread the thread's CPU time is
    measured, which other programs on the core do not change; with more threads the wall-clock time.
    The library always runs on one thread.
    """
    type = ggml_type(type)
    clock = time.thread_time if threads == 1 else time.perf_counter
    few = x[: type.group_rows * max(1, min(16, len(x)) // type.group_rows)]
    if library is not None and not _comparable(library, type, few, importance):
        library = None

    def ours(rows: np.ndarray) -> np.ndarray:
        return encode(type, rows, importance, threads=threads)

    ours(few)
    once = _seconds(ours, few, clock)
    part = x[
        : max(
            len(few),
            min(len(x), int(len(few) * seconds / once)) // type.group_rows * type.group_rows,
        )
    ]
    best, best_theirs = np.inf, np.inf
    for _ in range(repeat):
        best = min(best, _seconds(ours, part, clock))
        if library is not None:
            theirs = functools.partial(library.quantize, type, importance=importance)
            best_theirs = min(best_theirs, _seconds(theirs, part, time.thread_time))
    speed, error = part.size / best, weighted_error(type, few, ours(few), importance)
    if library is None:
        return Timing(type.name, speed, speed, error)
    return Timing(
        type.name,
        speed,
        speed,
        error,
        None,
        part.size / best_theirs,
        weighted_error(type, few, library.quantize(type, few, importance), importance),
    )


def _comparable(
    library: ReferenceLibrary, type: GGMLType, few: np.ndarray, importance: np.ndarray | None
) -> bool:
    """Return whether the library quantizes rows like `few` to the type."""
    if not library.has(type) or (importance is None and library.requires_importance(type)):
        return False
    return library.survives(type, few, importance)


def _seconds(
    work: Callable[[np.ndarray], object], rows: np.ndarray, clock: Callable[[], float]
) -> float:
    start = clock()
    work(rows)
    return max(clock() - start, 1e-9)
