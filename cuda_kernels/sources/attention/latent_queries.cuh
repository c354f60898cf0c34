// latent_queries of mla.cu: new rows of the cache, and queries by W_k; and products with matrices of heads.
#pragma once

// The factor of queries at a position.
__device__ __forceinline__ float temperature(int position) {
    return TEMPERATURE ? 1.f + (float)(TEMPERATURE) * log1pf((float)(position / TEMPERATURE_LENGTH)) : 1.f;
}

__device__ __forceinline__ float2 two_halves(u32 w) {
    return HALF ? make_float2(half_to_float((u16)w), half_to_float((u16)(w >> 16)))
                : make_float2(bf16_to_float((u16)w), bf16_to_float((u16)(w >> 16)));
}

// COUNT rows of a matrix with COLS columns, by all threads: LANES of them share a row.
template <int COLS, int COUNT>
struct Rows {
    static constexpr int UNITS = COLS / 8;
    static constexpr int LANES = UNITS % 32 == 0 ? 32 : UNITS % 16 == 0 ? 16 : UNITS % 8 == 0 ? 8 : 4;
    static constexpr int EACH = (UNITS + LANES - 1) / LANES, GROUPS = THREADS / LANES, MINE = (COUNT + GROUPS - 1) / GROUPS;
    uint4 w[MINE][EACH];
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;

    // Rows first .. first+COUNT-1 of `total` rows at `from`. A plain load of memory that no kernel writes would be moved to where it is
    // needed, after the wait for the previous launch.
    __device__ __forceinline__ void load(const uint4* from, int first, int total) {
#pragma unroll
        for (int m = 0; m < MINE; m++)
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const int row = first + group + GROUPS * m, unit = lane + LANES * e;
                const bool inside = group + GROUPS * m < COUNT && row < total && unit < UNITS;
                w[m][e] = inside ? __ldcg(from + (long long)row * UNITS + unit) : make_uint4(0, 0, 0, 0);
            }
    }

    // put(row, product) for every row that is there, in its first lane.
    template <typename Put>
    __device__ __forceinline__ void times(const float* x, int first, int total, Put put) const {
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            float sum = 0.f;
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const int unit = min(lane + LANES * e, UNITS - 1);  // zeros of w beyond the last
                const float4 a = *(const float4*)(x + 8 * unit), b = *(const float4*)(x + 8 * unit + 4);
                const float2 p = two_halves(w[m][e].x), q = two_halves(w[m][e].y), s = two_halves(w[m][e].z), t = two_halves(w[m][e].w);
                sum = fmaf(p.x, a.x, fmaf(p.y, a.y, fmaf(q.x, a.z, fmaf(q.y, a.w, sum))));
                sum = fmaf(s.x, b.x, fmaf(s.y, b.y, fmaf(t.x, b.z, fmaf(t.y, b.w, sum))));
            }
#pragma unroll
            for (int d = LANES / 2; d; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
            const int row = first + group + GROUPS * m;
            if (lane == 0 && group + GROUPS * m < COUNT && row < total) put(row, sum);
        }
    }
};

// q float32[ROWS, HEADS, NOPE + ROPE]; kv float32[ROWS, RANK + ROPE]; norm float32[RANK]; angles float32[ROWS, ROPE/2, 2];
// w_k half[HEADS, RANK, NOPE]; cache [capacity, DK]; position: cached positions before these rows; queries [pairs, 2, DK] in the
// type of the cache, the rounded values and the rounding errors. Grid (HEADS + 1, ceil(RANK / KEY_ROWS)).
extern "C" __global__ void __launch_bounds__(THREADS)
latent_queries(const float* q, const float* kv, const float* __restrict__ norm, float eps, const float* angles,
               const uint4* __restrict__ w_k, u8* cache, const int* __restrict__ position, float scale, u16* queries) {
    __shared__ __align__(16) float x[ROWS * (DK > NOPE ? DK : NOPE)];
    constexpr int KEPT = TYPE_K == F32 ? 4 * DK : STRIDE_K;
    __shared__ __align__(16) char kept[WARPS * KEPT];
    __shared__ float absorbed[HADAMARD ? ROWS * KEY_ROWS : 1];
    const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, p0 = *position;
    const bool is_head = head < HEADS;
    const int first = blockIdx.y * KEY_ROWS;
    Rows<NOPE, KEY_ROWS> rows;
    if (is_head) rows.load(w_k + (long long)head * RANK * (NOPE / 8), first, RANK);
    wait_for_inputs();
    start_dependents();
    if (!is_head) {  // the new rows of the cache
        if (blockIdx.y || warp >= ROWS) return;
        Row<RANK> c, weight;
        Row<ROPE> k;
        Turns<ROPE> turns;
        c.fetch(kv + warp * DK, lane);
        k.fetch(kv + warp * DK + RANK, lane);
        weight.fetch(norm, lane);
        turns.fetch(angles + warp * ROPE, lane);
        float* row = x + warp * DK;
        c.norm(weight, eps);
        k.put(row, lane);
        turns.template apply<NEOX_PAIRS>(row, lane);
        c.put(row + ROPE, lane);
        if (HADAMARD) hadamard_row(row, DK, HADAMARD, lane);
        store_row<TYPE_K, DK>(row, fields_of<TYPE_K, DK>(cache + (long long)(p0 + warp) * ROW_K), kept + warp * KEPT, lane);
        return;
    }
    const auto factor = [&](int row) { return scale * temperature(p0 + row) * LOG2E; };  // exponentials are powers of 2
    const auto put = [&](int row, int i, float value) {
        u16* to = queries + ((long long)row * HEADS + head) * 2 * DK + i;
        two_parts(value, to, to + DK);
    };
    for (int i = threadIdx.x; i < ROWS * NOPE; i += THREADS) {
        const int row = i / NOPE;
        x[i] = __ldcg(q + ((long long)row * HEADS + head) * (NOPE + ROPE) + i % NOPE) * factor(row);
    }
    __syncthreads();
    const int count = min(KEY_ROWS, RANK - first);
#pragma unroll 1
    for (int row = 0; row < ROWS; row++)
        rows.times(x + row * NOPE, first, RANK, [&](int i, float sum) {
            if (HADAMARD) absorbed[row * KEY_ROWS + i - first] = sum;
            else put(row, ROPE + i, sum);
        });
    if (HADAMARD) {
        __syncthreads();
        if (warp < ROWS) {
            hadamard_row(absorbed + warp * KEY_ROWS, count, HADAMARD, lane);
            for (int i = lane; i < count; i += 32) put(warp, ROPE + first + i, absorbed[warp * KEY_ROWS + i]);
        }
    }
    if (blockIdx.y) return;
    __syncthreads();
    if (warp >= ROWS) return;
    Row<ROPE> turned;
    Turns<ROPE> turns;
    turned.fetch(q + ((long long)warp * HEADS + head) * (NOPE + ROPE) + NOPE, lane);
    turns.fetch(angles + warp * ROPE, lane);
    float* row = x + warp * ROPE;
    turned.put(row, lane);
    turns.template apply<NEOX_PAIRS>(row, lane);
    if (HADAMARD) hadamard_row(row, ROPE, HADAMARD, lane);
    for (int i = lane; i < ROPE; i += 32) put(warp, i, row[i] * factor(warp));
}
