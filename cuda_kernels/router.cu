// The choice of experts for 1 to 8 rows in one launch: norm, float32 router, softmax, the N_USED most probable, weights of sum 1.
//
// grid E / PER_BLOCK, THREADS threads. A block keeps the router rows of its PER_BLOCK experts in registers (read before the launch in
// front has ended, as weights do not depend on it) and multiplies them with every row of h; the last block to finish chooses.
// Compiled per shape: ROWS, WIDTH (a multiple of 4), EXPERTS, N_USED, PER_BLOCK, and LEAST, THRESHOLD: experts
// after the LEAST best only count where their probability exceeds THRESHOLD times the largest.
#include "step_common.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int PARTS = WIDTH / 4, EACH = (PARTS + THREADS - 1) / THREADS;  // float4 of a row; of them per thread
constexpr int PER_LANE = (EXPERTS + 31) / 32;
constexpr int SUMS = PER_BLOCK + 1;
static_assert(WIDTH % 4 == 0 && ROWS <= 8 && N_USED <= EXPERTS && N_USED <= 32 && EXPERTS <= 1024, "a shape this is made for");

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

// A warp chooses for one row. Probabilities are not negative, so their bits order as they do; ties go to the lower expert.
__device__ __forceinline__ void choose(const float* logits, int* ids, float* weights, int lane) {
    float p[PER_LANE], most = -INFINITY, sum = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int e = 32 * i + lane;
        p[i] = e < EXPERTS ? __ldcg(logits + e) : -INFINITY;
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
        if (slot >= LEAST && !(top > THRESHOLD * first)) top = 0.f;
        if (expert % 32 == lane) taken |= 1u << expert / 32;
        if (slot == lane) {
            mine = top;
            chosen = expert;
        }
        total += top;
    }
    if (lane < N_USED) {
        ids[lane] = chosen;
        weights[lane] = __fdiv_rn(mine, total);
    }
}

// h float32[ROWS, WIDTH]; norm float32[WIDTH]; router float32[EXPERTS, WIDTH]; logits float32[ROWS, EXPERTS] scratch; ticket u32, zero;
// ids int32[ROWS, N_USED], weights float32[ROWS, N_USED], most probable first.
extern "C" __global__ void __launch_bounds__(THREADS)
router(const float* __restrict__ h, const float* __restrict__ norm, float eps, const float* __restrict__ matrix, float* logits, u32* ticket,
       int* __restrict__ ids, float* __restrict__ weights) {
    __shared__ float sums[WARPS][ROWS * SUMS];
    start_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * PER_BLOCK;
    float4 w[PER_BLOCK][EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int part = threadIdx.x + i * THREADS;
        const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f), scale = part < PARTS ? ((const float4*)norm)[part] : zero;
#pragma unroll
        for (int e = 0; e < PER_BLOCK; e++) {
            const bool there = part < PARTS && first + e < EXPERTS;
            const float4 x = there ? __ldcg((const float4*)matrix + (long long)(first + e) * PARTS + part) : zero;
            w[e][i] = make_float4(x.x * scale.x, x.y * scale.y, x.z * scale.z, x.w * scale.w);
        }
    }
    wait_for_inputs();
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        float sum[SUMS] = {};
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int part = threadIdx.x + i * THREADS;
            const float4 x = part < PARTS ? __ldcg((const float4*)h + row * PARTS + part) : make_float4(0.f, 0.f, 0.f, 0.f);
            sum[PER_BLOCK] = dot4(x, x, sum[PER_BLOCK]);
#pragma unroll
            for (int e = 0; e < PER_BLOCK; e++) sum[e] = dot4(x, w[e][i], sum[e]);
        }
#pragma unroll
        for (int s = 0; s < SUMS; s++) {
            const float total = warp_sum(sum[s]);
            if (lane == 0) sums[warp][row * SUMS + s] = total;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * PER_BLOCK; i += THREADS) {
        const int row = i / PER_BLOCK, e = i % PER_BLOCK;
        float dot = 0.f, squares = 0.f;
#pragma unroll
        for (int s = 0; s < WARPS; s++) dot += sums[s][row * SUMS + e], squares += sums[s][row * SUMS + PER_BLOCK];
        if (first + e < EXPERTS) logits[row * EXPERTS + first + e] = dot * rsqrtf(squares / (float)WIDTH + eps);
    }
    if (last_to_arrive(ticket, gridDim.x))
        for (int row = warp; row < ROWS; row += WARPS) choose(logits + row * EXPERTS, ids + row * N_USED, weights + row * N_USED, lane);
}
