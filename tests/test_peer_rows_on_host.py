"""Sums of rows over GPUs without a GPU: the source of `prompt/peer.cu`, compiled by g++. A rank is
a thread of the CPU, and takes its rows one after the other.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from iqforge.cuda_kernels.compile.spec import expand
from iqforge.cuda_kernels.peer.rows import memory_bytes, place_bytes

from .host_library import host_library

pytestmark = pytest.mark.slow  # to compile

HEADERS = [Path(__file__).parent / f"{name}_on_host.hpp" for name in ("kernels", "ranks")]
NOTHING = 0x80008000
TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

# y[exchange, rank, row, column] becomes the sum; a rank that is `absent` never comes.
RUN = """
extern "C" int run(float* y, int exchanges, int ranks, const int* tokens, int most_rows, int width,
                   u64 place, const u64* peers, int moved, u64 most, int absent, u32* missing) {
    return on_ranks(ranks, absent, [&](int rank) {
        u32 state[3] = {};
        const Exchange e{state, missing + rank, peers, most, place, rank, ranks, moved};
        for (int number = 1; number <= exchanges; number++)
            for (int t = 0; t < tokens[number - 1]; t++)
                for (int thread = 0; thread < NORM_THREADS; thread++) {
                    threadIdx.x = thread;
                    float own[UNITS_K][8] = {};
                    const size_t part = (size_t)(number - 1) * ranks + rank;
                    float* row = y + (part * most_rows + t) * width;
                    for (int i = 0; i < UNITS_K; i++) {
                        const int unit = thread + i * NORM_THREADS;
                        if (unit < width / 8) memcpy(own[i], row + unit * 8, 32);
                    }
                    meet<UNITS_K>(own, t, number, tokens[number - 1], width, e);
                    for (int i = 0; i < UNITS_K; i++) {
                        const int unit = thread + i * NORM_THREADS;
                        if (unit < width / 8) memcpy(row + unit * 8, own[i], 32);
                    }
                }
    });
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed: the kernels are not tried on the CPU")
    defines = "#define HALF 0\nconstexpr int UNITS_K = 2;\n"
    included = "".join(f'#include "{header}"\n' for header in HEADERS)
    program = f"{included}{defines}{expand(('prompt/peer.cu',))}{RUN}"
    return host_library(tmp_path_factory.mktemp("peer") / "peer", program)


def meet(
    library: ctypes.CDLL,
    y: torch.Tensor,
    tokens: list[int],
    moved: torch.dtype,
    absent: int = -1,
    seconds: float = 60,
) -> tuple[int, list[int], torch.Tensor]:
    """Let ranks sum y float32[exchanges, ranks, rows, width] in place. Return how many stopped, for
    whom each waited (plus 1), and their memory.
    """
    exchanges, n_ranks, rows, width = y.shape
    memory = torch.full(
        (n_ranks, memory_bytes(n_ranks, [(rows, moved)], width) // 4),
        NOTHING - 2**32,
        dtype=torch.int32,
    )
    peers = torch.tensor([one.data_ptr() for one in memory], dtype=torch.int64)
    counts = torch.tensor(tokens, dtype=torch.int32)
    missing = torch.zeros(n_ranks, dtype=torch.int32)
    stopped = library.run(
        ctypes.c_void_p(y.data_ptr()),
        exchanges,
        n_ranks,
        ctypes.c_void_p(counts.data_ptr()),
        rows,
        width,
        ctypes.c_uint64(place_bytes(n_ranks, rows, width, moved)),
        ctypes.c_void_p(peers.data_ptr()),
        TYPES[moved],
        ctypes.c_uint64(int(seconds * 1e9)),
        absent,
        ctypes.c_void_p(missing.data_ptr()),
    )
    return stopped, missing.tolist(), memory


@pytest.mark.parametrize("moved", TYPES)
@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
def test_every_rank_has_the_same_sum(library, n_ranks, moved):
    """Exchanges of different numbers of rows, also fewer than ranks, in two places in turn."""
    tokens = [5, 1, 7, 2]
    generator = torch.Generator().manual_seed(n_ranks)
    y = torch.randn(len(tokens), n_ranks, max(tokens), 2056, generator=generator)
    y[0, 0, 0, :16] = -0.0  # two of them are the word that says: nothing yet
    parts = y.clone()
    stopped, missing, memory = meet(library, y, tokens, moved)
    assert not stopped and not any(missing)
    for exchange, n in enumerate(tokens):
        # Parts are rounded and added in the order of ranks. More than two ranks round the sum.
        sent = parts[exchange, :, :n].to(moved).float()
        total = sent[0]
        for part in sent[1:]:
            total = total + part
        if n_ranks > 2:
            total = total.to(moved).float()
        for rank in range(n_ranks):
            assert torch.equal(y[exchange, rank, :n], total), (exchange, rank)
    assert (memory == NOTHING - 2**32).all(), "all words are set back for later exchanges"


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_a_rank_that_does_not_come_is_named(library, n_ranks):
    y = torch.ones(1, n_ranks, n_ranks, 16)
    stopped, missing, _ = meet(library, y, [n_ranks], torch.float32, absent=1, seconds=0.2)
    assert stopped == n_ranks - 1 and 2 in missing
