"""Activations that float16 cannot hold, while statistics of inputs are collected in it."""

from __future__ import annotations

import logging

import torch

from ..runtime.model import Model

log = logging.getLogger(__name__)


class ExceedsHalfError(Exception):
    """Activations exceed the range of float16. The collector starts again in bfloat16."""


class HalfRange:
    """Check the states that come out of a model in float16. Nothing waits for the device before
    `settle`, or the check after the next one.
    """

    def __init__(self, model: Model):
        self._model = model
        self._pending: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def check(self, states: torch.Tensor) -> None:
        """Note whether states are finite; a number that is too large for float16 makes all that
        depends on it infinite or not a number. Raise ExceedsHalfError for the states before.
        """
        if self._model.precision != "f16":
            return
        finite = torch.isfinite(states).all()
        self.settle()
        if finite.is_cuda:
            self._pending = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._pending.copy_(finite, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(finite.device))
        else:
            self._pending = finite

    def settle(self) -> None:
        """Raise ExceedsHalfError if the states of the last check are not finite."""
        if self._pending is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        finite, self._pending, self._copied = bool(self._pending), None, None
        if not finite:
            raise ExceedsHalfError


def widen(model: Model, where: str = "") -> None:
    """Let a model in float16 continue in bfloat16, and say so."""
    log.warning(
        "activations exceed the range of float16 (65504)%s: bfloat16 is used from here on,"
        " which is less precise; --precision f32 is exact and slower",
        where,
    )
    model.widen_range()
