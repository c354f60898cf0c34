"""The launches of a decode step, without a device."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from iqforge.cuda_kernels.attention import step as step_attention
from iqforge.cuda_kernels.attention.shape import TYPES, AttentionShape, fits
from iqforge.cuda_kernels.attention.step import StepAttention
from iqforge.cuda_kernels.compile.occupancy import Occupancy
from iqforge.errors import UnsupportedTypeError


def on_device(monkeypatch, facts: Occupancy) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=facts.shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(step_attention, "device_index", lambda device: 0)
    monkeypatch.setattr(step_attention, "occupancy", lambda index: facts)


@pytest.fixture
def launches(monkeypatch):
    """Return (kernel's rows, grid, first row, overlaps) of each launch on a device with 99 KB of
    shared memory and 84 multiprocessors.
    """
    on_device(monkeypatch, Occupancy(84, 101376, 50304, 49152))
    monkeypatch.setattr(
        step_attention, "function", lambda spec, name, device: int(dict(spec.defines)["ROWS"])
    )
    seen = []

    def launch(kernel, grid, block, *args, shared, pdl):
        assert shared <= 101376
        seen.append((kernel, grid, int(args[9][0]), pdl))

    monkeypatch.setattr(step_attention, "launch", launch)
    return seen


def run(shape: AttentionShape, capacity: int) -> StepAttention:
    attention = StepAttention(shape, capacity, torch.device("cpu"))
    q, kv = torch.zeros(shape.rows, 8), torch.zeros(shape.rows, 8)
    attention(
        q,
        kv,
        kv,
        None,
        None,
        0.0,
        torch.zeros(shape.rows, 4),
        kv,
        kv,
        torch.arange(shape.rows, dtype=torch.int32),
        1.0,
        q,
    )
    return attention


def test_rows_that_do_not_fit_are_taken_in_pieces(launches):
    run(AttentionShape(8, 8, 4, 128, 128, "F16", "F16", 128, True), 4096)
    run(AttentionShape(7, 8, 4, 128, 128, "F16", "F16", 128, True), 4096)
    run(AttentionShape(1, 8, 4, 128, 128, "F16", "F16", 128, True), 4096)
    rows = [(kernel, first, overlaps) for kernel, _, first, overlaps in launches]
    # a piece reads rows of the one before, which it may not do while that one runs
    assert rows == [(4, 0, True), (4, 4, False), (4, 0, True), (3, 4, False), (1, 0, True)]
    with pytest.raises(UnsupportedTypeError, match="shared memory"):
        run(AttentionShape(1, 64, 1, 256, 256, "F32", "F32", 256, True), 4096)


def test_splits_follow_from_capacity_and_device(launches):
    shape = AttentionShape(1, 4, 8, 128, 128, "F16", "F16", 128, False)
    assert [run(shape, capacity).splits for capacity in (1, 128, 129, 1024, 1 << 20)] == [
        1,
        1,
        2,
        8,
        2 * 84 // 8,
    ]
    wide = AttentionShape(8, 16, 1, 32, 32, "Q8_0", "Q8_0", 32, False)
    # The block that joins holds all shares.
    fitting = wide.fitting(101376 - 2048)
    assert run(wide, 1 << 20).splits <= fitting.most_splits(*fitting.tile(101376 - 2048))


@pytest.mark.parametrize("capacity", [128, 1 << 16])
@pytest.mark.parametrize("type, kv_heads", [("F16", 4), ("Q8_0", 8), ("Q4_0", 8), ("Q8_0", 200)])
def test_a_multiprocessor_has_one_block(monkeypatch, type: str, kv_heads: int, capacity: int):
    """Two of them do not fit an H200's, where the grid leaves each block one."""
    facts, taken = Occupancy(132, 232448, 115840, 114688), []
    on_device(monkeypatch, facts)
    monkeypatch.setattr(step_attention, "function", lambda spec, name, device: None)
    monkeypatch.setattr(step_attention, "launch", lambda *args, shared, pdl: taken.append(shared))
    shape = AttentionShape(1, 4, kv_heads, 128, 128, type, type, 128, True)
    run(shape, capacity)
    assert all(shared <= facts.shared - 2048 for shared in taken)
    assert all((shared >= facts.alone) == (kv_heads <= 132) for shared in taken) and taken


@pytest.mark.parametrize(
    "length, limit",
    [(64, 97 << 10), (128, 97 << 10), (256, 97 << 10), (256, 225 << 10), (512, 225 << 10)],
)
@pytest.mark.parametrize("type", ["F16", "Q8_0", "Q4_0"])
def test_caches_of_every_type_fit(type: str, length: int, limit: int):
    """Long heads of encoded caches leave the tensor cores where the shared memory is too small."""
    shape = AttentionShape(1, 4, 2, length, length, type, type, length, True)
    assert fits(shape, limit)
    used = shape.fitting(limit)
    tile, stages = used.tile(limit)
    assert used.shared_bytes(tile, stages) <= limit
    assert used.on_tensor_cores or (type != "F16" and length >= 256)


@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("type_v", TYPES)
@pytest.mark.parametrize("type_k", TYPES)
def test_heads_of_512_fit_where_a_block_has_99_kb(type_k: str, type_v: str, group: int):
    """Gemma 4's: in short tiles if need be, and never where a block has 227 KB."""
    if type_v == "Q8_KV":
        pytest.skip("a type of keys")
    shape = AttentionShape(1, group, 2, 512, 512, type_k, type_v, 512, True)
    for limit in (97 << 10, 161 << 10, 225 << 10):
        assert fits(shape, limit)
        used = shape.fitting(limit)
        tile, stages = used.tile(limit)
        assert tile >= 8 and used.shared_bytes(tile, stages) <= limit
        assert limit < 200 << 10 or not used.short


def test_warps_take_their_own_tiles_where_they_can():
    shape = AttentionShape(1, 8, 4, 128, 128, "F16", "F16", 128, True)
    assert shape.is_by_warp and shape.fitting(225 << 10).tile(225 << 10) == (16, 3)
    # Two tiles of a warp do not fit a smaller device, more rows no registers, odd rows no words.
    assert not shape.fitting(97 << 10).is_by_warp and shape.fitting(97 << 10).on_tensor_cores
    assert not replace(shape, rows=3).is_by_warp and replace(shape, rows=2).is_by_warp
    assert not replace(shape, type_k="Q8_0", type_v="Q8_0", key_length=96).is_by_warp
    assert not replace(shape, type_k="F32").is_by_warp
    long = replace(shape, key_length=256, value_length=256)
    used = long.fitting(225 << 10)
    assert used.is_by_warp and used.warps == 6 and used.tile(225 << 10) == (16, 2)
    assert not long.fitting(161 << 10).is_by_warp
    assert not replace(long, deep=False).fitting(225 << 10).is_by_warp
    mixed = replace(shape, type_k="Q8_0")
    assert mixed.is_by_warp and not replace(mixed, type_v="BF16").is_by_warp
    assert not replace(mixed, rows=3).on_tensor_cores


@pytest.mark.parametrize("n, stages", [(1, 1), (128, 1), (129, 2), (256, 2), (300, 3), (9999, 3)])
def test_short_ranges_leave_shared_memory_to_the_next_kernel(n: int, stages: int):
    shape = AttentionShape(1, 4, 8, 128, 128, "F16", "F16", 128, False)
    part = shape.of_range(n).fitting(225 << 10)
    assert part.is_by_warp and part.tile(225 << 10) == (16, stages)
