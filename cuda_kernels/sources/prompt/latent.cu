// Latent attention of a prompt, between the matrix products: norms of latent vectors, rotations, and what goes to the cache.
//
// HALF is the type of the products, STORED that of the cache and of attention: 1 is float16, 0 bfloat16, 2 (STORED only) float32.
// A unit is 8 elements. Rotated pairs are (2j, 2j+1), or with `neox` (j, j + rope/2), which needs a rope of whole pairs of units.
// cos, sin float32[positions of a sequence, rope / 2].
#include "prompt/common.cuh"
#include "prompt/overlap.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

__device__ __forceinline__ void store_unit(void* to, long long unit, const float (&x)[8]) {
    if constexpr (STORED == 2) store8(reinterpret_cast<float*>(to) + unit * 8, x);
    else reinterpret_cast<uint4*>(to)[unit] = pack8<STORED == 1>(x);
}

// Rotate unit `unit` of what a head at a position rotates, whose units begin at `units`.
__device__ __forceinline__ void rotate(const uint4* units, int unit, const float* cos, const float* sin, long long position, int rope,
                                       int neox, float (&x)[8]) {
    unpack8<HALF>(units[unit], x);
    if (neox) {
        const int half = rope / 16;  // units that have the first elements of pairs
        const bool first = unit < half;
        const long long at = position * (rope / 2) + (first ? unit : unit - half) * 8;
        float y[8];
        unpack8<HALF>(units[first ? unit + half : unit - half], y);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float c = cos[at + j], s = sin[at + j];
            x[j] = first ? x[j] * c - y[j] * s : y[j] * s + x[j] * c;
        }
        return;
    }
    const long long at = position * (rope / 2) + unit * 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float c = cos[at + j], s = sin[at + j], a = x[2 * j], b = x[2 * j + 1];
        x[2 * j] = a * c - b * s;
        x[2 * j + 1] = a * s + b * c;
    }
}

// The inverse of the root mean square of n elements, the same in all lanes.
__device__ __forceinline__ float inverse_rms(const uint4* x, int n, float eps, int lane) {
    float sum = 0.f;
    for (int unit = lane; unit < n / 8; unit += 32) {
        float y[8];
        unpack8<HALF>(x[unit], y);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += y[j] * y[j];
    }
    return 1.0f / sqrtf(warp_sum(sum) / n + eps);
}

__device__ __forceinline__ void normed(const uint4* x, const float* weight, float inverse, int unit, float (&y)[8]) {
    float w[8];
    unpack8<HALF>(x[unit], y);
    load8(weight + unit * 8, w);
#pragma unroll
    for (int j = 0; j < 8; j++) y[j] = y[j] * inverse * w[j];
}

// out half[T, n] = norm(x) of rows `stride` elements apart. A warp per row.
extern "C" __global__ void __launch_bounds__(THREADS)
norm_rows(const uint4* x, int tokens, int n, int stride, const float* weight, float eps, uint4* out) {
    follow_launch_before();
    const int t = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= tokens) return;
    const uint4* row = x + (long long)t * (stride / 8);
    const float inverse = inverse_rms(row, n, eps, lane);
    for (int unit = lane; unit < n / 8; unit += 32) {
        float y[8];
        normed(row, weight, inverse, unit, y);
        out[(long long)t * (n / 8) + unit] = pack8<HALF == 1>(y);
    }
}

// Rows [latent vector of `rank` | key of `rope`], `stride` elements apart, to rows `first + t` of the cache: [rotated key | normed
// latent vector]. A warp per row.
extern "C" __global__ void __launch_bounds__(THREADS)
latent_rows(const uint4* x, int tokens, int rank, int rope, int stride, const float* weight, float eps, const float* cos,
            const float* sin, int per_sequence, int neox, void* rows, long long first) {
    follow_launch_before();
    const int t = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= tokens) return;
    const uint4* row = x + (long long)t * (stride / 8);
    const long long to = (first + t) * ((rank + rope) / 8);
    const float inverse = inverse_rms(row, rank, eps, lane);
    for (int unit = lane; unit < (rank + rope) / 8; unit += 32) {
        float y[8];
        if (unit < rope / 8) {
            rotate(row + rank / 8, unit, cos, sin, t % per_sequence, rope, neox, y);
        } else {
            normed(row, weight, inverse, unit - rope / 8, y);
        }
        store_unit(rows, to + unit, y);
    }
}

// Heads [nope | rope] of queries, rows `stride` elements apart, to out[T, heads, nope + rope]: the end rotated, all of it times
// factors[position], where these are given. A thread per unit.
extern "C" __global__ void __launch_bounds__(THREADS)
latent_heads(const uint4* q, int tokens, int heads, int nope, int rope, int stride, const float* cos, const float* sin,
             int per_sequence, int neox, const float* factors, void* out) {
    follow_launch_before();
    const int units = (nope + rope) / 8;
    const long long i = blockIdx.x * (long long)THREADS + threadIdx.x, all = (long long)heads * units, t = i / all;
    if (t >= tokens) return;
    const int unit = int(i % units), position = int(t % per_sequence);
    float x[8];
    const uint4* from = q + t * (stride / 8) + i % all;
    if (unit < nope / 8) unpack8<HALF>(*from, x);
    else rotate(from - (unit - nope / 8), unit - nope / 8, cos, sin, position, rope, neox, x);
    if (factors != nullptr) {
        const float factor = factors[position];
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] *= factor;
    }
    store_unit(out, i, x);
}

// The rotated keys of rows[N, width], their first `rope` elements, to the end of every head of keys[N, heads, nope + rope], both in
// 16 bits. A thread per unit.
extern "C" __global__ void __launch_bounds__(THREADS)
latent_keys(const uint4* rows, long long positions, int width, int heads, int nope, int rope, uint4* keys) {
    follow_launch_before();
    const int units = rope / 8;
    const long long i = blockIdx.x * (long long)THREADS + threadIdx.x, row = i / units;  // of all heads
    if (row >= positions * heads) return;
    const int unit = int(i % units);
    keys[row * ((nope + rope) / 8) + nope / 8 + unit] = rows[row / heads * (width / 8) + unit];
}
