// `solve` of kimi_delta.cu: what the chunks need of each other's rows, all chunks at the same time.
#pragma once

// Decays of a channel can differ by more than floats hold. So a chunk is divided into parts of PART tokens. Let L be the running sum of g within a part, and
// B the sum of all of it. For tokens i and j of parts s > r,
//
//     exp(G_i - G_j) = exp(L_i) exp(B_r - L_j) exp(B_(r + 1) + ... + B_(s - 1)),
//
// no factor of which is larger than 1, so A and P are products of rows that are multiplied by them. Within a part each pair has exponentials of its own.
// Sums are of logarithms to the base of 2.
constexpr float LOG2_E = 1.44269504f;
constexpr int PART = 16, PARTS = CHUNK / PART;
constexpr int SUM_PITCH = KEYS;
constexpr int TILE = CHUNK * KEY_PITCH;  // halves
static_assert(THREADS == 256 && PARTS == 4, "warps divide the work");

// 2 to the power of x.
__device__ __forceinline__ float power(float x) {
#ifdef ON_HOST
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

constexpr int SQUARE_FLOATS = TILE / 2 > CHUNK * SQUARE_PITCH ? TILE / 2 : CHUNK * SQUARE_PITCH;          // keys, then T
constexpr int LAST_FLOATS = TILE / 2 + CHUNK * SUM_PITCH > CHUNK * VALUE_PITCH ? TILE / 2 + CHUNK * SUM_PITCH : CHUNK * VALUE_PITCH;
constexpr int SOLVE_FLOATS = SQUARE_FLOATS + TILE / 2 + LAST_FLOATS + PARTS * PART * PART;

__device__ __forceinline__ void scaled_row(u16* at, float2 x, float2 by) { store_two(at, x.x * by.x, x.y * by.y); }
__device__ __forceinline__ void store_scaled(u16* at, uint2 x, float4 by) {
    const float4 four = make_float4(half_to_float((u16)x.x), half_to_float((u16)(x.x >> 16)), half_to_float((u16)x.y), half_to_float((u16)(x.y >> 16)));
    store_two(at, four.x * by.x, four.y * by.y), store_two(at + 2, four.z * by.z, four.w * by.w);
}
__device__ __forceinline__ float2 two_halves(const u16* at) {
    const u32 x = *(const u32*)at;
    return make_float2(half_to_float((u16)x), half_to_float((u16)(x >> 16)));
}

// The sums over the lanes of a warp of N numbers, 16 or 32: lane l gets that of number l, or l / 2 of 16. Lanes that differ in bit D divide them.
template <int D, int N>
__device__ __forceinline__ float sum_over_lanes(const float (&x)[N]) {
    if constexpr (N == 1) return D ? x[0] + __shfl_xor_sync(0xffffffff, x[0], 1) : x[0];
    else {
        const bool upper = threadIdx.x & D;
        float half[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const float mine = upper ? x[N / 2 + i] : x[i], other = upper ? x[i] : x[N / 2 + i];
            half[i] = mine + __shfl_xor_sync(0xffffffff, other, D);
        }
        return sum_over_lanes<D / 2>(half);
    }
}

// Row `at` of a part with the N rows before and itself, by a warp, a lane four channels: beta A to `near`, P to qk with zeros after the row.
template <int N>
__device__ __forceinline__ void pairs_of_row(int part, int at, const u16* k_here, const u16* q_here, const float* sums, const float* betas, float* near,
                                             u16* qk) {
    constexpr int FOURS = (KEYS + 127) / 128;
    const int lane = threadIdx.x % 32, begin = part * PART, i = begin + at;
    float4 of_k[FOURS], of_q[FOURS], sum[FOURS];
    float found[2 * N] = {};  // of keys, then of queries
#pragma unroll
    for (int p = 0; p < FOURS; p++) {
        const int c = 4 * lane + 128 * p;
        if (c >= KEYS) continue;
        of_k[p] = four_factors(k_here + i * KEY_PITCH + c), of_q[p] = four_factors(q_here + i * KEY_PITCH + c);
        sum[p] = four_factors(sums + i * SUM_PITCH + c);
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (j > at) continue;
#pragma unroll
        for (int p = 0; p < FOURS; p++) {
            const int c = 4 * lane + 128 * p;
            if (c >= KEYS) continue;
            const float4 other = four_factors(k_here + (begin + j) * KEY_PITCH + c), from = four_factors(sums + (begin + j) * SUM_PITCH + c);
            const float4 x = make_float4(other.x * power(sum[p].x - from.x), other.y * power(sum[p].y - from.y), other.z * power(sum[p].z - from.z),
                                         other.w * power(sum[p].w - from.w));
            found[j] = dot4(of_k[p], x, found[j]), found[N + j] = dot4(of_q[p], x, found[N + j]);
        }
    }
    const float mine = sum_over_lanes<16>(found);
    const int number = lane * N / 16, j = number % N;
    if (N == 8 && lane % 2) return;
    if (number < N) near[i * PART + j] = betas[i] * mine;
    else qk[i * CHUNK + begin + j] = j <= at ? float_to_half(mine) : 0;
    if (N == 8 && number < N) qk[i * CHUNK + begin + N + j] = 0;
}

// One block for a chunk of a head: (chunks, sequences * VALUE_HEADS) blocks.
//
// decay half[sequences * tokens] of rows `decay_pitch` elements apart, an element for each channel of all heads; rates float32[sequences * tokens, VALUE_HEADS], of which
// beta is the sigmoid; dt float32[VALUE_HEADS, KEY], a float32[VALUE_HEADS]: g = a softplus(decay + dt), with a BOUND below 0 BOUND sigmoid(a (decay + dt)). q, k, v as `heads` leaves them; q becomes exp(G) Q,
// k exp(G[last] - G) K. values and keys, of the shape of v and k: T beta V and T beta (exp(G) K); qk float16[.., chunks, CHUNK, CHUNK]: P;
// whole float32[.., chunks, KEY]: exp(G[last]).
extern "C" __global__ void __launch_bounds__(THREADS, KEY > 128 ? 1 : 2)
solve(const u16* decay, int decay_pitch, const float* rates, const float* dt, const float* a, int tokens, u16* q, u16* k, const float* v, float* values,
      u16* keys, u16* qk, float* whole) {
    follow_launch_before();
#ifndef ON_HOST
    extern __shared__ __align__(16) char shared[];
#endif
    __shared__ __align__(16) float betas[CHUNK], ends[PARTS][KEYS];  // B
    u16 *k_here = (u16*)shared, *q_here = k_here + 2 * SQUARE_FLOATS, *far = q_here + TILE;
    float *square = (float*)shared, *v_here = (float*)far, *sums = (float*)(far + TILE), *near = v_here + LAST_FLOATS;  // sums: L; near: A within parts
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, head = blockIdx.y % VALUE_HEADS, sequence = blockIdx.y / VALUE_HEADS;
    const long long pair = (long long)blockIdx.y * gridDim.x + blockIdx.x;
    const int left = tokens - blockIdx.x * CHUNK;  // tokens from the chunk's first one on
    const long long first_token = (long long)sequence * tokens + blockIdx.x * CHUNK;
    q += pair * CHUNK * KEY, k += pair * CHUNK * KEY, qk += pair * CHUNK * CHUNK;
    copy_rows<KEY, THREADS>(k_here, KEY_PITCH, k, CHUNK);
    copy_rows<KEY, THREADS>(q_here, KEY_PITCH, q, CHUNK);
    end_of_copies();
    clear_columns<THREADS>(k_here, KEY_PITCH, CHUNK, KEY, KEYS);
    clear_columns<THREADS>(q_here, KEY_PITCH, CHUNK, KEY, KEYS);
    if (thread < CHUNK) betas[thread] = thread < left ? 1.f / (1.f + expf(-rates[(first_token + thread) * VALUE_HEADS + head])) : 0.f;
    for (int job = thread; job < PARTS * KEYS; job += THREADS) {
        const int part = job / KEYS, c = job % KEYS;
        const float shift = c < KEY ? dt[head * KEY + c] : 0.f, rate = a[head];
        float sum = 0.f;
        u16 read[PART];  // all of them on their way at once
#pragma unroll
        for (int i = 0; i < PART; i++)
            read[i] = c < KEY && part * PART + i < left ? decay[(first_token + part * PART + i) * decay_pitch + head * KEY + c] : 0;
#pragma unroll
        for (int i = 0; i < PART; i++) {
            const int token = part * PART + i;
            if (c < KEY && token < left) {
                const float x = from_half(read[i]) + shift;
                sum += LOG2_E * (BOUND < 0.f ? BOUND / (1.f + expf(-rate * x)) : rate * (x > 20.f ? x : log1pf(expf(x))));
            }
            sums[token * SUM_PITCH + c] = sum;
        }
        ends[part][c] = sum;
    }
    wait_for_copies<0>();
    __syncthreads();
    // Within parts: a warp has a row of each half of each part, so that warps have as many pairs.
#pragma unroll 1
    for (int part = 0; part < PARTS; part++) {
        pairs_of_row<PART / 2>(part, warp, k_here, q_here, sums, betas, near, qk);
        pairs_of_row<PART>(part, PART - 1 - warp, k_here, q_here, sums, betas, near, qk);
    }
    __syncthreads();
    for (int job = thread; job < CHUNK * (KEYS / 2); job += THREADS) {
        const int i = job / (KEYS / 2), c = job % (KEYS / 2) * 2;
        const float2 sum = *(const float2*)(sums + i * SUM_PITCH + c), end = *(const float2*)(ends[i / PART] + c), x = two_halves(k_here + i * KEY_PITCH + c);
        const float2 since = make_float2(power(sum.x), power(sum.y));
        scaled_row(far + i * KEY_PITCH + c, x, make_float2(power(end.x - sum.x), power(end.y - sum.y)));
        scaled_row(k_here + i * KEY_PITCH + c, x, since);
        scaled_row(q_here + i * KEY_PITCH + c, two_halves(q_here + i * KEY_PITCH + c), since);
    }
    __syncthreads();
    // Between parts, DISTANCE of them apart: warps 0 to 2 have the rows of keys, 4 to 6 those of queries.
    const int g = lane / 4, two = lane % 4 * 2, r = warp % 4;
    float alike[PARTS - 1][2][4] = {};
#pragma unroll
    for (int distance = 1; distance < PARTS; distance++) {
        if (r + distance < PARTS) {
            const int row = (r + distance) * PART;
            float d[2][4] = {};
            by_fours<2, KEYS>(d, (warp < 4 ? k_here : q_here) + row * KEY_PITCH, KEY_PITCH, far + r * PART * KEY_PITCH, KEY_PITCH);
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int e = 0; e < 4; e++) alike[distance - 1][b][e] = d[b][e];
            if (warp >= 4)
#pragma unroll
                for (int b = 0; b < 2; b++)
#pragma unroll
                    for (int h = 0; h < 2; h++) store_two(qk + (row + g + 8 * h) * CHUNK + r * PART + 8 * b + two, d[b][2 * h], d[b][2 * h + 1]);
        }
        __syncthreads();
        if (distance == PARTS - 1) break;
        for (int job = thread; job < (PARTS - 1 - distance) * PART * (KEYS / 2); job += THREADS) {
            const int i = job / (KEYS / 2), c = job % (KEYS / 2) * 2;
            const float2 end = *(const float2*)(ends[i / PART + distance] + c);
            u16* at = far + i * KEY_PITCH + c;
            scaled_row(at, two_halves(at), make_float2(power(end.x), power(end.y)));
        }
        __syncthreads();
    }
    // The strictly lower part of beta A, where the keys were; a pair of values is written by one thread.
    for (int job = thread; job < CHUNK * CHUNK; job += THREADS) {
        const int i = job / CHUNK, j = job % CHUNK;
        if (i / PART <= j / PART) square[i * SQUARE_PITCH + j] = i / PART == j / PART && i > j ? near[i * PART + j % PART] : 0.f;
    }
    if (warp < 4)
#pragma unroll
        for (int distance = 1; distance < PARTS; distance++)
            if (r + distance < PARTS)
#pragma unroll
                for (int b = 0; b < 2; b++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int i = (r + distance) * PART + g + e / 2 * 8;
                        square[i * SQUARE_PITCH + r * PART + 8 * b + two + e % 2] = betas[i] * alike[distance - 1][b][e];
                    }
    // What other kernels read: exactly the decays of the whole chunk, of rows as `heads` left them, four channels at a time.
    constexpr int FOURS = CHUNK * KEYS / 4, TURNS = 4;
#pragma unroll 1
    for (int first = thread; first < FOURS; first += TURNS * THREADS) {
        uint2 of_k[TURNS], of_q[TURNS];  // read before anything is written
#pragma unroll
        for (int n = 0; n < TURNS; n++) {
            const int job = first + n * THREADS, i = job / (KEYS / 4), c = job % (KEYS / 4) * 4;
            of_k[n] = of_q[n] = make_uint2(0, 0);
            if (job < FOURS && c < KEY) of_k[n] = *(const uint2*)(k + i * KEY + c), of_q[n] = *(const uint2*)(q + i * KEY + c);
        }
#pragma unroll
        for (int n = 0; n < TURNS; n++) {
            const int job = first + n * THREADS, i = job / (KEYS / 4), c = job % (KEYS / 4) * 4, part = i / PART;
            if (job >= FOURS) break;
            const float4 sum = four_factors(sums + i * SUM_PITCH + c);
            float4 since = sum, until = make_float4(-sum.x, -sum.y, -sum.z, -sum.w);
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const float4 end = four_factors(ends[p] + c);
                if (p < part) since = make_float4(since.x + end.x, since.y + end.y, since.z + end.z, since.w + end.w);
                else until = make_float4(until.x + end.x, until.y + end.y, until.z + end.z, until.w + end.w);
            }
            since = make_float4(power(since.x), power(since.y), power(since.z), power(since.w));
            until = make_float4(power(until.x), power(until.y), power(until.z), power(until.w));
            store_scaled(q_here + i * KEY_PITCH + c, of_k[n], since);
            if (c >= KEY) continue;
            store_scaled(q + i * KEY + c, of_q[n], since);
            store_scaled(k + i * KEY + c, of_k[n], until);
            if (i == CHUNK - 1) *(float4*)(whole + pair * KEY + c) = since;
        }
    }
    __syncthreads();
    copy_rows<VALUE, THREADS>(v_here, VALUE_PITCH, v + pair * CHUNK * VALUE, CHUNK);
    end_of_copies();
    invert(square, betas);
    wait_for_copies<0>();
    __syncthreads();
    const int row = warp % 4 * 16, half = warp / 4;
    times_t<VALUE, VALUES / 2>(square, v_here, VALUE_PITCH, row, half * (VALUES / 2), values + pair * CHUNK * VALUE);
    times_t<KEY, KEYS / 2>(square, q_here, KEY_PITCH, row, half * (KEYS / 2), keys + pair * CHUNK * KEY);
}
