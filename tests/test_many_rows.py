"""Layers of many rows on the CPU in compiled code, against torch."""

from __future__ import annotations

import pytest
import torch
from iqforge.runtime.layers import many_rows
from iqforge.runtime.layers.attend import attend
from iqforge.runtime.layers.norm import RMSNorm
from iqforge.runtime.layers.recurrent.delta_net import l2_norm
from iqforge.runtime.layers.recurrent.delta_rule import by_steps
from iqforge.runtime.layers.rope import Rope
from iqforge.runtime.simd.prompt.attention import TILE
from torch.nn import functional as F

N = 37


@pytest.fixture
def threads():
    """Put back the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(N, 96), (N, 3, 32)])
def test_norms(shape):
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    expected = F.rms_norm(x, (shape[-1],), weight, 1e-5)
    with many_rows.compiled_rows():
        found = many_rows.rms_norm(x, weight, 1e-5)
        assert torch.equal(RMSNorm(weight, 1e-5)(x), found)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_norms_of_heads_within_longer_rows():
    x, weight = torch.randn(N, 3, 64), torch.randn(32)
    expected = F.rms_norm(x[..., 32:], (32,), weight, 1e-5)
    with many_rows.compiled_rows():
        found = many_rows.rms_norm(x[..., 32:], weight, 1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("style", ["norm", "neox"])
@pytest.mark.parametrize("rotated", [32, 64])
def test_rotations_are_those_of_torch_bit_for_bit(style, rotated):
    rope, x = Rope(style, rotated, 10000.0), torch.randn(N, 3, 64)
    angles = rope.angles(torch.arange(5, 5 + N))
    expected = rope(x, angles)
    with many_rows.compiled_rows():
        assert many_rows.rotate(x, *angles, rotated, style == "neox") is not None
        assert torch.equal(rope(x, angles), expected)


def test_gates_in_one_merged_result():
    merged = torch.randn(N, 64)
    expected = F.silu(merged[:, :32]) * merged[:, 32:]
    with many_rows.compiled_rows():
        found = many_rows.gate_silu(*merged.chunk(2, dim=-1))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "dv", "n", "total", "window"),
    [
        (4, 2, 64, 64, 37, 37, 0),
        (4, 2, 32, 32, 20, 150, 0),
        (3, 3, 40, 96, 130, 130, 0),
        (6, 2, 16, 80, 70, 200, 50),
        (2, 1, 16, 128, 33, 129, 1),
    ],
)
def test_attention(heads, kv_heads, d, dv, n, total, window):
    q = torch.randn(2, n, heads, d) * 2
    k, v = torch.randn(2, total, kv_heads, d), torch.randn(2, total, kv_heads, dv)
    expected = attend(q, k, v, d**-0.5, window)
    with many_rows.compiled_rows():
        found = attend(q, k, v, d**-0.5, window)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("total, window", [(203, 0), (290, 0), (203, 70)])
def test_pieces_of_attention_change_nothing(monkeypatch, total, window):
    """Nor where a row has an infinite value that the queries before it do not see."""
    q, k, v = torch.randn(1, 203, 6, 32), torch.randn(1, total, 2, 32), torch.randn(1, total, 2, 48)
    v[0, total - 50, 1, 4] = float("inf")
    with many_rows.compiled_rows():
        whole = attend(q, k, v, 0.2, window)
        seen = min(total, window or total)
        monkeypatch.setattr(many_rows, "PATIENCE", 20 * seen * 6 * (32 + 64))
        pieces = many_rows._pieces(203, seen * 6 * (32 + 64))
        assert 5 < len(pieces) < 203 and {p.start % TILE for p in pieces} == {0}
        found = attend(q, k, v, 0.2, window)
    assert torch.equal(found.view(torch.int32), whole.view(torch.int32))


def test_convolutions_and_norms_of_a_delta_net():
    x, weights = torch.randn(2, N + 3, 48), torch.randn(48, 4)
    expected = sum(x[:, tap : tap + N] * weights[:, tap] for tap in range(4))
    heads = torch.randn(2, N, 3, 16)
    with many_rows.compiled_rows():
        convolved = many_rows.convolve_silu(x[:, :3], x[:, 3:], weights)
        normed = l2_norm(heads)
    torch.testing.assert_close(convolved, F.silu(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(normed, l2_norm(heads), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "tiled"), [(32, False), (48, True)])
def test_the_delta_rule(size, tiled):
    """Also of values within longer rows, and of heads that share keys."""
    shape, heads, group = (2, 40), 6, 2
    q, k = (F.normalize(torch.randn(*shape, heads // group, 12), dim=-1) for _ in range(2))
    whole = torch.randn(*shape, heads * size + 16)
    v = whole[..., 16:].unflatten(-1, (heads, size))
    decay, beta = -torch.rand(*shape, heads), torch.rand(*shape, heads)
    memory = torch.randn(2, heads, 12, size)
    each = [torch.cat([x] * group, 2) if tiled else x.repeat_interleave(group, 2) for x in (q, k)]
    before, expected = memory.clone(), by_steps(*each, v, decay, beta, memory)
    with many_rows.compiled_rows():
        found = many_rows.delta_rule(q, k, v, decay, beta, memory, tiled=tiled)
    assert torch.equal(memory, before) and found is not None
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_is_not_a_number_stays_so():
    q, k, v = torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16)
    k[0, 7, 0, 3] = float("nan")
    with many_rows.compiled_rows():
        found = attend(q, k, v, 0.25)
    assert found[0, :7].isfinite().all() and found[0, :, 1].isfinite().all()
    assert not found[0, 7:, 0].isfinite().any()


@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_changes_nothing():
    q, k, v = torch.randn(1, 50, 4, 32), torch.randn(1, 90, 2, 32), torch.randn(1, 90, 2, 32)
    found = []
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        with many_rows.compiled_rows():
            found.append(attend(q, k, v, 0.2))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_only_where_it_was_asked_for():
    x = torch.randn(N, 64)
    assert many_rows.rms_norm(x, torch.ones(64), 1e-5) is None
    with many_rows.compiled_rows():
        assert many_rows.rms_norm(x[:4], torch.ones(64), 1e-5) is None
        assert many_rows.rms_norm(x[:, :40], torch.ones(40), 1e-5) is None
        assert many_rows.rms_norm(x.double(), torch.ones(64), 1e-5) is None
