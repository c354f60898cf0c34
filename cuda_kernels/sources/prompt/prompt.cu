// Elementwise kernels of the prompt path. Each reads and writes device memory once, 16 bytes a thread at a time.
//
// The residual stream h is float32[T, width]; everything else is HALF. The output of a branch is
// added to h. It has either one row per token or `n_slots` rows per token, the outputs of its
// experts: h[t] += sum over k of weights[t, k] * delta[rows[t, k]], k ascending; rows[t, k] < 0
// adds nothing. `add_more_norm` also adds `extra`, one row per token.
#include "prompt/norm.cuh"
#include "prompt/overlap.cuh"
#include "units/gating.cuh"
#include "units/xielu.cuh"

// h += delta; x = h / sqrt(mean(h^2) + eps) * weight in HALF (Zhang and Sennrich, 2019), and in
// float32 where `exact` is given. `permuted`: x with the columns of each 128 in the order of
// prompt/grouped.cu, its rows filled up with zeros to whole groups of 128; `plain`, if given, is x
// without that. One CUDA block per token. UNITS units per thread, so width <= UNITS * 8 * NORM_THREADS. n_slots = 0: nothing to add; weights = null: one row per token, row t. extra, only next to weights,
// or null.
// POST: what is added is divided by its root mean square and multiplied by `post_weight` first, and the sum is multiplied by `by`.
// CENTERED: x = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias (Ba et al., 2016), bias float32[width] or null.
template <int UNITS, bool CENTERED, bool POST>
__device__ __forceinline__ void add_norm(float* h, const uint4* delta, const float* weights, const int* rows, int n_slots,
                                         const uint4* extra, const float* shares, const float* weight, const float* bias, float eps, uint4* x,
                                         int permuted, uint4* plain, float* exact, int width, const float* post_weight = nullptr, float post_eps = 0, float by = 1) {
    __shared__ float sums[NORM_THREADS / 32];
    const long long t = blockIdx.x;
    const int units = width / 8;
    h += t * width;
    auto added = [&](int unit, float (&y)[8]) {
        if (weights == nullptr) {
            unpack8<HALF>(delta[t * units + unit], y);
            return;
        }
        if (extra != nullptr) {
            extra_unit(extra, shares, t, unit, units, y);
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) y[j] = 0;
        }
        for (int k = 0; k < n_slots; k++) {
            const long long row = rows[t * n_slots + k];
            if (row < 0) continue;
            float d[8];
            unpack8<HALF>(delta[row * units + unit], d);
            const float w = weights[t * n_slots + k];
#pragma unroll
            for (int j = 0; j < 8; j++) y[j] += w * d[j];
        }
    };
    float v[UNITS][8], y[POST ? UNITS : 1][8];
    float sum = 0, post_scale = 1;
    if constexpr (POST) {
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const int unit = threadIdx.x + i * NORM_THREADS;
            if (unit >= units) continue;
            added(unit, y[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += y[i][j] * y[i][j];
        }
        post_scale = 1.0f / sqrtf(norm_sum(sum, sums) / width + post_eps);
        sum = 0;
        __syncthreads();  // the sums are read
    }
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int unit = threadIdx.x + i * NORM_THREADS;
        if (unit >= units) continue;
        load8(h + unit * 8, v[i]);
        if constexpr (POST) {
            float w[8];
            load8(post_weight + unit * 8, w);
#pragma unroll
            for (int j = 0; j < 8; j++) v[i][j] = (v[i][j] + y[i][j] * post_scale * w[j]) * by;
            store8(h + unit * 8, v[i]);
        } else if (n_slots) {
            added(unit, y[0]);
#pragma unroll
            for (int j = 0; j < 8; j++) v[i][j] += y[0][j];
            store8(h + unit * 8, v[i]);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) sum += CENTERED ? v[i][j] : v[i][j] * v[i][j];
    }
    write_normed<UNITS, CENTERED>(v, sum, sums, t, weight, bias, eps, x, permuted, plain, exact, width);
}

#define ADD_NORM(UNITS) \
    extern "C" __global__ void __launch_bounds__(NORM_THREADS) \
    add_norm_##UNITS(float* h, const uint4* delta, const float* weights, const int* rows, int n_slots, const float* weight, float eps, \
                     uint4* x, int permuted, float* exact, int width) { \
        follow_launch_before(); \
        add_norm<UNITS, false, false>(h, delta, weights, rows, n_slots, nullptr, nullptr, weight, nullptr, eps, x, permuted, nullptr, exact, \
                                      width); \
    } \
    extern "C" __global__ void __launch_bounds__(NORM_THREADS) \
    add_more_norm_##UNITS(float* h, const uint4* delta, const float* weights, const int* rows, int n_slots, const float* weight, float eps, \
                          uint4* x, int permuted, float* exact, int width, const uint4* extra, const float* shares, uint4* plain) { \
        follow_launch_before(); \
        add_norm<UNITS, false, false>(h, delta, weights, rows, n_slots, extra, shares, weight, nullptr, eps, x, permuted, plain, exact, \
                                      width); \
    } \
    extern "C" __global__ void __launch_bounds__(NORM_THREADS) \
    add_layer_norm_##UNITS(float* h, const uint4* delta, const float* weights, const int* rows, int n_slots, const float* weight, \
                           const float* bias, float eps, uint4* x, int permuted, float* exact, int width) { \
        follow_launch_before(); \
        add_norm<UNITS, true, false>(h, delta, weights, rows, n_slots, nullptr, nullptr, weight, bias, eps, x, permuted, nullptr, exact, \
                                     width); \
    } \
    extern "C" __global__ void __launch_bounds__(NORM_THREADS) \
    add_post_norm_##UNITS(float* h, const uint4* delta, const float* weights, const int* rows, int n_slots, const float* weight, float eps, \
                          uint4* x, int permuted, float* exact, int width, const float* post_weight, float post_eps, float by) { \
        follow_launch_before(); \
        add_norm<UNITS, false, true>(h, delta, weights, rows, n_slots, nullptr, nullptr, weight, nullptr, eps, x, permuted, nullptr, exact, \
                                     width, post_weight, post_eps, by); \
    }
ADD_NORM(1)
ADD_NORM(2)
ADD_NORM(4)
ADD_NORM(8)

// factors[t] = 1 / sqrt(mean(x^2) + eps) of two ranges of the columns of products HALF[T, 8 * pitch]: of q_units units from the first on, and of
// k_units from key_at on; float32[T, 2]. Two blocks per token; nothing is written for a range of none.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
row_factors(const uint4* products, int pitch, int q_units, int key_at, int k_units, float eps, float* factors) {
    follow_launch_before();
    __shared__ float sums[NORM_THREADS / 32];
    const int units = blockIdx.y ? k_units : q_units;
    if (!units) return;
    products += (long long)blockIdx.x * pitch + (blockIdx.y ? key_at : 0);
    float sum = 0;
    for (int unit = threadIdx.x; unit < units; unit += NORM_THREADS) {
        float x[8];
        unpack8<HALF>(products[unit], x);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += x[j] * x[j];
    }
    sum = norm_sum(sum, sums);
    if (threadIdx.x == 0) factors[(long long)blockIdx.x * 2 + blockIdx.y] = 1.0f / sqrtf(sum / (units * 8) + eps);
}

// out[r, c] = joined(gate[r, c], up[r, c]), gate and up [rows, cols] of which rows are `stride` elements apart. One unit per thread.
template <int KIND>
__device__ __forceinline__ void gate_rows(const unsigned short* gate, const unsigned short* up, uint4* out, long long rows, int cols,
                                          int stride, float limit) {
    const long long unit = blockIdx.x * 256ll + threadIdx.x;
    const int units = cols / 8;
    const long long row = unit / units;
    if (row >= rows) return;
    const long long at = row * stride + (unit - row * units) * 8;
    float g[8], u[8];
    unpack8<HALF>(*reinterpret_cast<const uint4*>(gate + at), g);
    unpack8<HALF>(*reinterpret_cast<const uint4*>(up + at), u);
#pragma unroll
    for (int j = 0; j < 8; j++) g[j] = joined<KIND>(g[j], u[j], limit);
    out[unit] = pack8<HALF>(g);
}

#define GATE(NAME, KIND) \
    extern "C" __global__ void __launch_bounds__(256) \
    NAME(const unsigned short* gate, const unsigned short* up, uint4* out, long long rows, int cols, int stride, float limit) { \
        follow_launch_before(); \
        gate_rows<KIND>(gate, up, out, rows, cols, stride, limit); \
    }
GATE(silu_gate, SILU)
GATE(gelu_gate, GELU)
GATE(gelu_erf_gate, GELU_ERF)
GATE(swiglu_oai_gate, SWIGLU_OAI)
GATE(relu_gate, RELU)
GATE(capped_silu_gate, CAPPED_SILU)

// x = xielu(x), in place. One unit per thread.
extern "C" __global__ void __launch_bounds__(256)
xielu_rows(uint4* x, long long units, float alpha_p, float alpha_n, float beta, float eps) {
    follow_launch_before();
    const long long unit = blockIdx.x * 256ll + threadIdx.x;
    if (unit >= units) return;
    float v[8];
    unpack8<HALF>(x[unit], v);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = xielu(v[j], {alpha_p, alpha_n, beta, eps});
    x[unit] = pack8<HALF>(v);
}

// x[s, i, h] *= sigmoid(log_sums[s, h, i] - sinks[h]): what a head's sink leaves of its softmax. Heads of `units` units, n rows i per
// sequence s; sequences, rows and heads are so many elements apart. One unit per thread.
extern "C" __global__ void __launch_bounds__(256)
take_sinks(unsigned short* x, const float* log_sums, const float* sinks, long long rows, int n, int heads, int units,
           long long sequence_stride, long long row_stride, long long head_stride) {
    follow_launch_before();
    const long long index = blockIdx.x * 256ll + threadIdx.x;
    const int unit = index % units, head = index / units % heads;
    const long long row = index / units / heads;
    if (row >= rows) return;
    const float share = 1.0f / (1.0f + __expf(sinks[head] - log_sums[(row / n * heads + head) * n + row % n]));
    uint4* at = reinterpret_cast<uint4*>(x + row / n * sequence_stride + row % n * row_stride + head * head_stride + unit * 8);
    float v[8];
    unpack8<HALF>(*at, v);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] *= share;
    *at = pack8<HALF>(v);
}

// out[i] = x[sources[i] / n_slots], rows of `units` units; nothing where sources[i] < 0. One row per CUDA block of any size.
extern "C" __global__ void __launch_bounds__(256)
gather_rows(const uint4* x, const int* sources, int n_slots, uint4* out, int units) {
    follow_launch_before();
    const long long row = blockIdx.x;
    const int source = sources[row];
    if (source < 0) return;
    x += (long long)(source / n_slots) * units;
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) out[row * units + unit] = x[unit];
}

// out = x, from the other 16-bit float to HALF. One unit per thread.
extern "C" __global__ void __launch_bounds__(256)
from_other(const uint4* x, uint4* out, long long units) {
    follow_launch_before();
    const long long unit = blockIdx.x * 256ll + threadIdx.x;
    if (unit >= units) return;
    float v[8];
    unpack8<!HALF>(x[unit], v);
    out[unit] = pack8<HALF>(v);
}
