// Join what blocks found in their ranges of positions, by several blocks that arrive last (`LastToArrive`).
#pragma once
#include "attention/join.cuh"

// Rows of sums over ranges, R * LENGTH floats of each in `parts`, divided among PIECES blocks of THREADS threads.
template <int R, int LENGTH, int PIECES, int THREADS>
struct JoinPiece {
    static constexpr int COLUMNS = R * LENGTH / 4, EACH = (COLUMNS + PIECES - 1) / PIECES;  // of four elements; of a block
    static constexpr int MOST = THREADS / EACH;
    static constexpr int GROUPS = MOST >= 8 ? 8 : MOST >= 4 ? 4 : MOST >= 2 ? 2 : 1;  // of threads, which divide the ranges
    static constexpr int AT_ONCE = THREADS / GROUPS, AHEAD = 10;

    const int first, last, warp = threadIdx.x / 32, lane = threadIdx.x % 32;  // columns

    __device__ __forceinline__ explicit JoinPiece(int piece) : first(piece * EACH), last(min(COLUMNS, first + EACH)) {}

    __device__ __forceinline__ int first_row() const { return 4 * first / LENGTH; }
    __device__ __forceinline__ int end_of_rows() const { return (4 * last + LENGTH - 1) / LENGTH; }

    // put(i, sum) for elements i .. i + 3 of all rows. `share`: R * active floats; `sums`: a float4 of each thread.
    template <int PART, typename Put>
    __device__ __forceinline__ void join(const float* parts, int active, float* share, float4* sums, Put put) const {
        const int each = (active + GROUPS - 1) / GROUPS, from = min(active, (int)threadIdx.x / AT_ONCE * each), until = min(active, from + each);
#pragma unroll 1
        for (int base = first; base < last; base += AT_ONCE) {
            const int column = base + threadIdx.x % AT_ONCE;
            const bool mine = column < last;
            const float* mixes = parts + 4 * (mine ? column : first);
            float4 x[AHEAD], sum = make_float4(0.f, 0.f, 0.f, 0.f);
            // The first ranges arrive while their shares are computed.
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                x[i] = mine && from + i < until ? __ldcg((const float4*)(mixes + (long long)(from + i) * PART)) : sum;
            if (base == first) {
                for (int r = first_row() + warp; r < end_of_rows(); r += THREADS / 32)
                    shares_of_ranges<PART, R, 2>(parts + R * LENGTH + r, active, share + r * active, lane);
                __syncthreads();
            }
            const float* of_row = share + (mine ? 4 * column / LENGTH : first_row()) * active;
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (from + i < until) add_range(sum, of_row[from + i], x[i]);
            if (mine && until - from > AHEAD) {
                const float4 rest = join_ranges<PART>(mixes, from + AHEAD, until, of_row);
                add_range(sum, 1.f, rest);
            }
            sums[threadIdx.x] = sum;
            __syncthreads();
            if (threadIdx.x < AT_ONCE && mine) {
#pragma unroll
                for (int g = 1; g < GROUPS; g++) add_range(sum, 1.f, sums[g * AT_ONCE + threadIdx.x]);
                put(4 * column, sum);
            }
            __syncthreads();
        }
    }
};
