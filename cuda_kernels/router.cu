// The choice of experts for 1 to 8 rows in one launch: norm, float32 router, softmax, the N_USED most probable, weights of sum 1.
//
// A warp takes one of PARTS parts of a router row, read before the launch in front has ended, as weights do not depend on it. What the
// parts add up to goes to one block, which adds the parts and chooses. From sm_90 on the grid is a cluster of CLUSTER blocks and the sums
// go to the first one's shared memory; before, they go to global memory, and the last block to finish chooses.
//
// Compiled per shape: ROWS, WIDTH (a multiple of 4), EXPERTS, N_USED, PARTS, WARPS (of a block), CLUSTER (0: any grid), and LEAST,
// THRESHOLD: experts after the LEAST best only count where their probability exceeds THRESHOLD times the largest.
#include "step_common.cuh"

constexpr int ITEMS = EXPERTS * PARTS, SQUARES = ITEMS;  // one sum for each item, and behind them PARTS sums of squares of h
constexpr int SUMS = ITEMS + PARTS;
constexpr int QUADS = WIDTH / 4, PART = (QUADS + PARTS - 1) / PARTS, EACH = (PART + 31) / 32;  // float4 of a row, of a part, of a lane
constexpr int PER_LANE = (EXPERTS + 31) / 32;
static_assert(WIDTH % 4 == 0 && ROWS <= 8 && N_USED <= EXPERTS && N_USED <= 32 && EXPERTS <= 1024, "a shape this is made for");

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

// A warp chooses for one row. Probabilities are not negative, so their bits order as they do; ties go to the lower expert.
__device__ __forceinline__ void choose(const float* sums, float eps, int* ids, float* weights, int lane) {
    float p[PER_LANE], most = -INFINITY, sum = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < PARTS; i++) squares += sums[SQUARES + i];
    const float inverse = rsqrtf(squares / (float)WIDTH + eps);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int e = 32 * i + lane;
        float dot = 0.f;
#pragma unroll
        for (int part = 0; part < PARTS; part++) dot += e < EXPERTS ? sums[e * PARTS + part] : 0.f;
        p[i] = e < EXPERTS ? dot * inverse : -INFINITY;
        most = fmaxf(most, p[i]);
    }
    most = warp_max(most);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        p[i] = expf(p[i] - most);
        sum += p[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) p[i] = sum > 0.f ? __fdiv_rn(p[i], sum) : 0.f;  // NaN among the logits: NaN as weights

    u32 taken = 0;
    float mine = 0.f, total = 0.f, first = 0.f;
    int chosen = 0;
#pragma unroll 1
    for (int slot = 0; slot < N_USED; slot++) {
        u32 best = 0;  // bits + 1; 0 for a lane that has none left
        int at = 0;
#pragma unroll
        for (int i = PER_LANE - 1; i >= 0; i--)
            if (!(taken >> i & 1) && 32 * i + lane < EXPERTS && __float_as_uint(p[i]) + 1 >= best) best = __float_as_uint(p[i]) + 1, at = i;
        const u32 highest = __reduce_max_sync(0xffffffff, best);
        const int expert = (int)__reduce_min_sync(0xffffffff, best == highest ? (u32)(32 * at + lane) : 0xffffffffu);
        float top = __uint_as_float(highest - 1);
        if (slot == 0) first = top;
        const bool dropped = slot >= LEAST && !(top > THRESHOLD * first);
        if (dropped) top = 0.f;
        if (expert % 32 == lane) taken |= 1u << expert / 32;
        if (slot == lane) {
            mine = top;
            chosen = dropped ? -1 : expert;
        }
        total += top;
    }
    if (lane < N_USED) {
        ids[lane] = chosen;
        weights[lane] = __fdiv_rn(mine, total);
    }
}

// Part `part` of a row of float4, of which a lane has every 32nd.
__device__ __forceinline__ float4 quad(const float* row, int part, int i, int lane) {
    const int at = 32 * i + lane;
    return at < PART && part * PART + at < QUADS ? __ldcg((const float4*)row + part * PART + at) : make_float4(0.f, 0.f, 0.f, 0.f);
}

// h float32[ROWS, WIDTH]; norm float32[WIDTH]; router float32[EXPERTS, WIDTH]; partial float32[ROWS, SUMS], ticket u32, zero (both
// without a cluster only); ids int32[ROWS, N_USED], weights float32[ROWS, N_USED], most probable first.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
router(const float* __restrict__ h, const float* __restrict__ norm, float eps, const float* __restrict__ matrix, float* partial,
       u32* ticket, int* __restrict__ ids, float* __restrict__ weights) {
    start_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float4 w[EACH];  // of the router, times the weights of the norm
    auto fetch = [&](int item) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float4 x = quad(matrix + (long long)(item / PARTS) * WIDTH, item % PARTS, i, lane), s = quad(norm, item % PARTS, i, lane);
            w[i] = make_float4(x.x * s.x, x.y * s.y, x.z * s.z, x.w * s.w);
        }
    };
    const int begin = blockIdx.x * WARPS + warp;
    if (begin < ITEMS) fetch(begin);
#if CLUSTER
    __shared__ float sums[ROWS * SUMS];
    u32 first_block;  // where `sums` is in the first block
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(first_block) : "r"((u32)__cvta_generic_to_shared(sums)));
    auto put = [&](int i, float x) { asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(first_block + 4 * i), "f"(x) : "memory"); };
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");  // every block has begun
#else
    auto put = [&](int i, float x) { partial[i] = x; };
#endif
    wait_for_inputs();
    for (int item = begin; item < ITEMS; item += gridDim.x * WARPS) {
        if (item != begin) fetch(item);
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            float dot = 0.f, squares = 0.f;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const float4 x = quad(h + row * WIDTH, item % PARTS, i, lane);
                dot = dot4(x, w[i], dot);
                squares = dot4(x, x, squares);
            }
            dot = warp_sum(dot);
            if (lane == 0) put(row * SUMS + item, dot);
            if (item < PARTS) {
                squares = warp_sum(squares);
                if (lane == 0) put(row * SUMS + SQUARES + item, squares);
            }
        }
    }
#if CLUSTER
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (blockIdx.x) return;
#else
    __shared__ float sums[ROWS * SUMS];
    if (!last_to_arrive(ticket, gridDim.x)) return;
    for (int i = threadIdx.x; i < ROWS * SUMS; i += 32 * WARPS) sums[i] = __ldcg(partial + i);
    __syncthreads();
#endif
    for (int row = warp; row < ROWS; row += WARPS) choose(sums + row * SUMS, eps, ids + row * N_USED, weights + row * N_USED, lane);
}
