// The choice of experts for 1 to 8 rows in one launch: norm, float32 router, the N_USED best, their weights.
//
// There is one block for each expert. It holds the expert's router row in registers (read before
// the previous launch has ended, as weights do not depend on it) and multiplies it with every row
// of h. The last block chooses, once it has the logits of all. Blocks are small, so that they fit next to
// those of the previous launch.
//
// In the common case (softmax, weights of sum 1) the softmax over all experts is not needed:
// probabilities have the order of logits, and the sum over all experts cancels out.
//
// Compiled per shape: ROWS, WIDTH (a multiple of 4), EXPERTS, N_USED, and LEAST, THRESHOLD: experts after the LEAST best only count where
// their score exceeds THRESHOLD times the largest. SIGMOID: scores are sigmoids, not a softmax. NORM: weights have a sum of 1 before they
// are multiplied by SCALE. CHOICE_BIAS: experts are chosen by score + bias. LOGIT_BIAS: logits have a bias. GROUPS, GROUPS_USED,
// GROUP_BEST: experts are chosen from the groups with the largest sum of their GROUP_BEST best. FIRST, LAST: ids count from FIRST, and those
// of other experts than FIRST to LAST are -1. SHARED_SLOTS: so many weights follow those of the chosen experts, 1 or, with SHARED_GATE, the
// sigmoid of another product with norm(h).
#include "step/parts.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
#include "units/stamps.cuh"
constexpr int LOGITS = EXPERTS + SHARED_GATE;  // of a row
constexpr int QUADS = WIDTH / 4, EACH = (QUADS + THREADS - 1) / THREADS;  // float4 of a row; of them per thread
static_assert(WIDTH % 4 == 0 && ROWS <= 8 && N_USED <= EXPERTS && N_USED <= 32 && ROWS * EXPERTS <= 8192 && EXPERTS % GROUPS == 0 && GROUPS <= THREADS && EXPERTS / GROUPS >= GROUP_BEST &&
                  GROUP_BEST <= 2 && (EXPERTS <= 2048 || ROWS == 1), "a shape this is made for");

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

__device__ __forceinline__ float4 quad(const float* row, int i) {
    const int at = threadIdx.x + i * THREADS;
    return at < QUADS ? __ldcg((const float4*)row + at) : make_float4(0.f, 0.f, 0.f, 0.f);
}

constexpr bool BY_LOGITS = !SIGMOID && NORM && !CHOICE_BIAS && GROUPS == 1;

// Scores of one row: `scores` from the logits, and in the place of these what experts are chosen by.
__device__ __forceinline__ void score(float* logits, float* scores, const float* choice_bias) {
    __shared__ float most, total, group[GROUPS];
    const int lane = threadIdx.x % 32;
    if (!SIGMOID && threadIdx.x < 32) {
        float largest = -INFINITY, sum = 0.f;
        for (int e = lane; e < EXPERTS; e += 32) largest = fmaxf(largest, logits[e]);
        largest = warp_max(largest);
        for (int e = lane; e < EXPERTS; e += 32) sum += expf(logits[e] - largest);
        sum = warp_sum(sum);
        if (lane == 0) most = largest, total = sum;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
        const float l = logits[e], p = SIGMOID ? __fdiv_rn(1.f, 1.f + expf(-l)) : __fdiv_rn(expf(l - most), total);
        scores[e] = p;
        logits[e] = CHOICE_BIAS ? p + choice_bias[e] : p;
    }
    __syncthreads();
    if (GROUPS == 1) return;
    constexpr int MEMBERS = EXPERTS / GROUPS;
    if (threadIdx.x < GROUPS) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = 0; i < MEMBERS; i++) {
            const float x = logits[threadIdx.x * MEMBERS + i];
            if (x > first) second = first, first = x;
            else if (x > second) second = x;
        }
        group[threadIdx.x] = GROUP_BEST == 1 ? first : first + second;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
        const int mine = e / MEMBERS;
        int rank = 0;
        for (int g = 0; g < GROUPS; g++) rank += g < mine ? !(group[g] < group[mine]) : group[g] > group[mine];
        if (rank >= GROUPS_USED) logits[e] = -INFINITY;
    }
    __syncthreads();
}

// How many of logits[begin .. end - 1] are larger than `mine`, or with EQUAL not less: if all are NaN, ranks still differ. Four are read at a time where rows are aligned;
// begin is a multiple of 32.
template <bool EQUAL>
__device__ __forceinline__ int count_before(const float* logits, int begin, int end, float mine) {
    int count = 0;
    if (EXPERTS % 4 == 0) {
#pragma unroll 8
        for (int i = begin; i < end; i += 4) {
            const float4 l = *(const float4*)(logits + i);
            if (EQUAL) count += !(l.x < mine) + !(l.y < mine) + !(l.z < mine) + !(l.w < mine);
            else count += (l.x > mine) + (l.y > mine) + (l.z > mine) + (l.w > mine);
        }
    } else {
#pragma unroll 8
        for (int i = begin; i < end; i++) count += EQUAL ? !(logits[i] < mine) : logits[i] > mine;
    }
    return count;
}

constexpr bool FILTERED = EXPERTS >= 2 * THREADS && EXPERTS <= 1024;  // the latter for shared memory

// Call `found(rank, expert, logit)` for each of the N_USED best experts. An expert's rank is the number of experts before it: those with
// larger logits, and lower ones with the same logit. NaN counts as -infinity.
//
// A thread's experts are not among the best if N_USED others have a largest one that is larger than its. The rest, four for each of the best and a few
// more if logits are equal, are compared with each other. In which order they are listed does not matter.
template <class F>
__device__ __forceinline__ void best_of_few(const float* logits, F found) {
    __shared__ __align__(16) float largest[THREADS];
    __shared__ __align__(8) float2 left[EXPERTS];  // logit, expert
    __shared__ u32 n_left;
    float mine = -INFINITY;
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) mine = fmaxf(mine, logits[e]);
    largest[threadIdx.x] = mine;
    if (threadIdx.x == 0) n_left = 0;
    __syncthreads();
    int larger = 0;
#pragma unroll 8
    for (int i = 0; i < THREADS; i += 4) {
        const float4 l = *(const float4*)(largest + i);
        larger += (l.x > mine) + (l.y > mine) + (l.z > mine) + (l.w > mine);
    }
    if (larger < N_USED) {
        u32 at = atomicAdd(&n_left, (u32)((EXPERTS - 1 - (int)threadIdx.x) / THREADS + 1));
        for (int e = threadIdx.x; e < EXPERTS; e += THREADS) left[at++] = make_float2(fmaxf(logits[e], -INFINITY), __int_as_float(e));
    }
    __syncthreads();
    const int n = (int)n_left;
    for (int c = threadIdx.x; c < n; c += THREADS) {
        const float logit = left[c].x;
        const int expert = __float_as_int(left[c].y);
        int rank = 0;
#pragma unroll 8
        for (int i = 0; i < n; i++) {
            const float2 other = left[i];
            rank += other.x > logit || (other.x == logit && __float_as_int(other.y) < expert);
        }
        if (rank < N_USED) found(rank, expert, logit);
    }
}

// The same by comparing every expert with every other.
template <class F>
__device__ __forceinline__ void best_of_all(const float* logits, F found) {
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
        const float mine = logits[e];
        // Of experts that another warp ranks, all are lower or all are higher.
        const int first = e & ~31, last = min(first + 32, EXPERTS);
        int rank = count_before<true>(logits, 0, first, mine) + count_before<false>(logits, last, EXPERTS, mine);
#pragma unroll 8
        for (int other = first; other < last; other++) {
            const float l = logits[other];
            rank += other < e ? !(l < mine) : l > mine;
        }
        if (rank < N_USED) found(rank, e, mine);
    }
}

// All threads choose for one row. `logits` in shared memory. If a logit is NaN, so are the weights.
__device__ __forceinline__ void choose(float* logits, float* scores, const float* choice_bias, float* best, int* ids, float* weights) {
    if (!BY_LOGITS) score(logits, scores, choice_bias);
    const auto found = [=](int rank, int e, float logit) {
        best[rank] = BY_LOGITS ? logit : scores[e];
        ids[rank] = e >= FIRST && e < LAST ? e - FIRST : -1;
    };
    if (FILTERED) best_of_few(logits, found);
    else best_of_all(logits, found);
    __syncthreads();
    const int slot = threadIdx.x;
    if (slot < N_USED) {
        float total = 0.f, weight = 0.f;
#pragma unroll
        for (int s = 0; s < N_USED; s++) {
            const float p = BY_LOGITS ? expf(best[s] - best[0]) : best[s], limit = BY_LOGITS ? THRESHOLD : THRESHOLD * best[0];
            const float counted = s < LEAST || p > limit ? p : 0.f;
            if (s == slot) {
                weight = counted;
                if (s >= LEAST && !(p > limit)) ids[s] = -1;
            }
            total += counted;
        }
        weights[slot] = (NORM ? __fdiv_rn(weight, total) : weight) * SCALE;
    }
    __syncthreads();
}

// h float32[ROWS, WIDTH]; norm float32[WIDTH]; router float32[EXPERTS, WIDTH]; logit_bias, choice_bias float32[EXPERTS]; shared_gate float32[WIDTH]; parts float32[ROWS, LOGITS, 2], scratch, NOT_THERE before the first launch;
// ids int32[ROWS, N_USED], weights float32[ROWS, N_USED + SHARED_SLOTS], the best first. One block per expert, and one for SHARED_GATE.
extern "C" __global__ void __launch_bounds__(THREADS)
router(const float* __restrict__ h, const float* __restrict__ norm, float eps, const float* __restrict__ matrix,
       const float* __restrict__ logit_bias, const float* __restrict__ choice_bias, const float* __restrict__ shared_gate, float* parts, int* ids,
       float* weights) {
    __shared__ __align__(16) float all[ROWS * EXPERTS];
    __shared__ float sums[WARPS][ROWS][2], scores[BY_LOGITS ? 1 : EXPERTS], best[32], shares[ROWS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = blockIdx.x;
    const bool gates = SHARED_GATE && expert == EXPERTS;  // the block after those of the experts
    const float* vector = gates ? shared_gate : matrix + (long long)expert * WIDTH;
    float4 w[EACH];  // of the router, times the weights of the norm
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const float4 x = quad(vector, i), s = quad(norm, i);
        w[i] = make_float4(x.x * s.x, x.y * s.y, x.z * s.z, x.w * s.w);
    }
    wait_for_inputs();
    STAMP(WAIT_ENDED);
    start_dependents();  // not earlier, so that the next launch finds every multiprocessor equally free (see attention.cu)
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        float dot = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float4 x = quad(h + row * WIDTH, i);
            dot = dot4(x, w[i], dot);
            squares = dot4(x, x, squares);
        }
        dot = warp_sum(dot), squares = warp_sum(squares);
        if (lane == 0) sums[warp][row][0] = dot, sums[warp][row][1] = squares;
    }
    __syncthreads();
    if (threadIdx.x < ROWS) {
        float dot = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) dot += sums[i][threadIdx.x][0], squares += sums[i][threadIdx.x][1];
        const float logit = dot * rsqrtf(squares / (float)WIDTH + eps);
        put_part(parts + 2 * (threadIdx.x * LOGITS + expert), LOGIT_BIAS && !gates ? logit + logit_bias[expert] : logit, 0.f);
    }
    STAMP(FIRST_ITEM);
    if (blockIdx.x + 1 < gridDim.x) return;
    __syncthreads();  // its own are there before it waits for those of others
    constexpr int ALL = ROWS * LOGITS, TURNS = (ALL + THREADS - 1) / THREADS, AT_ONCE = TURNS < 8 ? TURNS : 8;
#pragma unroll 1
    for (int first = threadIdx.x; first < ALL; first += AT_ONCE * THREADS) {
        const int count = min(AT_ONCE, (ALL - first + THREADS - 1) / THREADS);
        u64 found[AT_ONCE];
        ask(found, parts + 2 * first, 2 * THREADS, count);
        take(found, parts + 2 * first, 2 * THREADS, count);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = first + i * THREADS, row = at / LOGITS, e = at % LOGITS;
            if (i >= count) break;
            if (e == EXPERTS) shares[row] = __fdiv_rn(1.f, 1.f + expf(-low_float(found[i])));
            else all[row * EXPERTS + e] = fmaxf(low_float(found[i]), -INFINITY);  // NaN becomes -infinity
        }
    }
    __syncthreads();
    STAMP(INPUT_READY);
    constexpr int WEIGHTS = N_USED + SHARED_SLOTS;
    for (int i = threadIdx.x; i < ROWS * SHARED_SLOTS; i += THREADS) {
        const int row = i / max(SHARED_SLOTS, 1), slot = i % max(SHARED_SLOTS, 1);
        weights[row * WEIGHTS + N_USED + slot] = SHARED_GATE ? shares[row] : 1.f;
    }
#pragma unroll 1
    for (int row = 0; row < ROWS; row++) choose(all + row * EXPERTS, scores, choice_bias, best, ids + row * N_USED, weights + row * WEIGHTS);
    STAMP(ENDED);
}
