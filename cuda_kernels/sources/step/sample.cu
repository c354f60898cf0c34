// Choose the next token of a sequence on the device, so that steps follow each other without the
// host.
#include "step/common.cuh"

constexpr int THREADS = 256;

// Numbers in the order of x; the two zeros are equal.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 b = __float_as_uint(x + 0.f);
    return b >> 31 ? ~b : b | 0x80000000u;
}

// Ordered by value, then by descending index. Values that are not finite are above all others.
__device__ __forceinline__ u64 candidate(float x, int index) {
    return (__float_as_uint(x) & 0x7f800000) == 0x7f800000 ? ~0ull : (u64)ordered(x) << 32 | (u32)~index;
}

__device__ __forceinline__ float value_of(u64 candidate) {
    const u32 b = (u32)(candidate >> 32);
    return __uint_as_float(b >> 31 ? b & 0x7fffffff : ~b);
}

__device__ __forceinline__ u64 block_max(u64 best) {
    __shared__ u64 warps[THREADS / 32];
#pragma unroll
    for (int d = 16; d; d >>= 1) best = max(best, __shfl_xor_sync(0xffffffff, best, d));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
    __syncthreads();
    best = warps[0];
#pragma unroll
    for (int w = 1; w < THREADS / 32; w++) best = max(best, warps[w]);
    return best;
}

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000) != 0x7f800000; }

// Store the token (-1 if the logits are not finite) where the next step reads it and, for the host,
// in history[position]; advance the position.
__device__ __forceinline__ void hand_on(int token, long long* tokens, int* positions, int* history) {
    const int position = positions[0] + 1;
    tokens[0] = max(token, 0);  // steps that are already under way must find a row of the embedding
    history[position] = token;
    positions[0] = position;
}

// Greedy: the largest logit, the lowest token among equals. logits float32[n]; partial u64[gridDim.x]; ticket u32, zero.
extern "C" __global__ void __launch_bounds__(THREADS)
sample_greedy(const float* __restrict__ logits, int n, u64* partial, u32* ticket, long long* tokens, int* positions, int* history) {
    start_dependents();
    wait_for_inputs();
    u64 best = 0;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) best = max(best, candidate(__ldcg(logits + i), i));
    best = block_max(best);
    if (threadIdx.x == 0) partial[blockIdx.x] = best;
    if (!last_to_arrive(ticket, gridDim.x)) return;
    best = 0;
    for (int i = threadIdx.x; i < gridDim.x; i += THREADS) best = max(best, __ldcg(partial + i));
    best = block_max(best);
    if (threadIdx.x == 0) hand_on(best == ~0ull ? -1 : (int)~(u32)best, tokens, positions, history);
}

constexpr int DRAW = 1024;

// The sum over all threads, the same for each; `before` is what those in front of this thread add up to.
template <typename T>
__device__ __forceinline__ T block_sum(T mine, T& before) {
    __shared__ T warps[DRAW / 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    T sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const T other = __shfl_up_sync(0xffffffff, sum, d);
        if (lane >= d) sum += other;
    }
    __syncthreads();
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    T total = 0, start = 0;
    for (int w = 0; w < DRAW / 32; w++) {
        if (w == warp) start = total;
        total += warps[w];
    }
    before = start + sum - mine;
    return total;
}

// The first word of Philox4x32-10 (Salmon et al., 2011) with counter (position, 0, 0, 0), as runtime/network/sampling.py.
__device__ __forceinline__ u32 philox(u32 position, u64 seed) {
    u32 c0 = position, c1 = 0, c2 = 0, c3 = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int i = 0; i < 10; i++) {
        const u64 p0 = (u64)0xD2511F53u * c0, p1 = (u64)0xCD9E8D57u * c2;
        c0 = (u32)(p1 >> 32) ^ c1 ^ k0, c1 = (u32)p1, c2 = (u32)(p0 >> 32) ^ c3 ^ k1, c3 = (u32)p0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c0;
}

// A draw among the first `count` of all `n` logits in descending order, with their ids, as `sample`
// of runtime/network/sampling.py makes it: top-p, min-p, temperature. One block; a thread takes a run of
// neighbours, so that sums have one order.
extern "C" __global__ void __launch_bounds__(DRAW)
sample_draw(const float* __restrict__ values, const long long* __restrict__ ids, int n, int count, double temperature, double top_p,
            double min_p, const u64* __restrict__ seed, long long* tokens, int* positions, int* history) {
    start_dependents();
    wait_for_inputs();
    const float best = values[0];
    const bool finite = is_finite(best) && is_finite(values[n - 1]);  // NaN comes first, infinities at the ends
    const int each = (count + DRAW - 1) / DRAW, first = min((int)threadIdx.x * each, count), last = min(first + each, count);
    double sum = 0, before;
    int likely = 0, unused;
    for (int i = first; i < last; i++) {
        const double p = exp((double)(values[i] - best));
        sum += p;
        likely += p >= min_p;
    }
    const double total = block_sum(sum, before);
    int kept = count;
    if (top_p < 1) {
        int below = 0;
        for (int i = first; i < last; i++) {
            before += exp((double)(values[i] - best));
            below += before < top_p * total;
        }
        kept = min(count, 1 + block_sum(below, unused));
    }
    kept = min(kept, block_sum(likely, unused));
    const int end = min(last, kept);
    sum = 0;
    for (int i = first; i < end; i++) sum += exp((double)(values[i] - best) / temperature);
    const double weight = block_sum(sum, before), target = (double)(philox((u32)(positions[0] + 1), *seed) >> 8) * 0x1p-24 * weight;
    int below = 0;
    for (int i = first; i < end; i++) {
        before += exp((double)(values[i] - best) / temperature);
        below += before <= target;
    }
    below = block_sum(below, unused);
    if (threadIdx.x == 0) {
        hand_on(finite ? (int)ids[min(below, kept - 1)] : -1, tokens, positions, history);
    }
}

constexpr int BEST = 512, LIST = 64;  // threads of a block, and the most candidates: a warp keeps them in order, two to a lane

// Of the 64 numbers of a warp (number e in lane e % 32, place e / 32), pairs `distance` apart change places where they are not in
// descending order; in every other run of `size` where they are.
template <int DISTANCE>
__device__ __forceinline__ void exchange_pairs(u64 (&x)[2], int lane, int size) {
    if (DISTANCE == 32) {
        const u64 larger = max(x[0], x[1]), smaller = x[0] ^ x[1] ^ larger;
        x[0] = larger, x[1] = smaller;  // only where all 64 are one run
    } else {
#pragma unroll
        for (int place = 0; place < 2; place++) {
            const u64 other = __shfl_xor_sync(0xffffffff, x[place], DISTANCE), larger = max(x[place], other);
            const bool first = (lane & DISTANCE) == 0, descending = (lane + 32 * place & size) == 0;
            x[place] = first == descending ? larger : x[place] ^ other ^ larger;
        }
    }
}

// 64 numbers that rise and then fall (or the other way round) into descending order: the last stage of a bitonic sort (Batcher, 1968).
__device__ __forceinline__ void descend(u64 (&x)[2], int lane) {
    exchange_pairs<32>(x, lane, LIST);
    exchange_pairs<16>(x, lane, LIST);
    exchange_pairs<8>(x, lane, LIST);
    exchange_pairs<4>(x, lane, LIST);
    exchange_pairs<2>(x, lane, LIST);
    exchange_pairs<1>(x, lane, LIST);
}

__device__ __forceinline__ void sort_descending(u64 (&x)[2], int lane) {
#pragma unroll
    for (int size = 2; size <= 32; size *= 2) {
        if (size > 16) exchange_pairs<16>(x, lane, size);
        if (size > 8) exchange_pairs<8>(x, lane, size);
        if (size > 4) exchange_pairs<4>(x, lane, size);
        if (size > 2) exchange_pairs<2>(x, lane, size);
        exchange_pairs<1>(x, lane, size);
    }
    descend(x, lane);
}

// The 64 largest of a warp's list and another one, both descending: of first and last, second and second to last, ... the larger ones.
__device__ __forceinline__ void merge(u64 (&x)[2], const u64* other, int lane) {
    x[0] = max(x[0], __ldcg(other + LIST - 1 - lane));
    x[1] = max(x[1], __ldcg(other + LIST / 2 - 1 - lane));
    descend(x, lane);
}

// Bring the 64 largest numbers of the block's warps, in descending order, to the first warp.
__device__ __forceinline__ void merge_warps(u64 (&x)[2], int warp, int lane) {
    __shared__ u64 lists[BEST / 32][LIST];
#pragma unroll
    for (int half = BEST / 64; half; half /= 2) {
        __syncthreads();
        if (warp >= half && warp < 2 * half) lists[warp][lane] = x[0], lists[warp][32 + lane] = x[1];
        __syncthreads();
        if (warp < half) {
            x[0] = max(x[0], lists[warp + half][LIST - 1 - lane]);
            x[1] = max(x[1], lists[warp + half][LIST / 2 - 1 - lane]);
            descend(x, lane);
        }
    }
}

// What is up to and with each number of a warp's list in order, and the sum of all.
__device__ __forceinline__ double running_sum(double (&x)[2], int lane) {
    double total = 0;
#pragma unroll
    for (int place = 0; place < 2; place++) {
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const double other = __shfl_up_sync(0xffffffff, x[place], d);
            if (lane >= d) x[place] += other;
        }
        x[place] += total;
        total = __shfl_sync(0xffffffff, x[place], 31);
    }
    return total;
}

__device__ __forceinline__ int count_of(bool first, bool second) {
    return __popc(__ballot_sync(0xffffffff, first)) + __popc(__ballot_sync(0xffffffff, second));
}

// As `sample_draw` for at most 64 candidates, without sorting all logits: every warp orders 64 of them, lists are merged two by two.
// logits float32[n], a block for 2 BEST of them; partial u64[gridDim.x][LIST]; ticket u32, zero.
extern "C" __global__ void __launch_bounds__(BEST)
sample_best(const float* __restrict__ logits, int n, u64* partial, u32* ticket, int count, double temperature, double top_p, double min_p,
            const u64* __restrict__ seed, long long* tokens, int* positions, int* history) {
    start_dependents();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    wait_for_inputs();
    u64 x[2];
#pragma unroll
    for (int place = 0; place < 2; place++) {
        const int i = (2 * blockIdx.x + place) * BEST + threadIdx.x;
        x[place] = i < n ? candidate(__ldcg(logits + i), i) : 0;  // 0 is below every candidate
    }
    sort_descending(x, lane);
    merge_warps(x, warp, lane);
    if (warp == 0) partial[LIST * blockIdx.x + lane] = x[0], partial[LIST * blockIdx.x + 32 + lane] = x[1];
    if (!last_to_arrive(ticket, gridDim.x)) return;
    x[0] = x[1] = 0;
    for (int list = warp; list < gridDim.x; list += BEST / 32) merge(x, partial + LIST * list, lane);
    merge_warps(x, warp, lane);
    if (warp) return;
    const u64 first = __shfl_sync(0xffffffff, x[0], 0);
    const float best = value_of(first);
    double p[2], weights[2];
    bool likely[2], kept_here[2], below[2];
#pragma unroll
    for (int place = 0; place < 2; place++) {
        p[place] = lane + 32 * place < count ? exp((double)(value_of(x[place]) - best)) : 0;
        likely[place] = lane + 32 * place < count && p[place] >= min_p;
    }
    int kept = count;
    const double total = running_sum(p, lane);
    if (top_p < 1) {
        for (int place = 0; place < 2; place++) below[place] = lane + 32 * place < count && p[place] < top_p * total;
        kept = min(count, 1 + count_of(below[0], below[1]));
    }
    kept = min(kept, count_of(likely[0], likely[1]));
    for (int place = 0; place < 2; place++) {
        kept_here[place] = lane + 32 * place < kept;
        weights[place] = kept_here[place] ? exp((double)(value_of(x[place]) - best) / temperature) : 0;
    }
    const double weight = running_sum(weights, lane), target = (double)(philox((u32)(positions[0] + 1), *seed) >> 8) * 0x1p-24 * weight;
    for (int place = 0; place < 2; place++) below[place] = kept_here[place] && weights[place] <= target;
    const int drawn = min(count_of(below[0], below[1]), kept - 1);
    const u64 chosen = __shfl_sync(0xffffffff, drawn < 32 ? x[0] : x[1], drawn % 32);
    __syncwarp();  // the position has been read by all
    if (lane == 0) hand_on(first == ~0ull ? -1 : (int)~(u32)chosen, tokens, positions, history);
}
