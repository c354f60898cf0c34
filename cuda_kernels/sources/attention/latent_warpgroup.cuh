// latent_attention of mla.cu on Hopper's products of a warpgroup (wgmma), for caches of halves without a list of positions.
//
// A tile is 64 positions in CHUNKS of 64 elements: 64 rows of 128 bytes, with their sixteens permuted as wgmma wants it. It is read
// twice: scores[position, pair] = tile * queries^T has it as the left operand, row by row; mixes[element, pair] = tile^T * probabilities
// as the left operand, turned. Both have one column for every pair and each part of its numbers.
//
// PRODUCERS warps copy tiles, each for one stage alone: what makes copies visible to wgmma waits for all that a thread has started.
// One warpgroup computes, so that nothing but maxima and probabilities goes from warp to warp.
#pragma once

constexpr int COMPUTING = 128, PRODUCERS = 4;
static_assert(THREADS * TEAMS == COMPUTING + 32 * PRODUCERS, "threads as the launching side starts them");
constexpr int CHUNKS = DK / 64, BLOCKS = DV / 64, COLUMNS = 2 * R;  // pairs, and their rounding errors
constexpr int CHUNK_BYTES = TILE * 128, TILE_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int QUERIES_AT = STAGES * TILE_BYTES, PROBABILITIES_AT = QUERIES_AT + CHUNKS * COLUMNS * 128, MAXIMA_AT = PROBABILITIES_AT + COLUMNS * 128, BARRIERS_AT = MAXIMA_AT + 2 * 4 * R * 4,
              WARPGROUP_BYTES = BARRIERS_AT + 2 * STAGES * 8 + 1024;  // to begin at a multiple of 1024
static_assert(TILE == 64 && COLUMNS == 32 && ROPE % 64 == 0 && RANK % 64 == 0 && R == 16 && !CHOSEN && is_float(TYPE_K) && PRODUCERS % STAGES == 0, "a shape this is made for");
static_assert(WARPGROUP_BYTES == SHARED_BYTES, "sizes as the launching side computes them");

#ifndef ON_HOST
__device__ __forceinline__ u32 place_in_shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(place_in_shared(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(place_in_shared(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\nbra again;\nover:\n}" ::"r"(
            place_in_shared(barrier)),
        "r"(phase)
        : "memory");
}
__device__ __forceinline__ void computing_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(COMPUTING) : "memory"); }
// What this thread stored or copied to shared memory can be read by wgmma.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
__device__ __forceinline__ void store_turned(char* at, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place_in_shared(at)), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

#define WARPGROUP_PRODUCT(TYPE)                                                                                                   \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE       \
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, add, 1, 1, %19, 0;\n}"        \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),   \
                   "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])                     \
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)TURNED))

// d [64, 32] += a [64, 16] * b [16, 32], or = with `add` false. TURNED: rows of a are 16 numbers of 64, not 64 of 16.
template <bool TURNED>
__device__ __forceinline__ void warpgroup_product(float (&d)[16], u64 a, u64 b, bool add) {
    if constexpr (TYPE_K == F16) WARPGROUP_PRODUCT("f16");
    else WARPGROUP_PRODUCT("bf16");
}
#endif

// Eight rows of 128 bytes after another eight, each row's sixteens permuted by its number.
__device__ __forceinline__ u64 operand_at(const char* at) {
    return (u64)(place_in_shared(at) >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Sixteen bytes `unit` of row `row` of a chunk.
__device__ __forceinline__ char* sixteen(char* chunk, int row, int unit) { return chunk + row * 128 + ((unit ^ (row & 7)) << 4); }

__device__ __forceinline__ void produce(char* tiles, const u8* cache, int first, int last, int p0, u64* full, u64* empty) {
    const int producer = threadIdx.x / 32 - COMPUTING / 32, lane = threadIdx.x % 32;
    const int stage = producer % STAGES, unit = lane % 8, mine = producer / STAGES * 4 + lane / 8;
    constexpr int AT_ONCE = PRODUCERS / STAGES * 4;
    char* tile = tiles + stage * TILE_BYTES;
    for (int t = stage, round = 0; first + t * TILE < last; t += STAGES, round++) {
        const int at = first + t * TILE, n = min(TILE, last - at), before = max(0, min(n, p0 - at));
        if (round) barrier_wait(empty + stage, (round - 1) & 1);
        const auto copy = [&](int from, int until) {
#pragma unroll 4
            for (int row = from + mine; row < until; row += AT_ONCE) {
                const u8* source = cache + (long long)(at + row) * ROW_K + unit * 16;
                char* to = sixteen(tile, row, unit);
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) copy16<true>(to + c * CHUNK_BYTES, source + c * 128);
            }
        };
        copy(0, before);
        if (before < n) {  // the previous launch writes these
            wait_for_inputs();
            copy(before, n);
        }
        end_of_copies();
        wait_for_copies<0>();
        show_to_products();
        barrier_arrive(full + stage);
    }
}

// Arguments as of mla.cu's. Grid (splits, tiles), THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS * TEAMS, 1)
latent_attention(const u16* queries, const u8* cache, const int* __restrict__ position, float* __restrict__ partial, const int*, int) {
#ifndef ON_HOST
    extern __shared__ __align__(16) char shared[];
#endif
    char* const tiles = shared + (1024 - place_in_shared(shared) % 1024) % 1024;
    char *const q = tiles + QUERIES_AT, *const probabilities = tiles + PROBABILITIES_AT;
    float* const maxima = (float*)(tiles + MAXIMA_AT);
    u64 *const full = (u64*)(tiles + BARRIERS_AT), *const empty = full + STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = blockIdx.y * R;
    const int p0 = *position, n_kv = p0 + ROWS;
    const Ranges ranges(n_kv, gridDim.x);
    const int first = (int)blockIdx.x * ranges.size, last = min(first + ranges.size, n_kv);
    if (first >= n_kv) return;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(full + s, 32 * PRODUCERS / STAGES), barrier_init(empty + s, COMPUTING / 32);
        show_to_products();
    }
    __syncthreads();
    if (warp >= COMPUTING / 32) {
        produce(tiles, cache, first, last, p0, full, empty);
        return;
    }

    wait_for_inputs();
    start_dependents();
    constexpr int UNITS_Q = COLUMNS * DK / 8, EACH_Q = (UNITS_Q + COMPUTING - 1) / COMPUTING;
    uint4 loaded[EACH_Q];
#pragma unroll
    for (int e = 0; e < EACH_Q; e++) {
        const int i = min((int)threadIdx.x + COMPUTING * e, UNITS_Q - 1), row = i / (DK / 8), unit = i % (DK / 8);
        loaded[e] = __ldcg((const uint4*)(queries + ((long long)(pair + row % R) * 2 + row / R) * DK + 8 * unit));
    }
#pragma unroll
    for (int e = 0; e < EACH_Q; e++) {
        const int i = min((int)threadIdx.x + COMPUTING * e, UNITS_Q - 1), row = i / (DK / 8), unit = i % (DK / 8);
        *(uint4*)sixteen(q + unit / 8 * (COLUMNS * 128), row, unit % 8) = loaded[e];
    }
    show_to_products();
    computing_barrier();

    // A thread's numbers are of two positions (or elements), lane / 4 and 8 after it, and four pairs.
    const auto pair_of = [&](int j) { return 8 * (j / 2) + lane % 4 * 2 + j % 2; };
    float mix[BLOCKS][COLUMNS / 2] = {}, most[4], sum[4] = {};
    int seen[4];  // positions
#pragma unroll
    for (int j = 0; j < 4; j++) most[j] = -INFINITY, seen[j] = p0 + min((pair + pair_of(j)) / HEADS, ROWS - 1) + 1;
    for (int t = 0; first + t * TILE < last; t++) {
        const int stage = t % STAGES, at = first + t * TILE, n = min(TILE, last - at);
        char* const tile = tiles + stage * TILE_BYTES;
        barrier_wait(full + stage, t / STAGES & 1);
        if (n < TILE) {  // a probability of 0 times the memory after the last row could be NaN
            for (int i = threadIdx.x; i < (TILE - n) * CHUNKS * 8; i += COMPUTING)
                *(uint4*)(tile + i % CHUNKS * CHUNK_BYTES + n * 128 + i / CHUNKS * 16) = make_uint4(0, 0, 0, 0);
            show_to_products();
            computing_barrier();
        }
        float s[COLUMNS / 2];
        begin_products();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                warpgroup_product<false>(s, operand_at(tile + c * CHUNK_BYTES + 32 * k), operand_at(q + c * COLUMNS * 128 + 32 * k), c || k);
        end_products();

        float now[4], factor[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            now[j] = -INFINITY;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float& x = s[4 * (j / 2) + 2 * h + j % 2];
                x += s[COLUMNS / 4 + 4 * (j / 2) + 2 * h + j % 2];
                x = at + 16 * warp + 8 * h + lane / 4 < seen[j] ? x : -INFINITY;
                now[j] = fmaxf(now[j], x);
            }
        }
#pragma unroll
        for (int d = 4; d < 32; d <<= 1)
#pragma unroll
            for (int j = 0; j < 4; j++) now[j] = fmaxf(now[j], __shfl_xor_sync(0xffffffff, now[j], d));
        float* const of_warps = maxima + t % 2 * 4 * R;
        if (lane < 4)
#pragma unroll
            for (int j = 0; j < 4; j++) of_warps[warp * R + pair_of(j)] = now[j];
        computing_barrier();
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int w = 0; w < 4; w++) now[j] = fmaxf(now[j], of_warps[w * R + pair_of(j)]);
            now[j] = fmaxf(now[j], most[j]);
            const float base = now[j] == -INFINITY ? 0.f : now[j];  // a row that sees nothing of this range yet
            factor[j] = exp2f(most[j] - base);
            most[j] = now[j];
            sum[j] *= factor[j];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float& x = s[4 * (j / 2) + 2 * h + j % 2];
                x = exp2f(x - base);
                sum[j] += x;
            }
        }
        u32 whole[4], rest[4];  // of 8 pairs (m / 2) and 8 positions (m % 2)
#pragma unroll
        for (int m = 0; m < 4; m++) {
            u16 low, high, low_rest, high_rest;
            two_parts(s[4 * (m / 2) + 2 * (m % 2)], &low, &low_rest);
            two_parts(s[4 * (m / 2) + 2 * (m % 2) + 1], &high, &high_rest);
            whole[m] = low | (u32)high << 16, rest[m] = low_rest | (u32)high_rest << 16;
        }
        char* const to = sixteen(probabilities, lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
        store_turned(to, whole);
        store_turned(to + R * 128, rest);
        show_to_products();
        computing_barrier();
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) mix[b][i] *= factor[i / 4 % 2 * 2 + i % 2];
        begin_products();
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                warpgroup_product<true>(mix[b], operand_at(tile + (ROPE / 64 + b) * CHUNK_BYTES + 2048 * k),
                                        operand_at(probabilities + 32 * k), true);
        end_products();
        if (lane == 0) barrier_arrive(empty + stage);
    }
    float* const mine = partial + ((long long)blockIdx.y * gridDim.x + blockIdx.x) * PART;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            mine[pair_of(i / 4 * 2 + i % 2) * DV + 64 * b + 16 * warp + 8 * (i / 2 % 2) + lane / 4] =
                mix[b][i] + mix[b][COLUMNS / 4 + i];
#pragma unroll
    for (int d = 4; d < 32; d <<= 1)
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] += __shfl_xor_sync(0xffffffff, sum[j], d);
    computing_barrier();  // maxima are read
    if (lane < 4)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            maxima[warp * R + pair_of(j)] = sum[j];
            if (warp == 0) mine[R * DV + pair_of(j)] = most[j];
        }
    computing_barrier();
    if (threadIdx.x < R) mine[R * DV + R + threadIdx.x] = maxima[threadIdx.x] + maxima[R + threadIdx.x] + maxima[2 * R + threadIdx.x] + maxima[3 * R + threadIdx.x];
}
