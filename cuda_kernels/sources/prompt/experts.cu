// Choose the experts of each token, and order rows by expert. There are no atomics, so a run
// repeats bit for bit.
#include "prompt/common.cuh"

constexpr int ROUTE_WARPS = 4;
constexpr int GROUP_THREADS = 1024;
constexpr int PER_THREAD = 16;

// Softmax over logits float32[T, n_experts], the n_used most probable experts in descending order
// (equal ones: the lower first), and their probabilities normalized to a sum of 1. Experts from
// `always` on count only if p > threshold * largest p; others get id -1 and weight 0. If a logit is
// NaN, so are all probabilities. Slot k then gets expert k and weight NaN, which shows in the
// logits; invalid ids would leave rows without a place. A warp per token; n_used <= n_experts <= 32
// * PER_LANE, n_used <= 32.
template <int PER_LANE>
__device__ __forceinline__ void route(const float* logits, int tokens, int n_experts, int n_used, int always, float threshold, int* ids,
                                      float* weights) {
    const float nothing = __int_as_float(0xff800000);  // -inf
    const int lane = threadIdx.x % 32;
    const long long t = blockIdx.x * (long long)ROUTE_WARPS + threadIdx.x / 32;
    if (t >= tokens) return;
    float p[PER_LANE], largest = nothing, sum = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int expert = i * 32 + lane;
        p[i] = expert < n_experts ? logits[t * n_experts + expert] : nothing;
        largest = fmaxf(largest, p[i]);
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) sum += p[i] = expf(p[i] - largest);
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) p[i] = i * 32 + lane < n_experts ? p[i] / sum : -1.0f;
    float best = 0, total = 0, mine = 0;  // lane k keeps the probability of slot k
    int my_id = -1;
    for (int k = 0; k < n_used; k++) {
        float top = -2.0f;
        int id = 0x7fffffff;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (p[i] > top) top = p[i], id = i * 32 + lane;
#pragma unroll
        for (int step = 16; step; step >>= 1) {
            const float other = __shfl_xor_sync(0xffffffffu, top, step);
            const int other_id = __shfl_xor_sync(0xffffffffu, id, step);
            if (other > top || (other == top && other_id < id)) top = other, id = other_id;
        }
        if (k == 0) best = top;
        const bool counts = k < always || top > threshold * best;
        if (counts) total += top;
        if (k == lane) mine = counts ? top : 0.0f, my_id = counts ? id : -1;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (i * 32 + lane == id) p[i] = -1.0f;
    }
    const bool known = sum == sum;
    if (lane < n_used) ids[t * n_used + lane] = known ? my_id : lane, weights[t * n_used + lane] = known ? mine / total : sum;
}

#define ROUTE(PER_LANE) \
    extern "C" __global__ void __launch_bounds__(32 * ROUTE_WARPS) \
    route_##PER_LANE(const float* logits, int tokens, int n_experts, int n_used, int always, float threshold, int* ids, float* weights) { \
        route<PER_LANE>(logits, tokens, n_experts, n_used, always, threshold, ids, weights); \
    }
ROUTE(1)
ROUTE(2)
ROUTE(4)
ROUTE(8)
ROUTE(16)

__device__ __forceinline__ int block_sum(int x, int* shared) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    int sum = 0;
    for (int warp = 0; warp < GROUP_THREADS / 32; warp++) sum += shared[warp];
    return sum;
}

// The rows of expert blockIdx.x: ids int[n] in flat (token, slot) order; ends[e] = rows of experts
// 0..e; sources[row] = flat index of a grouped row; rows[flat] = its row. Ids below 0 have no row:
// rows[flat] = -1, and the last sources are -1. CUDA block e counts the ids before its own and
// places its own in order. Block 0 also marks ids without a row.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS)
group_rows(const int* ids, int n, int* ends, int* sources, int* rows) {
    __shared__ int shared[GROUP_THREADS / 32], before[GROUP_THREADS / 32];
    const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int lower = 0, equal = 0, dropped = 0;
    for (int i = threadIdx.x; i < n; i += GROUP_THREADS) {
        const int id = ids[i];
        lower += id >= 0 && id < expert;
        equal += id == expert;
        dropped += id < 0;
    }
    int next = block_sum(lower, shared);
    equal = block_sum(equal, shared);
    if (threadIdx.x == 0) ends[expert] = next + equal;
    if (expert == 0) {
        dropped = block_sum(dropped, shared);
        for (int i = n - dropped + threadIdx.x; i < n; i += GROUP_THREADS) sources[i] = -1;
    }
    for (int start = 0; start < n; start += GROUP_THREADS * PER_THREAD) {
        // Each thread owns PER_THREAD ids in a row, so that order by thread is order by index.
        int own[PER_THREAD], count = 0;
        const int first = start + threadIdx.x * PER_THREAD;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            own[i] = first + i < n ? ids[first + i] : -2;
            count += own[i] == expert;
            if (expert == 0 && own[i] == -1) rows[first + i] = -1;
        }
        int scan = count;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const int other = __shfl_up_sync(0xffffffffu, scan, step);
            if (lane >= step) scan += other;
        }
        __syncthreads();
        if (lane == 31) before[warp] = scan;
        __syncthreads();
        int row = next + scan - count;
        for (int w = 0; w < warp; w++) row += before[w];
        for (int w = 0; w < GROUP_THREADS / 32; w++) next += before[w];
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++)
            if (own[i] == expert) sources[row] = first + i, rows[first + i] = row++;
    }
}
