"""Which lines about slower paths commands print."""

from __future__ import annotations

import pytest
import torch
from iqforge.runtime.commands.slow_paths import SlowPaths
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.common.registry import Placed, Slow

SLOW = "slow path: MoE of layer 3: a reason"
PLACED = "slow path, as placed: Attention of 2 layers from 1: another device"
OTHER = "experts on the CPU: 1.0 GiB are page-locked"


@pytest.mark.parametrize(
    "everything, said", [(False, [SLOW]), (True, [SLOW, PLACED, OTHER])], ids=["default", "verbose"]
)
def test_lines(capsys, everything, said):
    say = SlowPaths(everything)
    context = Context(torch.device("cpu"), verbose=say)
    context.report("MoE", Slow("a reason"), 3)
    for layer in (1, 2):
        context.report("Attention", Placed("another device"), layer)
    context.report_all()
    say(OTHER)
    assert capsys.readouterr().err.splitlines() == said
