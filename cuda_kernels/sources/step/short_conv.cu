// The gated short convolution of 1 to 8 new tokens of a sequence: out = c * conv(b * x). One thread per channel.
//
// Compiled per number of TAPS.
#include "step/common.cuh"

constexpr int THREADS = 128, PAST = TAPS - 1;
static_assert(TAPS >= 2 && TAPS <= 16, "a window that fits into registers");

// products float32[rows, 3 * channels]: b, c and x; taps float32[channels, TAPS]; inputs float32[PAST, channels], b * x before the first row,
// updated in place; out float32[rows, channels]. With `other` they move to and fro: at every second position after `begun` they are read from
// there, at the others written there.
extern "C" __global__ void __launch_bounds__(THREADS)
short_conv(const float* products, const float* __restrict__ taps, float* inputs, float* other, const int* position, const int* begun, float* out,
           int rows, int channels) {
    wait_for_inputs();
    start_dependents();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= channels) return;
    float* to = inputs;
    if (other != nullptr) {
        if ((*position - *begun) & 1) inputs = other;
        else to = other;
    }
    float window[TAPS], weights[TAPS];
#pragma unroll
    for (int t = 0; t < TAPS; t++) {
        weights[t] = taps[i * TAPS + t];
        window[t] = t < PAST ? __ldcg(inputs + t * channels + i) : 0.f;
    }
    for (int row = 0; row < rows; row++) {
        const float* of_row = products + (long long)row * 3 * channels + i;
        window[PAST] = __ldcg(of_row) * __ldcg(of_row + 2 * channels);
        float sum = window[0] * weights[0];
#pragma unroll
        for (int t = 1; t < TAPS; t++) sum = fmaf(window[t], weights[t], sum);
        out[(long long)row * channels + i] = __ldcg(of_row + channels) * sum;
#pragma unroll
        for (int t = 0; t < PAST; t++) window[t] = window[t + 1];
    }
#pragma unroll
    for (int t = 0; t < PAST; t++) to[t * channels + i] = window[t];
}
