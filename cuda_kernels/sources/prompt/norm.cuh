// The norm of rows of the residual stream. One CUDA block of NORM_THREADS per row.
#pragma once
#include "prompt/common.cuh"

constexpr int NORM_THREADS = 256;

// The sum over all threads of a block, in a fixed order.
__device__ __forceinline__ float norm_sum(float sum, float (&sums)[NORM_THREADS / 32]) {
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int warp = 0; warp < NORM_THREADS / 32; warp++) sum += sums[warp];
    return sum;
}

// x = v / sqrt(mean(v^2) + eps) * weight for row t, of which this thread has the units threadIdx.x + i * NORM_THREADS; `sum` is its sum of v^2,
// or of v if CENTERED. Nothing is written if x is null. `plain`: x in the order of columns, next to a permuted one, or null. See `add_norm` for
// the rest.
template <int UNITS, bool CENTERED>
__device__ __forceinline__ void write_normed(float (&v)[UNITS][8], float sum, float (&sums)[NORM_THREADS / 32], long long t,
                                             const float* weight, const float* bias, float eps, uint4* x, int permuted, uint4* plain,
                                             float* exact, int width) {
    const int units = width / 8, stored = permuted ? (width + 127) / 128 * 16 : units;  // of a row of x
    if (x == nullptr) return;
    sum = norm_sum(sum, sums);
    if constexpr (CENTERED) {
        const float mean = sum / width;
        sum = 0;
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            if (threadIdx.x + i * NORM_THREADS >= units) continue;
#pragma unroll
            for (int j = 0; j < 8; j++) v[i][j] -= mean, sum += v[i][j] * v[i][j];
        }
        __syncthreads();  // the first sums are read
        sum = norm_sum(sum, sums);
    }
    const float scale = 1.0f / sqrtf(sum / width + eps);
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int unit = threadIdx.x + i * NORM_THREADS;
        if (unit >= stored) continue;
        uint4 packed = make_uint4(0, 0, 0, 0);
        if (unit < units) {
            float w[8];
            load8(weight + unit * 8, w);
#pragma unroll
            for (int j = 0; j < 8; j++) v[i][j] = v[i][j] * scale * w[j];
            if (CENTERED && bias != nullptr) {
                load8(bias + unit * 8, w);
#pragma unroll
                for (int j = 0; j < 8; j++) v[i][j] += w[j];
            }
            packed = pack8<HALF>(v[i]);
        }
        if (permuted) {  // elements 32q + 4j + r go to 16j + 2q + (r & 1) + 8 (r >> 1)
            u32* group = reinterpret_cast<u32*>(x + t * stored + unit / 16 * 16) + unit % 4 * 16 + unit % 16 / 4;
            group[0] = packed.x, group[4] = packed.y, group[8] = packed.z, group[12] = packed.w;
            if (plain != nullptr && unit < units) plain[t * units + unit] = packed;
        } else {
            x[t * units + unit] = packed;
        }
        if (exact != nullptr && unit < units) store8(exact + t * width + unit * 8, v[i]);
    }
}

// y = the row t of what is added next to other things, half[T, width]; with shares float32[T], times sigmoid(shares[t]).
__device__ __forceinline__ void extra_unit(const uint4* extra, const float* shares, long long t, int unit, int units, float (&y)[8]) {
    unpack8<HALF>(extra[t * units + unit], y);
    if (shares == nullptr) return;
    const float share = 1.0f / (1.0f + __expf(-shares[t]));
#pragma unroll
    for (int j = 0; j < 8; j++) y[j] *= share;
}
