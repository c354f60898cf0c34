// The softmax of scores in memory, for attention that no flash attention computes: scores with a cap, and heads of more than 256 elements.
#include "prompt/common.cuh"
#include "prompt/overlap.cuh"

constexpr int SCORE_THREADS = 256;

__device__ __forceinline__ float over_block(float x, bool largest, float (&of_warps)[SCORE_THREADS / 32]) {
    if (largest) {
#pragma unroll
        for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    } else x = warp_sum(x);
    __syncthreads();  // the results of the call before are read
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_warps[0];
#pragma unroll
    for (int i = 1; i < SCORE_THREADS / 32; i++) x = largest ? fmaxf(x, of_warps[i]) : x + of_warps[i];
    return x;
}

// out HALF[rows, keys] = softmax(capped(scale * scores)), scores float32[rows, keys], capped(x) = cap * tanh(x / cap) for a cap above 0. Row r
// is that of query r % queries, which sees keys first + r % queries and, with a window, at most window - 1 before it, else all before it. sinks
// float32[heads], or null: a further score of head r / queries, not scaled, whose share is left out. `scores` is overwritten. One row per
// CUDA block.
extern "C" __global__ void __launch_bounds__(SCORE_THREADS)
softmax_scores(float* scores, unsigned short* out, int keys, int queries, int first, int window, float scale, float cap, const float* sinks) {
    follow_launch_before();
    __shared__ float of_warps[SCORE_THREADS / 32];
    const long long row = blockIdx.x;
    scores += row * keys, out += row * keys;
    const int last = first + (int)(row % queries), begin = window > 0 ? max(0, last - window + 1) : 0;
    const float by = cap > 0 ? 2 * scale / cap : scale;
    const float sink = sinks ? sinks[row / queries] : -__int_as_float(0x7f800000);
    float most = sink;
#pragma unroll 4
    for (int i = begin + threadIdx.x; i <= last; i += SCORE_THREADS) {
        float x = scores[i] * by;
        if (cap > 0) x = cap * (1.0f - 2.0f / (__expf(x) + 1.0f));
        scores[i] = x;
        most = fmaxf(most, x);
    }
    most = over_block(most, true, of_warps);
    float sum = threadIdx.x ? 0.0f : __expf(sink - most);
#pragma unroll 4
    for (int i = begin + threadIdx.x; i <= last; i += SCORE_THREADS) sum += __expf(scores[i] - most);
    const float inverse = 1.0f / over_block(sum, false, of_warps);
#pragma unroll 4
    for (int i = threadIdx.x; i < keys; i += SCORE_THREADS) {
        const float x = i >= begin && i <= last ? __expf(scores[i] - most) * inverse : 0.0f;
        out[i] = (unsigned short)pack2<HALF>(x, 0.0f);
    }
}
