"""Sums and joins of a step over GPUs without a GPU: the source of `step/peer.cu`, compiled by g++.
A rank is a thread of the CPU, and plays the threads of its blocks one after the other.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from iqforge.cuda_kernels.compile.spec import expand
from iqforge.cuda_kernels.peer.links import PeerLinks

from .host_library import host_library

pytestmark = pytest.mark.slow  # to compile

FOLDER = Path(__file__).parent
HEADERS = [FOLDER / f"{name}_on_host.hpp" for name in ("kernels", "ranks")]
SIZES = (2, 3, 4, 8)
PER_BLOCK = 512  # elements: THREADS * EACH


@pytest.fixture(scope="module", params=SIZES)
def library(request, tmp_path_factory) -> tuple[int, ctypes.CDLL]:
    """Return (the number of ranks, its kernels)."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed: the kernels are not tried on the CPU")
    included = "".join(f'#include "{header}"\n' for header in HEADERS)
    kernels, run = expand(("step/peer.cu",)), FOLDER / "sums_on_host.hpp"
    program = f'{included}#define RANKS {request.param}\n{kernels}\n#include "{run}"\n'
    return request.param, host_library(tmp_path_factory.mktemp("sums") / "sums", program)


class Memory:
    """What ranks let each other write to, for blocks of PER_BLOCK elements."""

    def __init__(self, n_ranks: int, blocks: int):
        self.units = blocks * PER_BLOCK // 2
        self.held = torch.zeros(n_ranks, 2 * n_ranks * self.units * 4, dtype=torch.int32)
        addresses = [one.data_ptr() for one in self.held] + [0] * (8 - n_ranks)
        self.addresses = torch.tensor(addresses, dtype=torch.int64)
        self.missing = torch.zeros(n_ranks, dtype=torch.int32)

    def arguments(self, seconds: float) -> tuple:
        return (
            ctypes.c_uint32(self.units),
            pointer(self.addresses),
            ctypes.c_uint64(int(seconds * 1e9)),
        )


def pointer(x: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


@pytest.mark.parametrize("assign", [False, True])
def test_all_ranks_have_the_sum_in_the_order_of_ranks(library, assign):
    """In two places in turn, with a last block that is not full."""
    n_ranks, kernels = library
    exchanges, n = 5, 2 * PER_BLOCK + 76
    generator = torch.Generator().manual_seed(n_ranks)
    x, memory = torch.randn(exchanges, n_ranks, n, generator=generator), Memory(n_ranks, 3)
    start = torch.randn(exchanges, 1, n, generator=generator).repeat(1, n_ranks, 1)
    expected = x[:, 0].clone()
    for rank in range(1, n_ranks):
        expected += x[:, rank]
    if not assign:
        expected += start[:, 0]
    h = start.clone()
    sizes = pointer(x), pointer(h), exchanges, int(assign), n
    stopped = kernels.sums(*sizes, *memory.arguments(60), -1, pointer(memory.missing))
    assert not stopped and not memory.missing.any()
    assert torch.equal(h, expected[:, None].expand_as(h)) and not x.any()


def test_a_rank_that_does_not_come_is_named(library):
    n_ranks, kernels = library
    x, memory = torch.ones(1, n_ranks, 8), Memory(n_ranks, 1)
    h, absent = torch.zeros_like(x), n_ranks - 1
    sizes = pointer(x), pointer(h), 1, 0, 8
    stopped = kernels.sums(*sizes, *memory.arguments(0.2), absent, pointer(memory.missing))
    assert stopped == n_ranks - 1
    assert memory.missing.tolist() == [n_ranks] * (n_ranks - 1) + [0]


@pytest.mark.parametrize("rows", [1, 3])
def test_all_ranks_have_the_columns_of_all(library, rows):
    """Ranks have different numbers of columns, also such that no multiple of 4 divides."""
    n_ranks, kernels = library
    counts = [37 + 150 * (rank % 3) for rank in range(n_ranks)]
    ends = torch.tensor(counts).cumsum(0)
    width, exchanges = int(ends[-1]), 3
    most = -(-max(counts) // 4) * 4
    memory = Memory(n_ranks, -(-rows * most // PER_BLOCK))
    whole = torch.arange(rows * width).float().view(rows, width)
    x = torch.cat([part.reshape(-1) for part in whole.split(counts, dim=1)])
    out = torch.zeros(exchanges, n_ranks, rows, width)
    padded = torch.tensor(ends.tolist() + [width] * (8 - n_ranks), dtype=torch.int32)
    sizes = pointer(x), pointer(out), exchanges, rows, width, most, pointer(padded)
    stopped = kernels.joins(*sizes, *memory.arguments(60), pointer(memory.missing))
    assert not stopped and torch.equal(out, whole.expand_as(out))


def test_a_launch_gathers_no_more_rows_than_find_a_place_at_once(monkeypatch):
    links = object.__new__(PeerLinks)
    links.rank, links.n_ranks, links.elements, links._units = 1, 2, 1 << 30, 0
    links._numbers = links._missing = links._most = None
    links._peers, launched = [0] * 8, []
    monkeypatch.setattr(
        PeerLinks,
        "_launch",
        lambda self, name, n, x, out, *more: launched.append((name, n, x, out, int(more[0]))),
    )
    x, out = torch.randn(8, 100_001), torch.zeros(8, 200_000)
    links.gather(x, out, [99_999, 200_000])
    assert [(name, n, rows) for name, n, _, _, rows in launched] == [
        ("peer_gather", 2 * 100_004, 2)
    ] * 4  # of two rows
    assert torch.equal(torch.cat([given for _, _, given, _, _ in launched]), x)
    pieces = [given for _, _, _, given, _ in launched]
    assert [piece.data_ptr() for piece in pieces] == [out[i].data_ptr() for i in range(0, 8, 2)]
    launched.clear()
    links.gather(x[:1], out[:1], [99_999, 200_000])
    assert [(n, rows) for _, n, _, _, rows in launched] == [(100_004, 1)]
