"""Factor second moments on a GPU, with the bits that the CPU has; see `rounding/cholesky.py`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....cuda_kernels.rounding import FACTORED, SQUARE
from ....errors import ImatrixError
from ..factor import DAMPING, TRIES
from ..tensor_moments import MatrixMoments, SumsOnDevice
from .memory import Memory

log = logging.getLogger(__name__)

_GRID = 4096  # CUDA blocks of a kernel over all elements


@dataclass(frozen=True)
class DeviceFactor:
    """A `Factor` whose matrices are on a device; `weights` float64[n] are on the host."""

    moments: Any
    feedback: Any
    weights: np.ndarray


def moments_there(
    moments: MatrixMoments, hold: bool, number: int | None, memory: Memory, stream: Any
) -> tuple[Any, SumsOnDevice | None, np.ndarray]:
    """Return (float64[n, n] on the device or None, sums or None, diagonal float64[n]): moments, or
    sums that are on GPU `number` already.
    """
    sums = moments.on_device(hold)
    if sums is not None and sums.device == number:
        return None, sums, sums.diagonal
    found = moments.hold if hold else moments.fit
    if found is None:
        raise ValueError("there is no held-out text")
    there = memory.filled("given moments", found, stream)
    return there, None, np.diagonal(found)


def factored_there(
    given: MatrixMoments, shrink: float, name: str, number: int | None, memory: Memory, stream: Any
) -> DeviceFactor:
    """Return the factor of moments, as `rounding.factor.factored` does. number: of the GPU."""
    h, sums, diagonal = moments_there(given, False, number, memory, stream)
    if not np.isfinite(diagonal).all():
        raise ImatrixError("its second moments are not finite", tensor=name)
    n, device = len(diagonal), memory.device
    dead = diagonal <= 0
    mean = float(diagonal[~dead].mean()) if not dead.all() else 1.0
    moments = memory.array("moments", (n, n), np.float32)
    feedback = memory.array("feedback", (n, n), np.float32)
    lower = memory.array("lower", (n, n), np.float64)
    pivots = memory.array("pivots", (n,), np.float64)
    damping, grid = DAMPING, min(_GRID, -(-n * n // 256))
    for _ in range(TRIES):
        damped = np.where(dead, mean, diagonal) + damping * mean
        failed = memory.filled("failed", np.zeros(1, dtype=np.int32), stream)
        device.launch(
            "shrink_moments",
            grid,
            256,
            stream,
            h,
            None if sums is None else sums.sums,
            np.float64(1 if sums is None else sums.count),
            np.float64(1 if sums is None else 1 - sums.share),
            np.float64(0 if sums is None else sums.share),
            None if sums is None else sums.prior,
            memory.filled("damped", damped, stream),
            memory.filled("dead", dead.astype(np.uint8), stream),
            np.float64(1 - shrink),
            moments,
            lower,
            np.int32(n),
        )
        for start in range(0, n, FACTORED):
            width = min(FACTORED, n - start)
            rest = n - start - width
            at = [np.int32(v) for v in (n, start, width)]
            device.launch("factor_block", 1, 32, stream, lower, *at, failed)
            if rest:
                across = -(-rest // SQUARE)
                device.launch("factor_rows", -(-rest // 64), 64, stream, lower, *at)
                squares = across * across
                device.launch(
                    "subtract_products", squares, 256, stream, lower, *at, np.int32(across)
                )
        device.launch("feedback_of_factor", grid, 256, stream, lower, feedback, pivots, np.int32(n))
        here, wrong = np.empty(n), np.empty(1, dtype=np.int32)
        device.download(pivots, here, stream)
        device.download(failed, wrong, stream)
        device.wait(stream)
        if not wrong[0]:
            return DeviceFactor(moments, feedback, here**2)
        damping *= 10
        log.warning("%s: second moments are not definite; damping is now %g", name, damping)
    raise ImatrixError("its second moments cannot be factored", tensor=name)


def held_out_error_there(
    given: MatrixMoments, rest: np.ndarray, number: int | None, memory: Memory, stream: Any
) -> float:
    """Return tr(E H E^T) of errors E, float64[rows, n], with the held-out moments H."""
    h, sums, _ = moments_there(given, True, number, memory, stream)
    rows, n = rest.shape
    padded = np.zeros((-(-rows // 8) * 8, n))
    padded[:rows] = rest
    product = memory.array("held-out products", padded.shape, np.float64)
    across = -(-n // 128)
    memory.device.launch(
        "held_out_products",
        across * (len(padded) // 8),
        128,
        stream,
        h,
        None if sums is None else sums.sums,
        np.float64(1 if sums is None else sums.count),
        memory.filled("held-out errors", padded, stream),
        product,
        *map(np.int32, (n, across)),
    )
    here = np.empty_like(padded)
    memory.device.download(product, here, stream)
    memory.device.wait(stream)
    return float((here[:rows] * rest).sum())
