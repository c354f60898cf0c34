"""Factor second moments on a GPU, several matrices at a time, with the bits that the CPU has; see
`rounding/cholesky.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....cuda_kernels.rounding import FACTORED, SQUARE
from ....errors import ImatrixError
from ..factor import DAMPING, TRIES
from ..tensor_moments import MatrixMoments, SumsOnDevice
from .memory import Memory, RoundingDevice

log = logging.getLogger(__name__)

_GRID = 4096  # CUDA blocks of a kernel over all elements


@dataclass(frozen=True)
class DeviceFactor:
    """The `Factor`s of several matrices: float32[matrices, n, n] on a device; `weights`
    float64[matrices, n] are on the host.
    """

    moments: Any
    feedback: Any
    weights: np.ndarray


@dataclass(frozen=True)
class Wanted:
    """Moments to factor, shrunk by `shrink`. name: of the tensor, for messages."""

    moments: MatrixMoments
    shrink: float
    name: str


@dataclass(frozen=True)
class _There:
    """Moments float64[n, n] on a device, or sums that are on it already; the diagonal is not."""

    given: Any
    sums: SumsOnDevice | None
    diagonal: np.ndarray


def _moments_there(
    moments: MatrixMoments, hold: bool, number: int | None, memory: Memory, stream: Any, at: int = 0
) -> _There:
    """Return moments that are uploaded, unless their sums are on GPU `number` already."""
    sums = moments.on_device(hold)
    if sums is not None and sums.device == number:
        return _There(None, sums, sums.diagonal)
    found = moments.hold if hold else moments.fit
    if found is None:
        raise ValueError("there is no held-out text")
    there = memory.filled(f"given moments {at}", found, stream)
    return _There(there, None, np.diagonal(found))


def factored_there(
    wanted: Sequence[Wanted], number: int | None, memory: Memory, stream: Any
) -> DeviceFactor:
    """Return the factors of moments of one size, as `rounding.factor.factored` makes them. number:
    of the GPU. Raise ImatrixError, with the tensor, for moments that are not finite or cannot be
    factored.
    """
    there = [
        _moments_there(one.moments, False, number, memory, stream, at)
        for at, one in enumerate(wanted)
    ]
    for one, given in zip(wanted, there, strict=True):
        if not np.isfinite(given.diagonal).all():
            raise ImatrixError("its second moments are not finite", tensor=one.name)
    device, count, diagonals = memory.device, len(wanted), np.stack([g.diagonal for g in there])
    n = diagonals.shape[1]
    dead = diagonals <= 0
    means = np.array([_mean(d[~gone]) for d, gone in zip(diagonals, dead, strict=True)])
    addresses = [
        [0 if array is None else device.address(array) for array in arrays]
        for arrays in (
            [given.given for given in there],
            [given.sums and given.sums.sums for given in there],
            [given.sums and given.sums.prior for given in there],
        )
    ]
    counts = [1.0 if given.sums is None else given.sums.count for given in there]
    shares = np.array([0.0 if given.sums is None else given.sums.share for given in there])
    numbers = np.array([counts, 1 - shares, shares, [1 - one.shrink for one in wanted]])
    at = memory.filled("addresses", np.array(addresses, dtype=np.int64), stream)
    numbers = memory.filled("numbers", numbers, stream)
    gone = memory.filled("dead", dead.astype(np.uint8), stream)
    moments = memory.array("moments", (count, n, n), np.float32)
    feedback = memory.array("feedback", (count, n, n), np.float32)
    lower = memory.array("lower", (count, n, n), np.float64)
    pivots = memory.array("pivots", (count, n), np.float64)
    damping, grid = np.full(count, DAMPING), min(_GRID, -(-n * n // 256))
    for _ in range(TRIES):
        damped = np.where(dead, means[:, None], diagonals) + (damping * means)[:, None]
        device.launch(
            "shrink_moments",
            count * grid,
            256,
            stream,
            at,
            numbers,
            memory.filled("damped", damped, stream),
            gone,
            moments,
            lower,
            *map(np.int32, (n, count, grid)),
        )
        failed = memory.filled("failed", np.zeros(count, dtype=np.int32), stream)
        _launch_factoring(lower, failed, device, stream)
        device.launch(
            "feedback_of_factor",
            count * grid,
            256,
            stream,
            lower,
            feedback,
            pivots,
            *map(np.int32, (n, grid)),
        )
        here, wrong = np.empty((count, n)), np.empty(count, dtype=np.int32)
        device.download(pivots, here, stream)
        device.download(failed, wrong, stream)
        device.wait(stream)
        if not wrong.any():
            return DeviceFactor(moments, feedback, here**2)
        for index in np.flatnonzero(wrong).tolist():
            damping[index] *= 10
            log.warning(
                "%s: second moments are not definite; damping is now %g",
                wanted[index].name,
                damping[index],
            )
    name = wanted[int(np.argmax(wrong))].name
    raise ImatrixError("its second moments cannot be factored", tensor=name)


def _mean(alive: np.ndarray) -> float:
    """Return the mean of the columns that are not always zero."""
    return float(alive.mean()) if alive.size else 1.0


def ordered_there(
    factor: DeviceFactor, order: np.ndarray, name: str, memory: Memory, stream: Any
) -> DeviceFactor:
    """Return factors for columns in another order, int64[n], as `rounding.factor.Factor.ordered`
    makes them. name: of a tensor, for messages. Raise ImatrixError, with the tensor, for moments
    that cannot be factored.
    """
    device, (count, n) = memory.device, factor.weights.shape
    moments = memory.array("ordered moments", (count, n, n), np.float32)
    lower = memory.array("lower", (count, n, n), np.float64)
    grid = min(_GRID, -(-n * n // 256))
    there = memory.filled("order", order.astype(np.int32), stream)
    at = np.int32(n), np.int32(grid)
    arrays = factor.moments, there, moments, lower
    device.launch("order_moments", count * grid, 256, stream, *arrays, *at)
    failed = memory.filled("failed", np.zeros(count, dtype=np.int32), stream)
    _launch_factoring(lower, failed, device, stream)
    pivots = memory.array("pivots", (count, n), np.float64)
    arrays = lower, factor.feedback, pivots
    device.launch("feedback_of_factor", count * grid, 256, stream, *arrays, *at)
    here, wrong = np.empty((count, n)), np.empty(count, dtype=np.int32)
    device.download(pivots, here, stream)
    device.download(failed, wrong, stream)
    device.wait(stream)
    if wrong.any():
        raise ImatrixError("its second moments cannot be factored", tensor=name)
    return DeviceFactor(moments, factor.feedback, here**2)


def _launch_factoring(lower: Any, failed: Any, device: RoundingDevice, stream: Any) -> None:
    """Start the factorization of float64[matrices, n, n] in place."""
    count, n = lower.shape[:2]
    for start in range(0, n, FACTORED):
        width = min(FACTORED, n - start)
        rest = n - start - width
        at = [np.int32(v) for v in (n, start, width)]
        device.launch("factor_block", count, 32, stream, lower, *at, failed)
        if rest:
            down, across = -(-rest // 64), -(-rest // SQUARE)
            device.launch("factor_rows", count * down, 64, stream, lower, *at, np.int32(down))
            squares = count * across * across
            device.launch("subtract_products", squares, 256, stream, lower, *at, np.int32(across))


def held_out_error_there(
    given: MatrixMoments, rest: np.ndarray, number: int | None, memory: Memory, stream: Any
) -> float:
    """Return tr(E H E^T) of errors E, float64[rows, n], with the held-out moments H."""
    found = _moments_there(given, True, number, memory, stream)
    sums = found.sums
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
        found.given,
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
