"""Which executor stands for which module on the fast path.

`PROMPT[class]` and `STEP[class]` are factories: `(branch, context) -> executor`. One that cannot
take this very module (a bias, a weight on another device, a shape the kernels do not have) raises
`Slow` with the reason, and the module runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..layers.norm import RMSNorm

PROMPT: dict[type, Callable] = {}
STEP: dict[type, Callable] = {}


class Slow(Exception):
    """This module has no fast path; the message says why. Never reaches a user."""


@dataclass(frozen=True)
class Branch:
    """One step of the residual stream, h += module(norm(h)). `is_mixer`: the module takes (x,
    batch), others take x alone.
    """

    layer: int
    norm: RMSNorm
    module: object
    is_mixer: bool

    @property
    def name(self) -> str:
        return f"blk.{self.layer} {type(self.module).__name__}"


def executor(table: dict[type, Callable], module: type) -> Callable[[Callable], Callable]:
    """Declares the decorated class or function as the executor of modules of this class."""

    def declare(factory: Callable) -> Callable:
        if module in table:
            raise RuntimeError(f"two executors for {module.__name__}")
        table[module] = factory
        return factory

    return declare


def branches(blocks) -> list[Branch] | None:
    """The branches of all blocks in order, or None if some block is not made of two branches."""
    from ..layers.block import Block

    found = []
    for layer, block in enumerate(blocks):
        if type(block) is not Block:
            return None
        found += [
            Branch(layer, block.mixer_norm, block.mixer, True),
            Branch(layer, block.ffn_norm, block.ffn, False),
        ]
    return found


def choose(table: dict[type, Callable], branch: Branch, context) -> object | None:
    """The executor of a branch, or None (reported to `context`) if its module has to run as the
    truth path has it.
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
