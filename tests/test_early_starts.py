"""When a product lets the next launch start, and how it fills its rings before its own wait."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.matvec import experts as matvec_experts
from iqforge.cuda_kernels.matvec import products as matvec
from iqforge.cuda_kernels.matvec.operands import NextAttention
from iqforge.cuda_kernels.matvec.plan import NORM_MATVEC, DeviceLimits
from iqforge.formats.types import ggml_type

from .matvec_launches import replace_launches
from .matvec_reference import EPS, draw, matrix

HERE = DeviceLimits(132, 232448, 115840, 114688)
POSITION = torch.zeros(1, dtype=torch.int32)
ATTENTION = NextAttention(POSITION, 4224)


@pytest.fixture
def launched(monkeypatch):
    """Return (macros, arguments) of all launches so far. None runs."""
    found = []

    def launch(spec, grid, block, *arguments, shared, pdl):
        found.append((dict(spec.defines), arguments))

    replace_launches(monkeypatch, HERE, launch)
    return found


def product(*names, n=1, attention=ATTENTION):
    """Launch products of matrices of these types with one norm."""
    ms = [matrix(name, 16, 512, seed=i) for i, name in enumerate(names)]
    outs = [torch.zeros(n, 16) for _ in ms]
    matvec.norm_matvec(draw(n, 512), draw(512), EPS, ms, outs, None, attention)


def test_attention_over_many_positions_starts_at_once(launched):
    product("IQ4_K", "IQ4_K", "IQ4_K")
    [(macros, arguments)] = launched
    assert (macros["LATE"], macros["LATE_BELOW"]) == ("1", "1")
    assert arguments[-2] is POSITION and arguments[-1] == np.int32(4224)


def test_only_the_last_launch_before_attention_depends_on_the_position(launched):
    product("IQ4_K", "Q4_K")
    (first, given), (last, _) = launched
    assert first["LATE"] == last["LATE"] == last["LATE_BELOW"] == "1"
    assert "LATE_BELOW" not in first and not any(x is POSITION for x in given)


@pytest.mark.parametrize(
    "name, n, attention", [("Q6_K", 1, ATTENTION), ("IQ4_K", 2, ATTENTION), ("IQ4_K", 1, None)]
)
def test_others_do_not_depend_on_it(launched, name, n, attention):
    """A type that always lets the next launch start at once, several tokens, no attention."""
    product(name, n=n, attention=attention)
    [(macros, arguments)] = launched
    assert "LATE_BELOW" not in macros and not any(x is POSITION for x in arguments)


@pytest.mark.parametrize(
    "rows, cols, held",
    [(5120, 2048, True), (9216, 2048, False), (6144, 4096, False), (4096, 4096, True)],
)
def test_rows_that_are_all_in_flight(rows, cols, held):
    """Query, key and value of qwen3-30b-a3b, qwen3.5-35b-a3b and llama-8b; 2,112 warps have four
    stages each.
    """
    cut = HERE.plan(ggml_type("IQ4_K"), cols, 1, NORM_MATVEC, [rows])
    assert (cut.warps, cut.slots) == (16, 4)
    assert cut.holds(rows, 132) == held


@pytest.mark.parametrize("n", [1, 2])
def test_rings_are_filled_stage_by_stage_for_one_token(launched, n):
    """But for the output projection, and gate and up."""
    m, x, bf16 = matrix("IQ4_K", 512, 512), draw(n, 512), torch.zeros(n, 512, dtype=torch.bfloat16)
    product("IQ4_K", n=n)
    matvec.matvec_add(bf16, m, x)
    experts = matrix("IQ4_K", 512, 512, 3)
    ids, shares = torch.zeros(n, 2, dtype=torch.int32), torch.zeros(n, 2)
    matvec_experts.expert_down_add(draw(n, 2, 512), experts, ids, shares, x)
    assert [macros["PACED"] for macros, _ in launched] == [str(int(n == 1))] * 3
    launched.clear()
    matvec.matvec_add(x, m, x)
    matvec.gate_up(x, draw(512), EPS, m, m, bf16)
    matvec_experts.expert_gate_up(x, draw(512), EPS, experts, experts, ids, draw(n, 2, 512))
    assert [macros["PACED"] for macros, _ in launched] == ["0"] * 3


@pytest.mark.parametrize("n", [1, 2])
def test_weights_that_tokens_may_share_stay_in_l2(launched, n):
    """Those of experts, of several tokens."""
    m, x = matrix("IQ4_K", 512, 512, 3), draw(n, 512)
    ids, shares = torch.zeros(n, 2, dtype=torch.int32), torch.zeros(n, 2)
    matvec_experts.expert_gate_up(x, draw(512), EPS, m, m, ids, draw(n, 2, 512))
    matvec_experts.expert_down_add(draw(n, 2, 512), m, ids, shares, x)
    assert [macros["READ_AGAIN"] for macros, _ in launched] == [str(int(n > 1))] * 2


@pytest.mark.parametrize(
    "name, n, cols, rows",
    [("BF16", 8, 14336, [3, 3, 2]), ("BF16", 5, 8192, [5]), ("IQ4_K", 8, 28672, [4, 4])],
)
def test_long_rows_take_the_fewest_launches(launched, name, n, cols, rows):
    m = matrix(name, 16, cols)
    matvec.matvec_add(draw(n, cols), m, torch.zeros(n, 16))
    assert [int(macros["X_ROWS"]) for macros, _ in launched] == rows
    assert all(int(macros["WARPS"]) >= 4 for macros, _ in launched)
