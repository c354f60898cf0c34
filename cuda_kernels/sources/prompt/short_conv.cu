// The gated short convolution of the tokens of sequences: out = c * conv(b * x). A thread has 8 channels and TOKENS tokens one after the other.
//
// Compiled per type of the activations (HALF) and number of TAPS.
#include "prompt/common.cuh"
#include "prompt/overlap.cuh"

constexpr int THREADS = 128, TOKENS = 32, PAST = TAPS - 1;
constexpr bool F16 = HALF == 1;
static_assert(TAPS >= 2 && TAPS <= 8, "a window that fits into registers");

// b * x of 8 channels; rows have 3 * units units of 8 elements: b, c and x.
__device__ __forceinline__ void gated(const uint4* row, int units, float (&y)[8]) {
    float b[8], x[8];
    unpack8<F16>(row[0], b);
    unpack8<F16>(row[2 * units], x);
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = b[i] * x[i];
}

// products HALF[sequences * tokens, 3 * channels]; past float32[PAST, channels], b * x before the first token, or null: zero; taps
// float32[channels, TAPS]; out HALF[sequences * tokens, channels]; channels = 8 * units. Blocks: channels, pieces of the tokens, sequences.
extern "C" __global__ void __launch_bounds__(THREADS)
short_conv(const uint4* products, const float* past, const float* __restrict__ taps, uint4* out, int tokens, int units, int pieces) {
    follow_launch_before();
    const int unit = blockIdx.x * THREADS + threadIdx.x, piece = blockIdx.y % pieces, sequence = blockIdx.y / pieces;
    if (unit >= units) return;
    const int first = piece * TOKENS, stop = min(tokens, first + TOKENS), channels = 8 * units;
    products += (long long)sequence * tokens * 3 * units + unit, out += (long long)sequence * tokens * units + unit;
    float window[TAPS][8], weights[TAPS][8];
#pragma unroll
    for (int t = 0; t < TAPS; t++) {
#pragma unroll
        for (int i = 0; i < 8; i++) weights[t][i] = taps[(8 * unit + i) * TAPS + t];
    }
#pragma unroll
    for (int t = 0; t < PAST; t++) {
        const int token = first - PAST + t;
        if (token >= 0) {
            gated(products + (long long)token * 3 * units, units, window[t]);
        } else if (past != nullptr) {
            load8(past + (long long)(PAST + token) * channels + 8 * unit, window[t]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) window[t][i] = 0.f;
        }
    }
    for (int token = first; token < stop; token++) {
        const uint4* row = products + (long long)token * 3 * units;
        gated(row, units, window[PAST]);
        float c[8], y[8];
        unpack8<F16>(row[units], c);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float sum = window[0][i] * weights[0][i];
#pragma unroll
            for (int t = 1; t < TAPS; t++) sum = fmaf(window[t][i], weights[t][i], sum);
            y[i] = c[i] * sum;
        }
        out[(long long)token * units] = pack8<F16>(y);
#pragma unroll
        for (int t = 0; t < PAST; t++) {
#pragma unroll
            for (int i = 0; i < 8; i++) window[t][i] = window[t + 1][i];
        }
    }
}
