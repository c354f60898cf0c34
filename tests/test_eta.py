"""The time left of a run whose types take different times."""

from __future__ import annotations

import pytest
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.quantize.plan.plan import PlannedTensor
from iqforge.quantize.report.eta import TimeLeft

COST = {"Q8_0": 1e-3, "IQ3_KT": 50e-3, "IQ4_K": 10e-3, "BF16": 1e-4}


def planned(*kinds: str) -> list[PlannedTensor]:
    infos = [TensorInfo(f"t{n}", (4, 256), ggml_type("BF16")) for n in range(len(kinds))]
    return [
        PlannedTensor(info, info.with_type(ggml_type(kind))) for info, kind in zip(infos, kinds)
    ]


class Run:
    """Elements of a type take COST seconds each."""

    def __init__(self, plans: list[PlannedTensor], finished: int = 0):
        self.now, self.plans = 0.0, plans[finished:]
        self.time_left = TimeLeft(plans, finished, clock=lambda: self.now)

    def tensors(self, count: int, parts: int = 2) -> None:
        for plan in self.plans[:count]:
            for _ in range(parts):
                self.now += COST[plan.target.type.name] * plan.source.n_elements / parts
                self.time_left.advance(plan.source.n_elements // parts)
        del self.plans[:count]

    @property
    def left(self) -> float:
        return sum(COST[plan.target.type.name] * plan.source.n_elements for plan in self.plans)


def test_types_that_were_met_count_with_their_own_time():
    run = Run(planned("Q8_0", "IQ3_KT", "BF16", "Q8_0", "IQ3_KT", "Q8_0", "BF16"))
    assert run.time_left.seconds_left() is None
    run.tensors(3)
    assert run.time_left.seconds_left() == pytest.approx(run.left, rel=1e-6)
    run.tensors(2)
    assert run.time_left.seconds_left() == pytest.approx(run.left, rel=1e-6)
    run.tensors(2)
    assert run.time_left.seconds_left() == pytest.approx(0, abs=1e-9)


def test_types_to_come_count_as_the_mean():
    run = Run(planned("Q8_0", "IQ4_K", "IQ3_KT", "BF16"))
    run.tensors(2)
    assert run.time_left.seconds_left() == pytest.approx(1024 * (COST["Q8_0"] + COST["IQ4_K"]) / 2)


def test_within_a_tensor_and_after_a_run_that_was_broken_off():
    run = Run(planned("IQ3_KT", "IQ4_K", "IQ4_K"), finished=1)
    run.now += COST["IQ4_K"] * 256
    run.time_left.advance(256)
    assert run.time_left.seconds_left() == pytest.approx(COST["IQ4_K"] * (2 * 1024 - 256))
