// latent_values of mla.cu: the join of ranges, and products with W_v.
#pragma once

// On devices with clusters, the blocks of a head are one cluster: each joins its CHUNK of every row and stores it in the shared memory
// of all.
constexpr bool TOGETHER = HAS_CLUSTERS && CLUSTER > 1;
constexpr int ALONE = 3;  // so many ranges every block joins by itself
constexpr int CHUNK = RANK / CLUSTER, UNITS = ROWS * CHUNK / 4, WIDE = UNITS < THREADS ? UNITS : THREADS, GROUPS = THREADS / WIDE;
// With few rows, threads share the ranges of an element.
constexpr int SHARING = 4 * THREADS / (ROWS * RANK) >= 4 ? 4 : 4 * THREADS / (ROWS * RANK) >= 2 ? 2 : 1;
constexpr int SUMS = (TOGETHER ? GROUPS * UNITS * 4 : 4) > (SHARING > 1 ? SHARING * ROWS * RANK : 4) ? GROUPS * UNITS * 4
                     : SHARING > 1 ? SHARING * ROWS * RANK : 4;
static_assert(RANK % (4 * CLUSTER) == 0, "chunks of whole units");

// w_v half[HEADS, VALUE, RANK]; out float32[ROWS, HEADS, VALUE]. Grid (HEADS, ceil(VALUE / VALUE_ROWS)), in clusters (1, CLUSTER).
extern "C" __global__ void __launch_bounds__(THREADS)
latent_values(const float* partial, const int* __restrict__ position, int splits, const uint4* __restrict__ w_v, float* __restrict__ out) {
    __shared__ __align__(16) float x[ROWS * RANK];
    __shared__ float share[ROWS * MOST_SPLITS];
    __shared__ __align__(16) float sums[SUMS];
    const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * VALUE_ROWS;
    const int active = Ranges(seen_of(*position + ROWS), splits).active;
    const bool together = TOGETHER && active > ALONE;
    if (together) arrive_in_cluster();  // the others may store here
    Rows<RANK, VALUE_ROWS> rows;
    rows.load(w_v + (long long)head * VALUE * (RANK / 8), first, VALUE);
    wait_for_inputs();
    start_dependents();
    // The share of every range in each row comes first, then sums whose loads do not wait.
    const auto parts = [&](int row) { return partial + (long long)tile_of(row, head) * splits * PART; };
    // Where blocks join together, a thread's part of its first ranges is on its way meanwhile.
    constexpr int AHEAD = TOGETHER && UNITS <= THREADS ? 12 : 0;
    const int group = threadIdx.x / WIDE, each = (active + GROUPS - 1) / GROUPS, from = min(group * each, active), until = min(from + each, active);
    const auto place = [&](int unit) {  // of the part, in the first range
        const int row = unit / (CHUNK / 4);
        return parts(row) + place_of(row, head) * DV + blockIdx.y * CHUNK + unit % (CHUNK / 4) * 4;
    };
    float4 ahead[AHEAD ? AHEAD : 1];
    if (together && group < GROUPS) {
        const float* mixes = place(threadIdx.x % WIDE);
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (from + j < until) ahead[j] = __ldcg((const float4*)(mixes + (from + j) * PART));
    }
    if (warp < ROWS)
        shares_of_ranges<PART, R, 4>(parts(warp) + R * DV + place_of(warp, head), active, share + warp * MOST_SPLITS, lane);
    __syncthreads();
    if (together) {
        if (group < GROUPS)
            for (int unit = threadIdx.x % WIDE; unit < UNITS; unit += WIDE) {
                const float* shares = share + unit / (CHUNK / 4) * MOST_SPLITS;
                float4 sum = join_ranges<PART>(place(unit), min(from + AHEAD, until), until, shares);
#pragma unroll
                for (int j = 0; j < AHEAD; j++)
                    if (from + j < until) add_range(sum, shares[from + j], ahead[j]);
                *(float4*)(sums + (group * UNITS + unit) * 4) = sum;
            }
        __syncthreads();
        wait_for_cluster();
        for (int i = threadIdx.x; i < UNITS * CLUSTER; i += THREADS) {
            const int unit = i % UNITS, row = unit / (CHUNK / 4);
            float4 sum = *(const float4*)(sums + unit * 4);
#pragma unroll
            for (int g = 1; g < GROUPS; g++) {
                const float4 more = *(const float4*)(sums + (g * UNITS + unit) * 4);
                sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
            store_in_block(x + row * RANK + blockIdx.y * CHUNK + unit % (CHUNK / 4) * 4, i / UNITS, sum);
        }
        arrive_in_cluster();
        wait_for_cluster();
    } else if (SHARING == 1) {
        for (int i = 4 * threadIdx.x; i < ROWS * RANK; i += 4 * THREADS) {
            const int row = i / RANK, r = place_of(row, head);
            *(float4*)(x + i) = join_ranges<PART>(parts(row) + r * DV + i % RANK, 0, active, share + row * MOST_SPLITS);
        }
    } else {
        const int i = 4 * (threadIdx.x % (THREADS / SHARING)), row = i / RANK, r = place_of(row, head), g = threadIdx.x / (THREADS / SHARING);
        const int each = (active + SHARING - 1) / SHARING, from = min(g * each, active);
        if (i < ROWS * RANK)
            *(float4*)(sums + g * ROWS * RANK + i) =
                join_ranges<PART, 16>(parts(row) + r * DV + i % RANK, from, min(from + each, active), share + row * MOST_SPLITS);
        __syncthreads();
        for (int e = threadIdx.x; e < ROWS * RANK; e += THREADS) {
            float sum = sums[e];
#pragma unroll
            for (int s = 1; s < SHARING; s++) sum += sums[s * ROWS * RANK + e];
            x[e] = sum;
        }
    }
    __syncthreads();
    if (HADAMARD) {
        if (warp < ROWS) hadamard_row(x + warp * RANK, RANK, HADAMARD, lane);
        __syncthreads();
    }
#pragma unroll 1
    for (int row = 0; row < ROWS; row++)
        rows.times(x + row * RANK, first, VALUE, [&](int i, float sum) { out[((long long)row * HEADS + head) * VALUE + i] = sum; });
}
