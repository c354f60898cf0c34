"""Which executor runs which module on the fast path.

`PROMPT[class]` and `STEP[class]` are factories: `(branch, context) -> executor`. A factory that
cannot run this module (a bias, a weight on another device, a shape without kernels) raises `Slow`
with the reason, and the module runs on the reference path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..layers.block import Block, Branch
from ..layers.norm import RMSNorm
from ..layers.specs import AttentionSpec, RouterSpec
from .context import Context

PROMPT: dict[type, Callable] = {}
STEP: dict[type, Callable] = {}


class Slow(Exception):
    """This module has no fast path; the message says why. It never reaches a user."""


@dataclass(frozen=True)
class PlacedBranch:
    """A branch of the residual stream, its layer, and the device on which it computes.

    scale: the number that multiplies the stream after it (None: 1).
    """

    layer: int
    branch: Branch
    device: torch.device
    scale: torch.Tensor | None = None

    @property
    def module(self) -> Any:
        return self.branch.module

    @property
    def norm(self) -> RMSNorm:
        """The norm before the module, which `choose` has checked."""
        return self.branch.norm  # pyright: ignore[reportReturnType]  see there

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


def placed(blocks: Sequence[Block]) -> list[PlacedBranch]:
    """Return the branches of all blocks in order."""
    found = []
    for layer, block in enumerate(blocks):
        last = len(block.branches) - 1
        found += [
            PlacedBranch(layer, branch, block.device, block.output_scale if i == last else None)
            for i, branch in enumerate(block.branches)
        ]
    return found


def choose(table: dict[type, Callable], branch: PlacedBranch, context: Context) -> Any | None:
    """Return the executor of a branch, or None (reported to `context`) if its module has to run on
    the reference path.
    """
    factory = table.get(type(branch.module))
    try:
        if factory is None:
            raise Slow("no kernels for this kind of layer")
        if branch.device != context.device:
            raise Slow(f"the layer works on {branch.device}")
        if not isinstance(branch.branch.norm, RMSNorm):
            raise Slow("no RMS norm before it")
        if branch.branch.post_norm is not None:
            raise Slow("a norm after it")
        return factory(branch, context)
    except Slow as reason:
        context.report(type(branch.module).__name__, str(reason), branch.layer)
        return None


def check_attention(spec: AttentionSpec) -> None:
    """`Slow` for what the attention kernels do not evaluate yet."""
    beyond = {
        "a sliding window": spec.window,
        "a cap of scores": spec.softcap,
        "sinks": spec.sinks,
        "gates": spec.gate,
        "norms of values": spec.value_norm,
        "keys and values of another layer": spec.kv_from is not None,
        "a temperature of positions": spec.temperature is not None,
    }
    if found := [name for name, has in beyond.items() if has]:
        raise Slow(" and ".join(found))


def check_router(spec: RouterSpec, bias: torch.Tensor | None) -> None:
    """`Slow` for what the routing kernels do not evaluate yet."""
    plain = RouterSpec(spec.n_experts, spec.n_used)
    if spec != plain:
        raise Slow(f"a router with {spec.score} scores, groups or scaled weights")
    if bias is not None:
        raise Slow("a bias of the choice of experts")
