"""Which executor runs which module on the fast path.

`PROMPT[class]` and `STEP[class]` are factories: `(branch, context) -> executor`. A factory that
cannot run this module (a bias, a weight on another device, a shape without kernels) raises `Slow`
with the reason, and the module runs on the reference path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..layers.block import Block
from ..layers.norm import RMSNorm
from .context import Context

PROMPT: dict[type, Callable] = {}
STEP: dict[type, Callable] = {}


class Slow(Exception):
    """This module has no fast path; the message says why. It never reaches a user."""


@dataclass(frozen=True)
class Branch:
    """One step of the residual stream, h += module(norm(h)). `is_mixer`: the module takes (x,
    batch), others take x alone.
    """

    layer: int
    norm: RMSNorm
    module: Any
    is_mixer: bool

    @property
    def name(self) -> str:
        return f"blk.{self.layer} {type(self.module).__name__}"


def executor(table: dict[type, Callable], module: type) -> Callable[[Callable], Callable]:
    """Declare the decorated class or function as the executor of modules of this class."""

    def declare(factory: Callable) -> Callable:
        if module in table:
            raise RuntimeError(f"two executors for {module.__name__}")
        table[module] = factory
        return factory

    return declare


def branches(blocks: Sequence[Block]) -> list[Branch] | None:
    """Return the branches of all blocks in order, or None if some block is not made of two
    branches.
    """
    found = []
    for layer, block in enumerate(blocks):
        if type(block) is not Block:
            return None
        found += [
            Branch(layer, block.mixer_norm, block.mixer, True),
            Branch(layer, block.ffn_norm, block.ffn, False),
        ]
    return found


def choose(table: dict[type, Callable], branch: Branch, context: Context) -> Any | None:
    """Return the executor of a branch, or None (reported to `context`) if its module has to run on
    the reference path.
    """
    factory = table.get(type(branch.module))
    try:
        if factory is None:
            raise Slow("no kernels for this kind of layer")
        if branch.norm.weight.device != context.device:
            raise Slow(f"the layer works on {branch.norm.weight.device}")
        return factory(branch, context)
    except Slow as reason:
        context.report(type(branch.module).__name__, str(reason), branch.layer)
        return None
