// Gated delta nets over many tokens, CHUNK of them at a time (Yang et al., 2024).
//
//     S <- exp(g) S;  e = beta (v - S^T k);  S <- S + k e^T;  o = S^T q
//
// With G the running sum of g in a chunk, D[i, j] = exp(G[i] - G[j]) for i >= j, T the inverse of
// I + (strictly lower part of beta K K^T D) and S the memory before the chunk:
//
//     E = T beta V - (T beta exp(G) K) S                   errors, from `solve`, products and `chunks`
//     O = exp(G) (Q S) + (Q K^T D) E                       results, from products and `gated`
//     S <- exp(G[last]) S + K^T (exp(G[last] - G) E)       in `chunks`
//
// `heads` comes first, `solve` after K K^T and Q K^T, `chunks` after the products with T, `gated`
// last. q, k, v and all products are float32[sequences, VALUE_HEADS, tokens, length], tokens in
// whole chunks with zeros after the last one: these do not decay and write nothing.
//
// Compiled per shape: HALF (see prompt/common.cuh); KEY_HEADS, VALUE_HEADS, their lengths KEY and
// VALUE (multiples of 4), TAPS, TILED, JOINED as in step/delta.cu; STAGES of `chunks`.
#include "step/common.cuh"

constexpr int CHUNK = 64, GROUP = VALUE_HEADS / KEY_HEADS, PAST = TAPS - 1;
constexpr int CHANNELS = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE;
constexpr int TURN = 2 * KEY + 2 * GROUP * VALUE;  // elements of a key head if JOINED
static_assert(KEY % 4 == 0 && VALUE % 4 == 0 && VALUE_HEADS % KEY_HEADS == 0 && TAPS >= 2, "a shape this is made for");

__device__ __forceinline__ float from_half(u32 bits) { return HALF ? half_to_float((u16)bits) : bf16_to_float((u16)bits); }
__device__ __forceinline__ u32 to_half(float x) { return HALF ? float_to_half(x) : float_to_bf16(x); }

__device__ __forceinline__ float4 load4(const u16* at) {
    const uint2 x = *(const uint2*)at;
    return make_float4(from_half(x.x & 0xffff), from_half(x.x >> 16), from_half(x.y & 0xffff), from_half(x.y >> 16));
}

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

__device__ __forceinline__ float4 scaled_sum(float4 a, float s, float4 sum) {
    return make_float4(fmaf(a.x, s, sum.x), fmaf(a.y, s, sum.y), fmaf(a.z, s, sum.z), fmaf(a.w, s, sum.w));
}

__device__ __forceinline__ float4 scaled(float4 a, float s) { return make_float4(a.x * s, a.y * s, a.z * s, a.w * s); }

__device__ __forceinline__ float silu(float x) { return x / (1.f + expf(-x)); }

#include "prompt/delta_heads.cuh"

// One block of CHUNK threads for a chunk of a head: (chunks, sequences * VALUE_HEADS) blocks.
//
// rates float32[sequences * tokens, 2, VALUE_HEADS], the products with the matrices of beta and alpha; dt, a float32[VALUE_HEADS].
// kk and qk float32[.., chunks, CHUNK, CHUNK], K K^T and Q K^T, become T beta and Q K^T D; scaled_keys of the same shape: T beta exp(G).
// since, until float32[sequences, VALUE_HEADS, padded]: exp(G) and exp(G[last] - G).
extern "C" __global__ void __launch_bounds__(CHUNK)
solve(const float* rates, const float* dt, const float* a, int tokens, float* kk, float* qk, float* scaled_keys, float* since, float* until) {
    alignas(16) __shared__ float lower[CHUNK][CHUNK];
    __shared__ double total[CHUNK];
    __shared__ float betas[CHUNK];
    const int j = threadIdx.x, head = blockIdx.y % VALUE_HEADS, sequence = blockIdx.y / VALUE_HEADS;
    const int token = blockIdx.x * CHUNK + j;
    float beta = 0.f;
    double g = 0.;
    if (token < tokens) {
        const float* rate = rates + ((long long)sequence * tokens + token) * 2 * VALUE_HEADS + head;
        const float x = rate[VALUE_HEADS] + dt[head];
        beta = 1.f / (1.f + expf(-rate[0]));
        g = a[head] * (x > 20.f ? x : log1pf(expf(x)));
    }
    // Sums get large, and only their differences matter.
    total[j] = g;
    __syncthreads();
#pragma unroll
    for (int d = 1; d < CHUNK; d *= 2) {
        const double before = j >= d ? total[j - d] : 0.;
        __syncthreads();
        total[j] += before;
        __syncthreads();
    }
    const long long pair = (long long)blockIdx.y * gridDim.x + blockIdx.x;
    kk += pair * CHUNK * CHUNK + j, qk += pair * CHUNK * CHUNK + j, scaled_keys += pair * CHUNK * CHUNK + j;
    const float mine = expf((float)total[j]);
    since[pair * CHUNK + j] = mine;
    until[pair * CHUNK + j] = expf((float)(total[CHUNK - 1] - total[j]));
    betas[j] = beta;
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < CHUNK; i++) {
        const float between = i >= j ? expf((float)(total[i] - total[j])) : 0.f;
        lower[i][j] = i > j ? betas[i] * kk[i * CHUNK] * between : 0.f;
        qk[i * CHUNK] = i >= j ? qk[i * CHUNK] * between : 0.f;
    }
    __syncthreads();
    float t[CHUNK];  // column j of T, from above to below
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int m = 0; m < i; m += 4) {
            const float4 row = *(const float4*)&lower[i][m];
            sum.x = fmaf(row.x, t[m], sum.x);
            if (m + 1 < i) sum.y = fmaf(row.y, t[m + 1], sum.y);
            if (m + 2 < i) sum.z = fmaf(row.z, t[m + 2], sum.z);
            if (m + 3 < i) sum.w = fmaf(row.w, t[m + 3], sum.w);
        }
        t[i] = (i == j ? 1.f : 0.f) - ((sum.x + sum.y) + (sum.z + sum.w));
        const float scaled = t[i] * beta;
        kk[i * CHUNK] = scaled;
        scaled_keys[i * CHUNK] = scaled * mine;
    }
}

#ifndef ON_HOST
__device__ __forceinline__ void copy_to_shared(float* to, const float* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#else
inline void copy_to_shared(float* to, const float* from) { memcpy(to, from, 16); }
#endif

constexpr int SLICE = 32, SLICE_THREADS = 256;    // columns of the memory of a block
constexpr int KEY_PITCH = KEY + 4;                // of rows in shared memory: 8 rows begin in different banks
constexpr int TILE = CHUNK * KEY_PITCH;
constexpr int BANDS = (KEY + 127) / 128;          // rows of the memory: 4 of each 128 per thread

// The chunks of a head one after the other, SLICE columns of its memory per block: ((VALUE + SLICE - 1) / SLICE, sequences * VALUE_HEADS)
// blocks. values float32[.., padded, VALUE], T beta V, become E; keys float32[.., padded, KEY] = T beta exp(G) K; k; since, until as
// above; before and after float32[sequences, VALUE_HEADS, KEY, VALUE], the memory before the first and after the last token, perhaps
// the same, null for zeros and for nowhere; states float32[sequences, VALUE_HEADS, chunks, KEY, VALUE], that before each chunk.
extern "C" __global__ void __launch_bounds__(SLICE_THREADS)
chunks(float* values, const float* keys, const float* k, const float* since, const float* until, int n_chunks, const float* before,
       float* after, float* states) {
#ifndef ON_HOST
    extern __shared__ __align__(16) char shared[];
#endif
    float* tiles = (float*)shared;                           // [STAGES][2][CHUNK][KEY_PITCH]
    float* memory = tiles + STAGES * 2 * TILE;               // [KEY][SLICE]
    float* errors = memory + KEY * SLICE;                    // [CHUNK][SLICE], times `until`
    const int columns = threadIdx.x % 8 * 4, part = threadIdx.x / 8;
    const int column = blockIdx.x * SLICE + columns;
    const bool inside = column < VALUE;
    const long long head = blockIdx.y, first = head * n_chunks;
    values += first * CHUNK * VALUE + column, keys += first * CHUNK * KEY, k += first * CHUNK * KEY;
    since += first * CHUNK, until += first * CHUNK, states += first * KEY * VALUE + column;

    auto load = [&](int chunk) {
        float* to = tiles + chunk % STAGES * 2 * TILE;
        for (int i = threadIdx.x; i < CHUNK * (KEY / 4); i += SLICE_THREADS) {
            const int row = i / (KEY / 4), c = i % (KEY / 4) * 4;
            const long long from = ((long long)chunk * CHUNK + row) * KEY + c;
            copy_to_shared(to + row * KEY_PITCH + c, keys + from);
            copy_to_shared(to + TILE + row * KEY_PITCH + c, k + from);
        }
        end_of_copies();
    };
    load(0);
    float4 s[BANDS][4];
#pragma unroll
    for (int b = 0; b < BANDS; b++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int row = 128 * b + 4 * part + r;
            s[b][r] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (row >= KEY) continue;
            if (before != nullptr && inside) s[b][r] = *(const float4*)(before + (head * KEY + row) * VALUE + column);
            *(float4*)(memory + row * SLICE + columns) = s[b][r];
        }
#pragma unroll 1
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        if (STAGES == 2 && chunk + 1 < n_chunks) {
            load(chunk + 1);
            wait_for_copies<1>();
        } else {
            if (STAGES == 1 && chunk) load(chunk);
            wait_for_copies<0>();
        }
        const float* keys_here = tiles + chunk % STAGES * 2 * TILE;
        const float* k_here = keys_here + TILE;
        const int row = chunk * CHUNK + 2 * part;
        float4 v[2], e[2];
        float to_end[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            e[r] = v[r] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (inside) v[r] = *(const float4*)(values + (long long)(row + r) * VALUE);
            to_end[r] = until[row + r];
        }
        const float whole = since[chunk * CHUNK + CHUNK - 1];
        if (inside)
#pragma unroll
            for (int b = 0; b < BANDS; b++)
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const int at = 128 * b + 4 * part + r;
                    if (at < KEY) *(float4*)(states + ((long long)chunk * KEY + at) * VALUE) = s[b][r];
                }
        __syncthreads();
#pragma unroll 4
        for (int c = 0; c < KEY; c += 4) {
            float4 m[4];
#pragma unroll
            for (int r = 0; r < 4; r++) m[r] = *(const float4*)(memory + (c + r) * SLICE + columns);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float4 x = *(const float4*)(keys_here + (2 * part + r) * KEY_PITCH + c);
                e[r] = scaled_sum(m[0], x.x, e[r]);
                e[r] = scaled_sum(m[1], x.y, e[r]);
                e[r] = scaled_sum(m[2], x.z, e[r]);
                e[r] = scaled_sum(m[3], x.w, e[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            e[r] = make_float4(v[r].x - e[r].x, v[r].y - e[r].y, v[r].z - e[r].z, v[r].w - e[r].w);
            if (inside) *(float4*)(values + (long long)(row + r) * VALUE) = e[r];
            *(float4*)(errors + (2 * part + r) * SLICE + columns) = scaled(e[r], to_end[r]);
        }
        __syncthreads();
#pragma unroll
        for (int b = 0; b < BANDS; b++) {
            const int at = 128 * b + 4 * part;
            if (at >= KEY) continue;
#pragma unroll
            for (int r = 0; r < 4; r++) s[b][r] = scaled(s[b][r], whole);
#pragma unroll 8
            for (int t = 0; t < CHUNK; t++) {
                const float4 x = *(const float4*)(k_here + t * KEY_PITCH + at), y = *(const float4*)(errors + t * SLICE + columns);
                s[b][0] = scaled_sum(y, x.x, s[b][0]);
                s[b][1] = scaled_sum(y, x.y, s[b][1]);
                s[b][2] = scaled_sum(y, x.z, s[b][2]);
                s[b][3] = scaled_sum(y, x.w, s[b][3]);
            }
#pragma unroll
            for (int r = 0; r < 4; r++) *(float4*)(memory + (at + r) * SLICE + columns) = s[b][r];
        }
        __syncthreads();
    }
    if (after == nullptr || !inside) return;
#pragma unroll
    for (int b = 0; b < BANDS; b++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int at = 128 * b + 4 * part + r;
            if (at < KEY) *(float4*)(after + (head * KEY + at) * VALUE + column) = s[b][r];
        }
}

constexpr int GATED_WARPS = 8;

// out half[sequences * tokens, VALUE_HEADS, VALUE] = norm(exp(G) remembered + seen) * silu(z); remembered = Q S and seen = (Q K^T D) E,
// float32[sequences, VALUE_HEADS, padded, VALUE]; z half, of rows `pitch` elements apart; weight float32[VALUE]. One warp per token and
// head: ((tokens + GATED_WARPS - 1) / GATED_WARPS, sequences * VALUE_HEADS) blocks.
extern "C" __global__ void __launch_bounds__(32 * GATED_WARPS)
gated(const float* remembered, const float* seen, const float* since, const u16* z, int pitch, const float* weight, float eps, int tokens,
      int padded, u16* out) {
    constexpr int PARTS = (VALUE + 127) / 128;
    const int lane = threadIdx.x % 32, token = blockIdx.x * GATED_WARPS + threadIdx.x / 32;
    const int head = blockIdx.y % VALUE_HEADS, sequence = blockIdx.y / VALUE_HEADS;
    if (token >= tokens) return;
    const long long at = (long long)blockIdx.y * padded + token, row = (long long)sequence * tokens + token;
    const float factor = since[at];
    float4 y[PARTS];
    float square = 0.f;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const int c = 4 * lane + 128 * p;
        y[p] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (c >= VALUE) continue;
        y[p] = scaled_sum(*(const float4*)(remembered + at * VALUE + c), factor, *(const float4*)(seen + at * VALUE + c));
        square = dot4(y[p], y[p], square);
    }
    const float scale = rsqrtf(warp_sum(square) / (float)VALUE + eps);
    const u16* gates = z + row * pitch + (JOINED ? head / GROUP * TURN + 2 * KEY + (GROUP + head % GROUP) * VALUE : head * VALUE);
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const int c = 4 * lane + 128 * p;
        if (c >= VALUE) continue;
        const float4 g = load4(gates + c), w = *(const float4*)(weight + c);
        uint2 packed;
        packed.x = to_half(y[p].x * scale * w.x * silu(g.x)) | to_half(y[p].y * scale * w.y * silu(g.y)) << 16;
        packed.y = to_half(y[p].z * scale * w.z * silu(g.z)) | to_half(y[p].w * scale * w.w * silu(g.w)) << 16;
        *(uint2*)(out + (row * VALUE_HEADS + head) * VALUE + c) = packed;
    }
}
