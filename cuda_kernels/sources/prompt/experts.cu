// Choose the experts of each token, and order rows by expert. There are no atomics, so a run
// repeats bit for bit.
#include "prompt/common.cuh"
#include "prompt/overlap.cuh"

constexpr int ROUTE_WARPS = 4;
constexpr int GROUP_THREADS = 1024;
constexpr int MOST_IDS = 32;  // of a thread in a pass
constexpr int GROUPED = 4;    // experts of a block

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
        follow_launch_before(); \
        const Routing r = {n_experts, n_used, always, threshold, sigmoid, norm, scale, groups, groups_used, group_best}; \
        route<PER_LANE>(logits, parts, bias, tokens, r, choice_bias, ids, weights); \
    }
ROUTE(1)
ROUTE(2)
ROUTE(4)
ROUTE(8)
ROUTE(16)

// Counts of GROUPED experts, 16 bits each, the first in the lowest.
typedef unsigned long long Counts;
static_assert(GROUP_THREADS * MOST_IDS < 1 << 16 && GROUPED == 4, "counts of a pass fit");

struct Scanned {
    Counts before, total;  // of the block's experts in a pass: in ids of the threads before this one, and in all
    int lower;             // ids of lower experts in the pass
};

__device__ __forceinline__ Counts one_of(int expert) { return 1ull << 16 * expert; }
__device__ __forceinline__ int count_of(Counts counts, int expert) { return (int)(counts >> 16 * expert & 0xffff); }

__device__ __forceinline__ Counts scan_of_warp(Counts x, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const Counts other = __shfl_up_sync(0xffffffffu, x, step);
        if (lane >= step) x += other;
    }
    return x;
}

__device__ __forceinline__ int sum_of_warp(int x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// A thread's ids, `per` in a row, so that order by thread is order by index. After the last id there are NO_ID.
constexpr int NO_ID = 0x7fffffff;
__device__ __forceinline__ void load_ids(const int* ids, int n, int first, int per, int (&own)[MOST_IDS]) {
#pragma unroll
    for (int i = 0; i < MOST_IDS; i += 4) {
        const bool inside = i < per && first + i < n;
        if (inside && n % 4 == 0) {
            const uint4 four = *reinterpret_cast<const uint4*>(ids + first + i);
            own[i] = (int)four.x, own[i + 1] = (int)four.y, own[i + 2] = (int)four.z, own[i + 3] = (int)four.w;
        } else {
#pragma unroll
            for (int j = i; j < i + 4; j++) own[j] = inside && first + j < n ? ids[first + j] : NO_ID;
        }
    }
}

__device__ __forceinline__ Scanned scan_ids(const int (&own)[MOST_IDS], int expert, Counts* of_warps, int* lower_of_warps) {
    static_assert(GROUP_THREADS == 1024, "a warp has a lane for every warp");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Counts counts = 0;
    int lower = 0;
#pragma unroll
    for (int i = 0; i < MOST_IDS; i++) {
        const unsigned which = own[i] - expert;
        counts += which < GROUPED ? one_of(which) : 0;
        lower += own[i] >= 0 && own[i] < expert;
    }
    const Counts scan = scan_of_warp(counts, lane);
    lower = sum_of_warp(lower);
    __syncthreads();  // what was here before is read
    if (lane == 31) of_warps[warp] = scan, lower_of_warps[warp] = lower;
    __syncthreads();
    const Counts warps = scan_of_warp(of_warps[lane], lane), in_front = __shfl_sync(0xffffffffu, warps, warp == 0 ? 0 : warp - 1);
    return {(warp ? in_front : 0) + scan - counts, __shfl_sync(0xffffffffu, warps, 31), sum_of_warp(lower_of_warps[lane])};
}

// Group rows by expert: ids int[n] in flat (token, slot) order, below n_experts; ends[e] = rows of experts 0..e; sources[row] = flat
// index of a grouped row; rows[flat] = its row. Ids below 0 have no row: rows[flat] = -1, and the last sources are -1. A CUDA block counts the
// ids before its GROUPED experts and places theirs in order; ids are read once where a thread can keep its own. The first block marks
// ids without a row, the last one sources without an id.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS)
group_rows(const int* ids, int n, int n_experts, int* ends, int* sources, int* rows) {
    follow_launch_before();
    __shared__ Counts of_warps[GROUP_THREADS / 32];
    __shared__ int lower_of_warps[GROUP_THREADS / 32], next[GROUPED];
    const int expert = blockIdx.x * GROUPED, per = min(MOST_IDS, (n + 4 * GROUP_THREADS - 1) / (4 * GROUP_THREADS) * 4);
    const int pass = GROUP_THREADS * per, first = threadIdx.x * per;
    int own[MOST_IDS], end = 0, total[GROUPED] = {};
    Scanned scanned = {};
    for (int start = 0; start < n; start += pass) {
        load_ids(ids, n, start + first, per, own);
        scanned = scan_ids(own, expert, of_warps, lower_of_warps);
        end += scanned.lower;
#pragma unroll
        for (int e = 0; e < GROUPED; e++) total[e] += count_of(scanned.total, e);
    }
#pragma unroll
    for (int e = 0; e < GROUPED; e++) {
        if (threadIdx.x == 0) next[e] = end;
        end += total[e];
        if (threadIdx.x == 0 && expert + e < n_experts) ends[expert + e] = end;
    }
    for (int start = 0; start < n; start += pass) {
        if (pass < n) {
            load_ids(ids, n, start + first, per, own);
            scanned = scan_ids(own, expert, of_warps, lower_of_warps);
        }
        __syncthreads();  // next is there
        Counts before = scanned.before;
#pragma unroll
        for (int i = 0; i < MOST_IDS; i++) {
            const unsigned which = own[i] - expert;
            const int flat = start + first + i;
            if (which < GROUPED) {
                const int row = next[which] + count_of(before, which);
                before += one_of(which);
                sources[row] = flat, rows[flat] = row;
            }
            if (expert == 0 && own[i] < 0) rows[flat] = -1;
        }
        __syncthreads();  // next is read
        if (threadIdx.x < GROUPED) next[threadIdx.x] += count_of(scanned.total, threadIdx.x);
    }
    if (blockIdx.x == gridDim.x - 1)
        for (int i = end + threadIdx.x; i < n; i += GROUP_THREADS) sources[i] = -1;
}
