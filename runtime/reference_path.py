"""The reference path: a network in float32, with products that are watched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from ..errors import IqforgeError, NonFiniteError
from .layers.batch import Batch
from .layers.many_rows import compiled_rows
from .network.network import Network
from .weights.taps import Taps


class ReferencePath:
    """Passes of a network whose products `taps` see.

    compiled: layers of many rows run in compiled code on the CPU, see `layers.many_rows`.

    They raise NonFiniteError that names the first tensor whose product gave infinity or NaN.
    """

    def __init__(self, network: Network, taps: Taps, file: str | Path, compiled: bool = False):
        self.network, self._taps, self._file, self._compiled = network, taps, file, compiled

    def hidden(self, tokens: torch.Tensor, batch: Batch, *, final: bool = True) -> torch.Tensor:
        """Return what `Network.hidden` returns."""
        with self._watched():
            return self.network.hidden(tokens, batch, final=final)

    def first_states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what `Network.first_states` returns."""
        with self._watched():
            return self.network.first_states(tokens)

    def after_layer(
        self, layer: int, tokens: torch.Tensor, h: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Return what `Network.after_layer` returns."""
        with self._watched():
            return self.network.after_layer(layer, tokens, h, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what `Network.logits` returns."""
        with self._watched():
            return self.network.logits(hidden)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._taps.watching = True
        try:
            with compiled_rows() if self._compiled else nullcontext():
                yield
            self._check_finite()
        except IqforgeError:  # an observer may refuse what an earlier product gave
            self._check_finite()
            raise
        finally:
            self._taps.watching = False
            self._taps.first_not_finite()

    def _check_finite(self) -> None:
        if (tensor := self._taps.first_not_finite()) is not None:
            raise NonFiniteError(
                "activations are infinite or not a number from this product on",
                file=self._file,
                tensor=tensor,
            )
