// Join what blocks found in their ranges of positions, by one or several blocks of N_WARPS warps that wait for the others' parts (parts.cuh). A launch runs
// this once, and instructions that are run once take as long as it takes to fetch them: so there are few.
#pragma once
#include "step/parts.cuh"

// A block joins `rows` of R rows of LENGTH elements. A warp takes 128 elements of a row at a time, of all ranges or (SHARED_RANGES) of a slice of them.
// What warps found in the slices is joined in their order. A part has R * LENGTH floats of mixes, then a maximum and a sum of every row, for each chunk
// of 128 elements.
template <int R, int LENGTH, int N_WARPS, bool SHARED_RANGES>
struct JoinedRows {
    static constexpr int CHUNKS = (LENGTH + 127) / 128, PART = R * LENGTH + (2 * R * CHUNKS + 3) / 4 * 4, AHEAD = 8;
    struct Found {  // by a warp
        float4 mix[32];
        float most, sum, other[2];
    };

    const int rows, units = rows * CHUNKS, slices = SHARED_RANGES ? max(1, N_WARPS / units) : 1;  // slices: of the ranges
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    __device__ __forceinline__ explicit JoinedRows(int rows) : rows(rows) {}

    // Where a part has the maximum and the sum of a row, for the warp that joins a chunk of 128 elements.
    static __device__ __forceinline__ float* sums_of(float* part, int r, int chunk) { return part + R * LENGTH + 2 * (r * CHUNKS + chunk); }

    // put(r, i, x) for elements i .. i + 3 of rows from `first` on. `found`: with SHARED_RANGES, N_WARPS of them in shared memory.
    template <typename Put>
    __device__ __forceinline__ void join(int first, float* parts, int active, Found* found, Put put) const {
        const int slice = warp % slices, each = (active + slices - 1) / slices, from = slice * each, until = min(active, from + each);
#pragma unroll 1
        for (int unit = warp / slices; unit < units && first + unit / CHUNKS < R; unit += N_WARPS / slices) {
            const int r = first + unit / CHUNKS, i = unit % CHUNKS * 128 + 4 * lane;
            const bool mine = i < LENGTH;
            float *mixes = parts + (long long)from * PART + r * LENGTH + i, *sums = sums_of(parts, r, unit % CHUNKS);
            float4 mix = make_float4(0.f, 0.f, 0.f, 0.f);
            float most = -INFINITY, sum = 0.f, factor = 0.f;
#pragma unroll 1
            for (int s = from; s < until; s += AHEAD, mixes += AHEAD * PART) {
                const int n = mine ? until - s : 0;
                TwoPairs x[AHEAD];
                ask(x, mixes, PART, n);
                if ((s - from) % 32 == 0) {  // of the next 32 ranges, one for each lane
                    const bool one = s + lane < until;
                    u64 of_range[1];
                    float* at = sums + (long long)(s + lane) * PART;
                    ask(of_range, at, 0, one);
                    take(of_range, at, 0, one);
                    const float m = one ? low_float(of_range[0]) : -INFINITY, now = fmaxf(most, warp_max(m)), base = now == -INFINITY ? 0.f : now;
                    const float before = exp2f(most - base);
                    factor = exp2f(m - base), most = now;
                    sum = fmaf(sum, before, warp_sum(factor * high_float(of_range[0])));
                    mix.x *= before, mix.y *= before, mix.z *= before, mix.w *= before;
                }
                take(x, mixes, PART, n);
#pragma unroll
                for (int k = 0; k < AHEAD; k++) {
                    const float f = __shfl_sync(0xffffffff, factor, (s - from + k) % 32);
                    add(mix, f, make_float4(low_float(x[k].x), high_float(x[k].x), low_float(x[k].y), high_float(x[k].y)));
                }
            }
            if (slices > 1) {
                found[warp].mix[lane] = mix;
                if (lane == 0) found[warp].most = most, found[warp].sum = sum;
            } else if (mine) {
                put(r, i, scaled(mix, sum));
            }
        }
        if (slices == 1) return;
        __syncthreads();
        if (slice || warp / slices >= units) return;
        const Found* of_unit = found + warp;
        float most = -INFINITY, sum = 0.f;
        float4 mix = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int g = 0; g < slices; g++) most = fmaxf(most, of_unit[g].most);
#pragma unroll 1
        for (int g = 0; g < slices; g++) {
            const float f = exp2f(of_unit[g].most - most);
            sum = fmaf(f, of_unit[g].sum, sum);
            add(mix, f, of_unit[g].mix[lane]);
        }
        const int r = first + warp / slices / CHUNKS, i = warp / slices % CHUNKS * 128 + 4 * lane;
        if (i < LENGTH && r < R) put(r, i, scaled(mix, sum));
    }

    static __device__ __forceinline__ void add(float4& mix, float factor, float4 x) {
        mix.x = fmaf(factor, x.x, mix.x), mix.y = fmaf(factor, x.y, mix.y), mix.z = fmaf(factor, x.z, mix.z), mix.w = fmaf(factor, x.w, mix.w);
    }

    static __device__ __forceinline__ float4 scaled(float4 mix, float sum) {
        const float f = __fdividef(1.f, sum);
        return make_float4(mix.x * f, mix.y * f, mix.z * f, mix.w * f);
    }
};
