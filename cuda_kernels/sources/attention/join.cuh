// Join what blocks found in their ranges of positions. Range s of a row of scores left its maximum
// at maxima[s * PART], and the sum of its exponentials R floats after that.
#pragma once
#include "step/common.cuh"

// How much each of the `active` ranges counts in a row, to share[0 .. active-1]; by one warp, whose lanes read AHEAD ranges at once.
template <int PART, int R, int AHEAD>
__device__ __forceinline__ void shares_of_ranges(const float* maxima, int active, float* share, int lane) {
    float most = -INFINITY, sum = 0.f;
    for (int first = lane; first < active; first += 32 * AHEAD) {
        float m[AHEAD], l[AHEAD];  // what is read does not wait for what is added
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int s = first + 32 * i;
            m[i] = s < active ? __ldcg(maxima + s * PART) : -INFINITY;
            l[i] = s < active ? __ldcg(maxima + s * PART + R) : 0.f;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int s = first + 32 * i;
            if (s >= active) break;
            const float now = fmaxf(most, m[i]), base = now == -INFINITY ? 0.f : now;
            sum = fmaf(sum, exp2f(most - base), l[i] * exp2f(m[i] - base));
            most = now;
            share[s] = m[i];
        }
    }
    const float all = warp_max(most);
    sum = warp_sum(sum * exp2f(most - all));
    for (int s = lane; s < active; s += 32) share[s] = exp2f(share[s] - all) / sum;
}

// A range's part of four elements.
__device__ __forceinline__ void add_range(float4& sum, float factor, float4 x) {
    sum.x = fmaf(factor, x.x, sum.x), sum.y = fmaf(factor, x.y, sum.y);
    sum.z = fmaf(factor, x.z, sum.z), sum.w = fmaf(factor, x.w, sum.w);
}

// Add N ranges from `first` on, of which those from `until` on do not count.
template <int PART, int N, bool ALL>
__device__ __forceinline__ void add_ranges(float4& sum, const float* mixes, int first, int until, const float* share) {
    const float* parts = mixes + (long long)first * PART;
    float4 x[N];  // all are read before the first is added
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = __ldcg((const float4*)(parts + (ALL ? i : min(i, until - first - 1)) * PART));
#pragma unroll
    for (int i = 0; i < N; i++)
        if (ALL || first + i < until) add_range(sum, share[first + i], x[i]);
}

// The sum of four elements, at mixes[s * PART] of range s, over ranges from .. until-1 in their order. AHEAD (8 or more) are read at once.
template <int PART, int AHEAD = 8>
__device__ __forceinline__ float4 join_ranges(const float* mixes, int from, int until, const float* share) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    int s = from;
#pragma unroll 1
    for (; until - s >= AHEAD; s += AHEAD) add_ranges<PART, AHEAD, true>(sum, mixes, s, until, share);
#pragma unroll 1
    for (; s < until; s += 8) add_ranges<PART, 8, false>(sum, mixes, s, until, share);
    return sum;
}

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
