"""What commands print of layers that run on a slower path."""

from __future__ import annotations

import sys


class SlowPaths:
    """Prints what `verbose` of a model is told: with `everything` all of it, else which layers run
    on a slower path for which nobody has asked by placing something on another device.
    """

    def __init__(self, everything: bool):
        self.everything = everything

    def __call__(self, line: str) -> None:
        if self.everything or line.startswith("slow path:"):
            print(line, file=sys.stderr)
