// Choose the experts of each token, and order rows by expert. There are no atomics, so a run
// repeats bit for bit.
#include "prompt/common.cuh"

constexpr int ROUTE_WARPS = 4;
constexpr int GROUP_THREADS = 1024;
constexpr int PER_THREAD = 16;

// How experts are chosen and weighted; see step/router.cu. `always`, `threshold`: experts from slot
// `always` on count only if their score exceeds threshold * that of the first slot.
struct Routing {
    int n_experts, n_used, always;
    float threshold;
    int sigmoid, norm;
    float scale;
    int groups, groups_used, group_best;
};

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// choice[i] = -inf for experts (i * 32 + lane) of groups that are not among the best: those with the
// largest sums of their group_best (1 or 2) best; among equal ones the lower group.
template <int PER_LANE>
__device__ __forceinline__ void keep_best_groups(float (&choice)[PER_LANE], const Routing& r) {
    const float nothing = __int_as_float(0xff800000);  // -inf
    const int lane = threadIdx.x % 32, members = r.n_experts / r.groups;
    float mine = nothing;  // lane g has the sum of group g
    for (int g = 0; g < r.groups; g++) {
        float first = nothing, second = nothing;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const int expert = i * 32 + lane;
            if (expert >= r.n_experts || expert / members != g) continue;
            if (choice[i] > first) second = first, first = choice[i];
            else if (choice[i] > second) second = choice[i];
        }
#pragma unroll
        for (int step = 16; step; step >>= 1) {
            const float other = __shfl_xor_sync(0xffffffffu, first, step), next = __shfl_xor_sync(0xffffffffu, second, step);
            second = fmaxf(fminf(first, other), fmaxf(second, next));
            first = fmaxf(first, other);
        }
        if (g == lane) mine = r.group_best == 1 ? first : first + second;
    }
    int rank = 0;
    for (int g = 0; g < r.groups; g++) {
        const float other = __shfl_sync(0xffffffffu, mine, g);
        rank += g < lane ? !(other < mine) : other > mine;
    }
    const unsigned kept = __ballot_sync(0xffffffffu, lane < r.groups && rank < r.groups_used);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        if (!(kept >> min((i * 32 + lane) / members, 31) & 1)) choice[i] = nothing;
}

// The n_used best experts of logits float32[T, n_experts], the sum of `parts` such and of bias float32[n_experts] or null, in descending order (equal ones: the lower
// first), and their weights. Experts that do not count get id -1 and weight 0. If a score is NaN,
// slot k gets expert k and weight NaN, which shows in the logits of the model; invalid ids would
// leave rows without a place. choice_bias float32[n_experts] is added to scores for the choice only,
// or null. A warp per token; n_used <= n_experts <= 32 * PER_LANE, n_used <= 32, groups <= 32.
template <int PER_LANE>
__device__ __forceinline__ void route(const float* logits, int parts, const float* bias, int tokens, const Routing& r, const float* choice_bias, int* ids, float* weights) {
    const float nothing = __int_as_float(0xff800000);  // -inf
    const int lane = threadIdx.x % 32;
    const long long t = blockIdx.x * (long long)ROUTE_WARPS + threadIdx.x / 32;
    if (t >= tokens) return;
    float score[PER_LANE], choice[PER_LANE], largest = nothing, sum = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int expert = i * 32 + lane;
        score[i] = nothing;
        if (expert < r.n_experts) {
            score[i] = logits[t * r.n_experts + expert];
            for (int part = 1; part < parts; part++) score[i] += logits[((long long)part * tokens + t) * r.n_experts + expert];
            if (bias != nullptr) score[i] += bias[expert];
        }
        largest = fmaxf(largest, score[i]);
    }
    largest = largest_of_warp(largest);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        if (!r.sigmoid) score[i] = expf(score[i] - largest);
        else score[i] = i * 32 + lane < r.n_experts ? 1.0f / (1.0f + expf(-score[i])) : 0.0f;
        sum += score[i];
    }
    sum = warp_sum(sum);
    unsigned open = 0;  // which of the lane's experts can still be chosen
    bool strange = false;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int expert = i * 32 + lane;
        if (!r.sigmoid) score[i] /= sum;
        choice[i] = choice_bias != nullptr && expert < r.n_experts ? score[i] + choice_bias[expert] : score[i];
        open |= unsigned(expert < r.n_experts) << i;
        strange |= !(choice[i] == choice[i]);
    }
    const bool known = !__any_sync(0xffffffffu, strange);
    if (r.groups > 1) keep_best_groups<PER_LANE>(choice, r);
    float best = 0, total = 0, mine = 0;  // lane k keeps the weight of slot k
    int my_id = -1;
    for (int k = 0; k < r.n_used; k++) {
        float top = nothing, value = 0;
        int id = 0x7fffffff;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if ((open >> i & 1) && (choice[i] > top || id == 0x7fffffff)) top = choice[i], value = score[i], id = i * 32 + lane;
#pragma unroll
        for (int step = 16; step; step >>= 1) {
            const float other = __shfl_xor_sync(0xffffffffu, top, step), other_value = __shfl_xor_sync(0xffffffffu, value, step);
            const int other_id = __shfl_xor_sync(0xffffffffu, id, step);
            if (other > top || (other == top && other_id < id)) top = other, value = other_value, id = other_id;
        }
        if (k == 0) best = value;
        const bool counts = k < r.always || value > r.threshold * best;
        if (counts) total += value;
        if (k == lane) mine = counts ? value : 0.0f, my_id = counts ? id : -1;
        if (id % 32 == lane) open &= ~(1u << id / 32);
    }
    if (lane < r.n_used) {
        ids[t * r.n_used + lane] = known ? my_id : lane;
        weights[t * r.n_used + lane] = known ? (r.norm ? mine / total : mine) * r.scale : __int_as_float(0x7fc00000);
    }
}

#define ROUTE(PER_LANE) \
    extern "C" __global__ void __launch_bounds__(32 * ROUTE_WARPS) \
    route_##PER_LANE(const float* logits, int parts, const float* bias, int tokens, int n_experts, int n_used, int always, float threshold, int sigmoid, int norm, \
                     float scale, int groups, int groups_used, int group_best, const float* choice_bias, int* ids, float* weights) { \
        const Routing r = {n_experts, n_used, always, threshold, sigmoid, norm, scale, groups, groups_used, group_best}; \
        route<PER_LANE>(logits, parts, bias, tokens, r, choice_bias, ids, weights); \
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

__device__ __forceinline__ int scan_of_warp(int x, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(0xffffffffu, x, step);
        if (lane >= step) x += other;
    }
    return x;
}

// group_rows where every thread can keep its ids, PER_THREAD in a row: they are read once.
__device__ __forceinline__ void group_once(const int* ids, int n, int* ends, int* sources, int* rows, int* of_warps, int* lower_of_warps) {
    const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = threadIdx.x * PER_THREAD;
    static_assert(GROUP_THREADS == 1024, "a warp has a lane for every warp");
    int own[PER_THREAD], lower = 0, count = 0, dropped = 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i += 4) {
        const bool inside = first + i < n;
        const uint4 four = inside ? *reinterpret_cast<const uint4*>(ids + first + i) : make_uint4(0, 0, 0, 0);
        own[i] = inside ? (int)four.x : -2, own[i + 1] = inside ? (int)four.y : -2;
        own[i + 2] = inside ? (int)four.z : -2, own[i + 3] = inside ? (int)four.w : -2;
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        lower += own[i] >= 0 && own[i] < expert;
        count += own[i] == expert;
        dropped += own[i] == -1;
    }
    const int scan = scan_of_warp(count, lane), lower_scan = scan_of_warp(lower, lane);
    if (lane == 31) of_warps[warp] = scan, lower_of_warps[warp] = lower_scan;
    __syncthreads();
    const int warps = scan_of_warp(of_warps[lane], lane), equal = __shfl_sync(0xffffffffu, warps, 31);
    const int in_front = __shfl_sync(0xffffffffu, warps, warp == 0 ? 0 : warp - 1);
    const int begin = __shfl_sync(0xffffffffu, scan_of_warp(lower_of_warps[lane], lane), 31);
    if (threadIdx.x == 0) ends[expert] = begin + equal;
    int row = begin + (warp ? in_front : 0) + scan - count;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        if (own[i] == expert) sources[row] = first + i, rows[first + i] = row++;
        if (expert == 0 && own[i] == -1) rows[first + i] = -1;
    }
    if (expert == 0) {
        __syncthreads();
        dropped = block_sum(dropped, of_warps);
        for (int i = n - dropped + threadIdx.x; i < n; i += GROUP_THREADS) sources[i] = -1;
    }
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
    if (n % 4 == 0 && n <= GROUP_THREADS * PER_THREAD) {
        group_once(ids, n, ends, sources, rows, shared, before);
        return;
    }
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
