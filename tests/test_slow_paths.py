"""Which lines about slower paths commands print."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from iqforge.runtime.commands.slow_paths import SlowPaths

SLOW, OTHER = "slow path: MoE of layer 3: a reason", "experts on the CPU: 1.0 GiB are page-locked"


class Opened:
    """A model with a matrix on each of these devices."""

    def __init__(self, *devices: str):
        parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
        self.weights = SimpleNamespace(parameters=parameters)


@pytest.mark.parametrize(
    "everything, devices, said",
    [
        (False, ("cuda:0", "cuda:0"), [SLOW]),
        (False, ("cuda:0", "cpu"), []),  # as the flags ask
        (True, ("cuda:0", "cpu"), [SLOW, OTHER]),
    ],
)
def test_lines(capsys, everything, devices, said):
    say, model = SlowPaths(everything), Opened(*devices)
    say.follow(model)
    for line in (SLOW, OTHER):
        say(line)
    assert capsys.readouterr().err.splitlines() == said


def test_a_model_is_not_kept_alive(capsys):
    say, model = SlowPaths(everything=False), Opened("cuda:0")
    say.follow(model)
    del model
    say(SLOW)
    assert not capsys.readouterr().err
