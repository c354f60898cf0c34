"""What commands print of layers that run on a slower path."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..model import Model


class SlowPaths:
    """Prints what `verbose` of a model is told: with `everything` all of it, else which layers run
    on a slower path. It prints nothing of that if parts of the model are on the CPU, since the user
    asked for it.
    """

    def __init__(self, everything: bool):
        self.everything = everything
        self._model: Callable[[], Model | None] = lambda: None

    def follow(self, model: Model) -> None:
        """Print the lines of this model, without keeping it alive."""
        self._model = weakref.ref(model)

    def __call__(self, line: str) -> None:
        if self.everything or (line.startswith("slow path:") and self._is_whole()):
            print(line, file=sys.stderr)

    def _is_whole(self) -> bool:
        model = self._model()
        return model is not None and all(p.device.type != "cpu" for p in model.weights.parameters)
