// A warp prepares one head of one position: norm, rotation, Hadamard transform. Global memory is
// read for several rows before the first is processed, as its latency exceeds the work. The reads
// bypass L1: the previous launch may still write the data while this kernel runs, which the
// read-only path (ld.global.nc, which the compiler uses for const __restrict__) does not allow.
#pragma once
#include "step/common.cuh"

// Element 32 t + lane of a row of N elements is x[t] of a lane.
template <int N>
struct Row {
    static constexpr int EACH = (N + 31) / 32;
    float x[EACH];

    __device__ __forceinline__ void fetch(const float* from, int lane) {
#pragma unroll
        for (int t = 0; t < EACH; t++) x[t] = N % 32 == 0 || 32 * t + lane < N ? __ldcg(from + 32 * t + lane) : 0.f;
    }

    // Take a row of shared memory.
    __device__ __forceinline__ void take(const float* row, int lane) {
#pragma unroll
        for (int t = 0; t < EACH; t++) x[t] = N % 32 == 0 || 32 * t + lane < N ? row[32 * t + lane] : 0.f;
        __syncwarp();
    }

    // Add weights, which no launch writes.
    __device__ __forceinline__ void plus(const float* bias, int lane) {
#pragma unroll
        for (int t = 0; t < EACH; t++) x[t] += N % 32 == 0 || 32 * t + lane < N ? bias[32 * t + lane] : 0.f;
    }

    __device__ __forceinline__ float inverse(float eps) const {
        float sum = 0.f;
#pragma unroll
        for (int t = 0; t < EACH; t++) sum = fmaf(x[t], x[t], sum);
        return rsqrtf(warp_sum(sum) / (float)N + eps);
    }

    // x / sqrt(mean(x^2) + eps) * weight
    __device__ __forceinline__ void norm(const Row& weight, float eps) {
        const float factor = inverse(eps);
#pragma unroll
        for (int t = 0; t < EACH; t++) x[t] = x[t] * factor * weight.x[t];
    }

    // x / sqrt(mean(x^2) + eps)
    __device__ __forceinline__ void divide(float eps) {
        const float factor = inverse(eps);
#pragma unroll
        for (int t = 0; t < EACH; t++) x[t] *= factor;
    }

    __device__ __forceinline__ void put(float* row, int lane) const {
#pragma unroll
        for (int t = 0; t < EACH; t++)
            if (N % 32 == 0 || 32 * t + lane < N) row[32 * t + lane] = x[t];
        __syncwarp();
    }
};

// The rotation of a position: pair 32 t + lane of ROTATED / 2 has (cos, sin) = turn[t].
template <int ROTATED>
struct Turns {
    static constexpr int PAIRS = ROTATED / 2, EACH = (PAIRS + 31) / 32;
    float2 turn[EACH ? EACH : 1];

    __device__ __forceinline__ void fetch(const float* angles, int lane) {
#pragma unroll
        for (int t = 0; t < EACH; t++)
            if (PAIRS % 32 == 0 || 32 * t + lane < PAIRS) turn[t] = __ldcg((const float2*)angles + 32 * t + lane);
    }

    // Pairs are (2j, 2j+1), or (j, j + ROTATED/2) with NEOX.
    template <bool NEOX>
    __device__ __forceinline__ void apply(float* row, int lane) const {
#pragma unroll
        for (int t = 0; t < EACH; t++) {
            const int j = 32 * t + lane, ia = NEOX ? j : 2 * j, ib = NEOX ? j + PAIRS : 2 * j + 1;
            if (PAIRS % 32 && j >= PAIRS) continue;
            const float a = row[ia], b = row[ib];
            row[ia] = a * turn[t].x - b * turn[t].y;
            row[ib] = a * turn[t].y + b * turn[t].x;
        }
        __syncwarp();
    }
};

// The normalised Walsh-Hadamard transform of each block of `block` elements (a power of two); its own inverse.
__device__ __forceinline__ void hadamard_row(float* row, int n, int block, int lane) {
    for (int step = 1; step < block; step *= 2) {
        for (int j = lane; j < n / 2; j += 32) {
            const int i = j / step * 2 * step + j % step;
            const float a = row[i], b = row[i + step];
            row[i] = a + b;
            row[i + step] = a - b;
        }
        __syncwarp();
    }
    const float scale = (float)(1.0 / sqrt((double)block));
    for (int i = lane; i < n; i += 32) row[i] *= scale;
    __syncwarp();
}
