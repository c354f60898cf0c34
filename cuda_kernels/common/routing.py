"""How experts are chosen, for the kernels of prompts and of decoding steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Routing:
    """How experts are chosen and weighted: see `router.cu`. owned: ids count from the first of
    these experts, and those of experts outside of them are -1; None for all. shared: slots of a
    shared expert after those of the chosen ones; shared_gate: its weight is a sigmoid, else 1.
    """

    sigmoid: bool = False
    norm: bool = True
    scale: float = 1.0
    choice_bias: bool = False
    logit_bias: bool = False
    groups: int = 1
    groups_used: int = 1
    group_best: int = 2
    owned: tuple[int, int] | None = None
    shared: int = 0
    shared_gate: bool = False
