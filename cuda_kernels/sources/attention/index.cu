// The choice of positions of sparse attention (DeepSeek-V3.2, 2025): every token sees the TOP_K positions with the best scores of a small
// attention, score(t, j) = sum over heads of weight_h(t) * relu(q_h(t) . k(j)).
//
//   index_rows    LayerNorm and rotation of new keys, which go to the cache, and rotation of queries
//   index_scores  scores of all positions so far, for the new rows of a step
//   index_select  the numbers of the best positions of each row, ascending
//
// Compiled per shape: HEADS, LENGTH (of queries and keys), N_ROT (their first elements), NEOX_PAIRS, TYPE_K (of the cache), TOP_K.
#include "attention/cache.cuh"
#include "attention/rows.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, SELECT = 1024;
static_assert(LENGTH % 32 == 0 && LENGTH <= 128 && N_ROT % 2 == 0 && N_ROT <= LENGTH, "a shape this is made for");
static_assert(HEADS * LENGTH * 4 <= 40 * 1024 && is_float(TYPE_K), "a shape this is made for");
constexpr int KEY_UNITS = row_bytes(TYPE_K, LENGTH) / 16, IN_UNIT = LENGTH / KEY_UNITS;

// q float32[n, HEADS, LENGTH], rotated in place; k float32[n, LENGTH]; weight, bias float32[LENGTH], bias may be null; angles
// float32[n, N_ROT/2, 2]; cache [capacity, LENGTH]; position: cached positions before these rows. A warp takes a head.
extern "C" __global__ void __launch_bounds__(THREADS)
index_rows(float* q, const float* k, const float* weight, const float* bias, float eps, const float* angles, void* cache,
           const int* position, int n) {
    __shared__ float rows[WARPS][LENGTH];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, job = blockIdx.x * WARPS + warp, p0 = *position;
    wait_for_inputs();
    start_dependents();
    if (job >= n * (HEADS + 1)) return;
    const int i = job / (HEADS + 1), head = job % (HEADS + 1);
    float* row = rows[warp];
    Turns<N_ROT> turns;
    Row<LENGTH> x;
    x.fetch(head < HEADS ? q + (i * HEADS + head) * LENGTH : k + i * LENGTH, lane);
    turns.fetch(angles + i * N_ROT, lane);
    if (head == HEADS) {
        float sum = 0.f;
#pragma unroll
        for (int t = 0; t < Row<LENGTH>::EACH; t++) sum += x.x[t];
        const float mean = warp_sum(sum) / (float)LENGTH;
#pragma unroll
        for (int t = 0; t < Row<LENGTH>::EACH; t++) x.x[t] -= mean;
        const float inverse = x.inverse(eps);
#pragma unroll
        for (int t = 0; t < Row<LENGTH>::EACH; t++)
            x.x[t] = x.x[t] * inverse * weight[32 * t + lane] + (bias ? bias[32 * t + lane] : 0.f);
    }
    x.put(row, lane);
    turns.template apply<NEOX_PAIRS>(row, lane);
    for (int e = lane; e < LENGTH; e += 32) {
        const long long at = (long long)(p0 + i) * LENGTH + e;
        if (head < HEADS) q[(i * HEADS + head) * LENGTH + e] = row[e];
        else if (TYPE_K == F32) ((float*)cache)[at] = row[e];
        else ((u16*)cache)[at] = TYPE_K == BF16 ? float_to_bf16(row[e]) : float_to_half(row[e]);
    }
}

// q float32[n, HEADS, LENGTH], rotated; weights float32[n, HEADS]; keys [capacity, LENGTH]; scores float32[n, stride]. A thread takes a
// position; grid: blocks for the capacity.
extern "C" __global__ void __launch_bounds__(THREADS)
index_scores(const float* q, const float* weights, const uint4* keys, const int* position, float* scores, int stride, int n) {
    __shared__ __align__(16) float query[HEADS * LENGTH];
    __shared__ float share[HEADS];
    const int p0 = *position, first = blockIdx.x * THREADS, at = first + threadIdx.x;
    if (first >= p0 + n) return;
    wait_for_inputs();
    start_dependents();
    float key[LENGTH];
#pragma unroll
    for (int u = 0; u < KEY_UNITS; u++) {
        const uint4 w = at < p0 + n ? __ldcg(keys + (long long)at * KEY_UNITS + u) : make_uint4(0, 0, 0, 0);
        const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int e = 0; e < IN_UNIT; e++) {
            const u16 bits = (u16)(words[e / 2] >> 16 * (e % 2));
            key[IN_UNIT * u + e] = TYPE_K == F32 ? __uint_as_float(words[e]) : TYPE_K == BF16 ? bf16_to_float(bits) : half_to_float(bits);
        }
    }
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        __syncthreads();
        for (int e = threadIdx.x; e < HEADS * LENGTH; e += THREADS) query[e] = __ldcg(q + i * HEADS * LENGTH + e);
        for (int e = threadIdx.x; e < HEADS; e += THREADS) share[e] = __ldcg(weights + i * HEADS + e);
        __syncthreads();
        float sum = 0.f;
#pragma unroll 1
        for (int head = 0; head < HEADS; head++) {
            float dot = 0.f;
#pragma unroll
            for (int u = 0; u < LENGTH / 4; u++) {
                const float4 x = *(const float4*)(query + head * LENGTH + 4 * u);
                dot = fmaf(x.x, key[4 * u], fmaf(x.y, key[4 * u + 1], fmaf(x.z, key[4 * u + 2], fmaf(x.w, key[4 * u + 3], dot))));
            }
            sum = fmaf(share[head], fmaxf(dot, 0.f), sum);
        }
        if (at < p0 + n) scores[(long long)i * stride + at] = sum;
    }
}

// Larger numbers for larger floats; 0 and -0 are equal.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = __float_as_uint(x + 0.f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ u32 sum_before(u32 x, int lane) {  // of the lanes before
    u32 sum = x;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(0xffffffff, sum, d);
        if (lane >= d) sum += other;
    }
    return sum - x;
}

// scores float32[rows, stride]; row i has *position + i + 1 of them. chosen int32[rows, TOP_K]: the positions with the largest scores,
// lower ones among equals, ascending; all positions of a row that has no more, then -1. A block takes a row.
//
// The TOP_K-th largest score is found a byte at a time: `prefix` has its bytes so far, `need` is its rank among the scores that begin so.
extern "C" __global__ void __launch_bounds__(SELECT)
index_select(const float* scores, const int* position, int stride, int* chosen) {
    __shared__ u32 counts[256], warps[2][SELECT / 32], found[2];
    const int row = blockIdx.x, count = *position + row + 1, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    wait_for_inputs();
    start_dependents();
    chosen += (long long)row * TOP_K;
    scores += (long long)row * stride;
    if (count <= TOP_K) {
        for (int j = thread; j < TOP_K; j += SELECT) chosen[j] = j < count ? j : -1;
        return;
    }
    u32 prefix = 0, mask = 0, need = TOP_K;
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (thread < 256) counts[thread] = 0;
        __syncthreads();
        for (int j = thread; j < count; j += SELECT) {
            const u32 key = ordered(__ldcg(scores + j));
            if ((key & mask) == prefix) atomicAdd(&counts[key >> shift & 255], 1u);
        }
        __syncthreads();
        if (warp == 0) {  // a lane takes 8 bytes, from the largest on
            u32 mine = 0;
#pragma unroll
            for (int b = 0; b < 8; b++) mine += counts[255 - 8 * lane - b];
            u32 before = sum_before(mine, lane);
            if (before < need && need <= before + mine) {
                int byte = 255 - 8 * lane;
                for (; before + counts[byte] < need; byte--) before += counts[byte];
                found[0] = byte;
                found[1] = need - before;
            }
        }
        __syncthreads();
        prefix |= found[0] << shift;
        mask |= 255u << shift;
        need = found[1];
        __syncthreads();
    }
    // A thread takes neighbouring positions, and knows how many are chosen before them.
    const int share = (count + SELECT - 1) / SELECT, first = min(thread * share, count), last = min(first + share, count);
    u32 larger = 0, equal = 0;
    for (int j = first; j < last; j++) {
        const u32 key = ordered(__ldcg(scores + j));
        larger += key > prefix, equal += key == prefix;
    }
    u32 larger_before = sum_before(larger, lane), equal_before = sum_before(equal, lane);
    if (lane == 31) warps[0][warp] = larger_before + larger, warps[1][warp] = equal_before + equal;
    __syncthreads();
    for (int w = 0; w < warp; w++) larger_before += warps[0][w], equal_before += warps[1][w];
    for (int j = first; j < last; j++) {
        const u32 key = ordered(__ldcg(scores + j));
        const bool taken = key > prefix || (key == prefix && equal_before < need);
        if (taken) chosen[larger_before + (equal_before < need ? equal_before : need)] = j;
        larger_before += key > prefix, equal_before += key == prefix;
    }
}
