"""Sequences as tables of blocks: what is read back, what is released, and going back."""

from __future__ import annotations

import pytest
import torch
from iqforge.errors import ShapeError, UsageError
from iqforge.runtime.layers.attend import attend, attend_with_scores, visible
from iqforge.runtime.layers.attention import Attention
from iqforge.runtime.layers.specs import AttentionSpec
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.state.pool import Pool
from iqforge.runtime.state.sequence import State
from iqforge.runtime.state.table import BLOCK_TOKENS, Blocks, Table

CPU = torch.device("cpu")
F32 = CacheSettings("f32", "f32")
HEADS, LENGTH, UBATCH = 2, 4, 32


def mixer(window: int = 0, kv_from: int | None = None) -> Attention:
    spec = AttentionSpec(HEADS, HEADS, LENGTH, LENGTH, 1.0, window=window, kv_from=kv_from)
    return Attention(spec, output=None)


def pool(*windows: int, n_tokens: int = 1024, n_sequences: int = 1, settings=F32) -> Pool:
    return Pool([(mixer(w), CPU) for w in windows], settings, n_tokens, n_sequences, UBATCH)


class Recurrent:
    """A state that sums up all tokens."""

    by_position, nbytes = False, 8

    def __init__(self):
        self.sum = 0

    def clear(self):
        self.sum = 0

    def save(self, first, stop):
        return self.sum

    def load(self, first, saved):
        self.sum = saved


def rows(numbers: list[int]) -> torch.Tensor:
    """Keys that say which token they are."""
    x = torch.tensor(numbers, dtype=torch.float32)
    return x[:, None, None].expand(-1, HEADS, LENGTH)


def extend(state: State, numbers: list[int]) -> None:
    """What a pass does: all layers store the tokens."""
    for first in range(0, len(numbers), UBATCH):
        piece = numbers[first : first + UBATCH]
        state.reserve(len(piece))
        for layer in state.layers:
            if isinstance(layer, Recurrent):
                layer.sum += sum(piece)
            elif layer is not None:
                layer.write(state.n_past, rows(piece), -rows(piece))
        state.advance(len(piece))


def held(state: State, layer: int, first: int = 0) -> list[int]:
    k, v = state.layers[layer].read(state.n_past, first)
    assert torch.equal(k, -v)
    return k[:, 0, 0].int().tolist()


def test_a_reserved_sequence_is_one_piece_of_memory():
    state = pool(0).sequence(reserved=True)
    cache = state.layers[0]
    assert cache.is_whole and cache.k.shape == (1024, HEADS, LENGTH)
    extend(state, list(range(100)))
    assert held(state, 0) == list(range(100)) and cache.k[99, 0, 0] == 99
    state.truncate(3)
    assert cache.is_whole and state.n_past == 3


def test_reserved_sequences_of_one_pool_are_whole_each():
    shared = pool(0, n_sequences=2)
    a, b = (shared.sequence(512, reserved=True) for _ in range(2))
    extend(a, list(range(300)))
    extend(b, list(range(1000, 1400)))
    assert a.layers[0].k[:300, 0, 0].tolist() == list(range(300))
    assert b.layers[0].k[:400, 0, 0].tolist() == list(range(1000, 1400))
    b.truncate(10)
    assert b.layers[0].is_whole and shared.n_free == 0
    shared.end(a)
    assert not a.layers[0].is_whole and shared.n_free == 512


def test_a_sequence_that_happens_to_have_the_whole_pool_gives_it_back():
    shared = pool(0)
    state = shared.sequence()
    extend(state, list(range(1024)))
    assert shared.n_free == 0 and not state.layers[0].is_whole  # its blocks may change
    state.truncate(100)
    assert shared.n_free == 1024 - 128


def test_tables_cost_no_more_than_what_changes(monkeypatch):
    """Advancing reads only blocks that are newly released; rows of a reserved table read none."""
    released, release = [], Table._release
    monkeypatch.setattr(
        Table, "_release", lambda table, i: (released.append(i), release(table, i))[1]
    )
    table = Table(Blocks(4), 64 * 4096, window=100)
    for n in range(64, 64 * 4096, 64):
        table.reserve(n)
        table.release_unseen(n)
        assert table.first_kept == table.first_needed(n) // 64 * 64
    assert released == list(range(table.first_kept // 64)) and len(released) > 4000

    class Untouched(list):
        def __getitem__(self, i):
            raise AssertionError("reads the blocks")

        def __iter__(self):
            raise AssertionError("reads the blocks")

    whole = Table.alone(4096)
    whole.blocks = Untouched(whole.blocks)
    assert whole.run == slice(0, 4096) and whole.rows(100, 200) == slice(100, 200)
    whole.truncate(7)


def test_sequences_share_a_pool_and_never_see_each_other():
    shared = pool(0, n_sequences=3)
    a, b, c = (shared.sequence() for _ in range(3))
    expected = {id(a): [], id(b): [], id(c): []}
    generator = torch.Generator().manual_seed(1)
    for n in torch.randint(1, 60, (24,), generator=generator).tolist():
        state = (a, b, c)[n % 3]
        if sum(map(len, expected.values())) + n > 800:
            shared.end(c)
            c = shared.sequence()
            expected = {id(a): expected[id(a)], id(b): expected[id(b)], id(c): []}
            continue
        numbers = torch.randint(0, 10**6, (n,), generator=generator).tolist()
        extend(state, numbers)
        expected[id(state)] += numbers
        for one in (a, b, c):
            assert held(one, 0) == expected[id(one)]
    assert not all(one.layers[0].is_whole for one in (a, b, c))
    shared.end(a)
    shared.end(b)
    shared.end(c)
    assert shared.n_free == 1024


def test_a_full_pool_is_an_error_and_harms_nothing():
    shared = pool(0, n_tokens=256, n_sequences=2)
    a, b = shared.sequence(), shared.sequence()
    extend(a, list(range(200)))
    with pytest.raises(UsageError, match="all 256 positions"):
        extend(b, list(range(70)))
    extend(a, [7, 8])
    assert held(a, 0)[-3:] == [199, 7, 8]
    with pytest.raises(ShapeError, match="300 tokens do not fit a sequence of at most 256"):
        a.reserve(98)


def test_a_sequence_that_has_ended_is_refused():
    shared = pool(0, n_tokens=256, n_sequences=2)
    a, b = shared.sequence(), shared.sequence()
    extend(a, list(range(100)))
    snapshot = a.snapshot()
    shared.end(a)
    shared.end(a)  # changes nothing
    extend(b, list(range(200)))
    for use in (lambda: extend(a, [1]), lambda: a.restore(snapshot)):
        with pytest.raises(UsageError, match="the sequence has ended"):
            use()
    assert held(b, 0) == list(range(200))


def test_layers_with_a_window_keep_no_more_than_it():
    state = pool(0, 100).sequence(reserved=True)
    extend(state, list(range(1000)))
    assert held(state, 0) == list(range(1000))
    assert held(state, 1, 901) == list(range(901, 1000))
    assert sum(b >= 0 for b in state.tables[100].blocks) * BLOCK_TOKENS <= 100 + UBATCH + 64
    with pytest.raises(ShapeError):
        held(state, 1, 500)
    full = pool(0, 100, settings=CacheSettings("f32", "f32", swa_full=True)).sequence()
    extend(full, list(range(1000)))
    assert held(full, 1) == list(range(1000))
    assert full.nbytes > 1.5 * state.nbytes
    full.truncate(3)
    with pytest.raises(UsageError, match="window of 100"):
        state.truncate(3)


def test_going_back_over_a_window_is_refused_and_a_snapshot_helps():
    state = pool(0, 100).sequence()
    extend(state, list(range(300)))
    before = state.snapshot()
    extend(state, list(range(300, 1000)))
    with pytest.raises(UsageError, match="window of 100 no longer have what token 300 sees"):
        state.truncate(300)
    assert state.n_past == 1000
    state.restore(before)
    assert state.n_past == 300 and held(state, 0) == list(range(300))
    assert held(state, 1, 201) == list(range(201, 300))
    extend(state, [5, 6])
    assert held(state, 1, 203) == [*range(203, 300), 5, 6]
    state.truncate(301)  # a short way back is within the window
    assert held(state, 1, 202) == [*range(202, 300), 5]


def test_a_snapshot_survives_other_tokens_in_its_place():
    state = pool(0, 0).sequence()
    extend(state, list(range(100)))
    early = state.snapshot()
    extend(state, list(range(100, 250)))
    late = state.snapshot()
    state.truncate(60)
    extend(state, [9] * 120)
    assert held(state, 1) == [*range(60), *[9] * 120]
    third = state.snapshot()
    state.restore(late)
    assert held(state, 0) == held(state, 1) == list(range(250))
    state.restore(early)
    assert held(state, 0) == list(range(100))
    state.restore(third)
    assert held(state, 0) == [*range(60), *[9] * 120]
    state.clear()
    extend(state, [1, 2, 3])
    state.restore(late)
    assert held(state, 0) == list(range(250))
    with pytest.raises(UsageError, match="another sequence"):
        pool(0).sequence().restore(late)


def test_a_recurrent_state_goes_back_by_snapshots_only():
    state = pool(0).sequence()
    state.layers.append(Recurrent())
    state.windows.append(0)
    state.n_layers += 1
    extend(state, [1, 2, 3])
    before = state.snapshot()
    extend(state, [4])
    with pytest.raises(UsageError, match="layer 1 has a recurrent state, which cannot go back"):
        state.truncate(3)
    state.restore(before)
    assert state.n_past == 3 and state.layers[1].sum == 6
    state.truncate(0)
    assert state.n_past == 0 and state.layers[1].sum == 0


def test_tables_name_rows_one_by_one_where_they_do_not_follow_each_other():
    blocks = Blocks(4)
    a, b = Table(blocks, 256), Table(blocks, 256)
    a.reserve(10)
    b.reserve(10)
    a.reserve(100)
    assert b.rows(0, 10) == slice(64, 74)
    found = a.rows(60, 70)
    assert found.tolist() == [60, 61, 62, 63, 128, 129, 130, 131, 132, 133]
    assert a.rows(70, 80) == slice(134, 144)
    a.truncate(64)
    assert blocks.n_free == 2
    with pytest.raises(ShapeError):
        a.rows(60, 70)


@pytest.mark.parametrize("n, total", [(1, 9), (5, 9), (9, 9), (3, 30)])
@pytest.mark.parametrize("window", [0, 1, 4, 100])
def test_windows_sinks_and_caps_against_a_plain_loop(n, total, window):
    generator = torch.Generator().manual_seed(n + total + window)
    q, k, v = (
        torch.randn(2, m, h, 8, generator=generator) for m, h in ((n, 4), (total, 2), (total, 2))
    )
    sinks, cap, scale = torch.randn(4, generator=generator), 3.0, 0.5
    expected = torch.zeros(2, n, 4, 8)
    plain = torch.zeros(2, n, 4, 8)
    for s in range(2):
        for i in range(n):
            at = total - n + i
            seen = [j for j in range(at + 1) if not window or at - j < window]
            for h in range(4):
                scores = scale * k[s, seen, h // 2] @ q[s, i, h]
                plain[s, i, h] = scores.softmax(0) @ v[s, seen, h // 2]
                capped = torch.cat([cap * torch.tanh(scores / cap), sinks[h : h + 1]])
                expected[s, i, h] = capped.softmax(0)[:-1] @ v[s, seen, h // 2]
    torch.testing.assert_close(attend(q, k, v, scale, window), plain)
    torch.testing.assert_close(attend_with_scores(q, k, v, scale, window=window), plain)
    found = attend_with_scores(q, k, v, scale, window=window, softcap=cap, sinks=sinks)
    torch.testing.assert_close(found, expected)
    mask = visible(n, total, window, CPU)
    assert mask is None or mask.shape == (n, total)


def test_a_table_of_no_positions():
    """Executors ask a cache of capacity 0 whether they can use one."""
    table = Table.alone(0)
    assert table.run == slice(0, 0) and table.rows(0, 0) == slice(0, 0)
