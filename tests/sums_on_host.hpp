// Sums and joins of `step/peer.cu`, which comes before, by ranks that are threads of the CPU. Thread 0 of a block comes last, as it counts the
// block's exchanges when all others have theirs.
#pragma once

template <class Kernel> void on_blocks(int blocks, Kernel kernel) {
    for (unsigned block = 0; block < (unsigned)blocks; block++)
        for (int thread = THREADS - 1; thread >= 0; thread--) {
            blockIdx.x = block, threadIdx.x = thread;
            kernel();
        }
}
#define PEERS p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]

// x, h [exchange, rank, n].
extern "C" int sums(float* x, float* h, int exchanges, int assign, int n, u32 units, const u64* p, u64 most, int absent, u32* missing) {
    return on_ranks(RANKS, absent, [&](int rank) {
        const int blocks = (n + THREADS * EACH - 1) / (THREADS * EACH);
        std::vector<u32> numbers(blocks, 0);
        for (int e = 0; e < exchanges; e++) {
            const size_t part = ((size_t)e * RANKS + rank) * n;
            on_blocks(blocks, [&] {
                peer_sum(x + part, h + part, assign, n, numbers.data(), missing + rank, most, rank, units, p[rank], PEERS);
            });
        }
    });
}

// x: the columns of each rank, one after the other [ranks][rows, own]; out [exchange, rank, rows, width].
extern "C" int joins(const float* x, float* out, int exchanges, int rows, int width, int most_cols, const int* e, u32 units, const u64* p,
                     u64 most, u32* missing) {
    return on_ranks(RANKS, -1, [&](int rank) {
        const int blocks = (rows * most_cols + THREADS * EACH - 1) / (THREADS * EACH), first = rank ? e[rank - 1] : 0, own = e[rank] - first;
        std::vector<u32> numbers(blocks, 0);
        for (int number = 0; number < exchanges; number++)
            on_blocks(blocks, [&] {
                peer_gather(x + (size_t)rows * first, out + ((size_t)number * RANKS + rank) * rows * width, rows, width, most_cols,
                            numbers.data(), missing + rank, most, rank, units, p[rank], first, own, e[0], e[1], e[2], e[3], e[4], e[5], e[6],
                            e[7], PEERS);
            });
    });
}
